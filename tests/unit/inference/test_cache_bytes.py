"""Predicted bytes of a KV cache are those that Transformers' and Plait's caches have.

The families cache different things: keys of all heads or of one, latent vectors, windows, states.
"""

import pytest
import torch
from torch import nn

from plait.inference.capacity import (
    LAYERS_ON_DEVICE,
    CacheDemand,
    cache_bytes,
    cache_layout_of,
    growing_bytes,
    offloaded_cache,
)
from plait.inference.deployment import InferenceWork, needs_of
from plait.model.facts import attention_facts
from plait.sharded.cache import new_cache
from tests.unit.inference.cache_models import (
    GEMMA4,
    KINDS,
    cache_tensors,
    generated_cache_bytes,
    model_of,
)

# The most ranks that divide a layer's keys and values. GPT-2's, Falcon's and GPT-OSS's attention
# computes all heads on every rank, and DeepSeek caches what all heads are computed from.
MOST_RANKS = {
    "llama": 2,
    "mistral": 2,
    "gpt2": 1,
    "falcon": 1,
    "falcon, every head": 4,
    "gpt_oss": 1,
    "deepseek_v3": 1,
}


def demand(requests, tokens, itemsize=4):
    return CacheDemand(requests=requests, tokens=tokens, itemsize=itemsize)


@pytest.mark.parametrize("name", list(KINDS))
def test_prediction_is_the_cache_of_transformers(name):
    model = model_of(name)
    layout = cache_layout_of(model_of(name, "meta"))
    # Below the window, at it, and beyond it in the prompt and while tokens are added.
    for prompt, new in ((3, 1), (3, 3), (3, 9), (11, 5)):
        expected = generated_cache_bytes(model, prompt, new)
        assert cache_bytes(layout, demand(2, prompt + new - 1)) == expected


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_holds_no_more_memory_than_itself(name):
    """Transformers' layers keep a view of a longer prompt, which would hold its memory."""
    model = model_of(name)
    cache = new_cache(model, None)
    layout = cache_layout_of(model)
    with torch.no_grad():
        for length in (20, 1, 7):
            model(input_ids=torch.full((2, length), 5), past_key_values=cache)
            storages = [tensor.untyped_storage() for tensor in cache_tensors(cache)]
            storage_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
            predicted = cache_bytes(layout, demand(2, cache.get_seq_length()))
            assert sum(storage_bytes.values()) == predicted


@pytest.mark.parametrize("name", list(GEMMA4))
def test_layers_that_differ_in_size(name):
    model = model_of(name)
    cache = new_cache(model, None)
    with torch.no_grad():
        model(torch.arange(3, 12).unsqueeze(0), past_key_values=cache)
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in layers]
    total = sum(sizes)
    assert len(set(sizes)) > 1

    layout = cache_layout_of(model)
    work = demand(1, 9)
    needs = needs_of(InferenceWork(None, model, tokens=9, requests=1))
    assert cache_bytes(layout, work) == needs.cache(1, 1) == total
    # The model's plan may divide heads or not.
    assert cache_bytes(layout, work, tp=2) in (total // 2, total)
    # This is the stage with the largest cache.
    assert total // 2 <= cache_bytes(layout, work, pp=2) <= total

    offloaded = offloaded_cache(layout, work)
    assert offloaded.device == sum(sorted(sizes)[-LAYERS_ON_DEVICE:])
    assert offloaded.pinned >= total + max(sizes) and offloaded.copied == total
    facts = attention_facts(model)
    global_dim = 32 if name == "gemma4_text, fewer heads" else 16
    assert facts is None or facts.head_dim == facts.value_dim == global_dim


def test_tensor_parallel_ranks_divide_heads():
    work = demand(3, 5, itemsize=2)
    for name, most_ranks in MOST_RANKS.items():
        layout = cache_layout_of(model_of(name, "meta"))
        total = cache_bytes(layout, work)
        for tp in (2, 4):
            assert cache_bytes(layout, work, tp=tp) == total // min(tp, most_ranks), name


def test_the_largest_pipeline_stage_counts():
    # Two layers with all tokens, then two with a window.
    layout = cache_layout_of(model_of("qwen2", "meta"))
    work = demand(1, 20)
    layer = 2 * 2 * 8 * 4
    for options, tokens in (
        ({}, 2 * 20 + 2 * 5),
        ({"pp": 2}, 2 * 20),
        ({"pp": 4}, 20),
        ({"blocks": ["model.layers.2", "model.layers.3"]}, 2 * 5),
        ({"blocks": ["base_model.model.model.layers.1"]}, 20),
    ):
        assert cache_bytes(layout, work, **options) == layer * tokens
    assert growing_bytes(layout, work) == layer * 20 // 2


def test_recurrent_states_stay_on_the_device():
    """Transformers moves layers with keys and values to the host, but no layer with a state."""
    layout = cache_layout_of(model_of("qwen3_next", "meta"))
    work = demand(1, 32)
    offloaded = offloaded_cache(layout, work)
    key_value_bytes = 2 * 2 * 8 * 4 * 32  # one layer in four
    assert (offloaded.copied, offloaded.pinned) == (key_value_bytes, 2 * key_value_bytes)
    assert offloaded.device == cache_bytes(layout, work)


class CustomModel(nn.Module):
    """A model with a cache of Transformers that is not one of its classes."""

    def __init__(self):
        super().__init__()
        self.config = model_of("llama", "meta").config

    def forward(self, input_ids, past_key_values=None):
        raise NotImplementedError


def test_a_custom_class_caches_all_heads_on_every_rank():
    work = demand(2, 7)
    layout = cache_layout_of(CustomModel())
    llama = cache_layout_of(model_of("llama", "meta"))
    total = cache_bytes(llama, work)
    assert cache_bytes(layout, work) == cache_bytes(layout, work, tp=2, pp=2) == total
    reason = "AttributeError: type object 'CustomModel' has no attribute '_from_config'"
    assert layout.guessed == reason and llama.guessed == ""


def test_a_custom_plan_divides_the_heads_that_it_names():
    """`parallel.plan` replaces the model's plan."""
    model = model_of("llama", "meta")
    work = demand(2, 7)
    mlp = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
    mlp["model.layers.*.mlp.down_proj"] = "rowwise"
    heads = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    heads["model.layers.*.self_attn.o_proj"] = "rowwise"
    total = cache_bytes(cache_layout_of(model), work)
    for plan, expected in ((mlp, total), (heads, total // 2), (None, total // 2)):
        assert cache_bytes(cache_layout_of(model, plan=plan), work, tp=2) == expected


def test_a_model_without_a_cache_takes_nothing():
    layout = cache_layout_of(nn.Linear(2, 2))
    assert cache_bytes(layout, demand(4, 100), tp=2, pp=2) == 0
