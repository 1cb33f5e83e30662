"""What a cache is said to take before a generation, and what Transformers' own `generate` and Plait's hold at its end, for families whose
layers keep different things: keys of every head or of one, latent ones, windows, states."""

import pytest
import torch
from torch import nn

from plait.inference.capacity import (
    CacheDemand,
    cache_bytes,
    cache_layout_of,
    growing_bytes,
    offloaded_cache,
)
from plait.sharded.cache import new_cache
from tests.unit.inference.kept_models import KINDS, model_of, tensors

DIVIDED = {"llama": 2, "mistral": 2, "gpt2": 1, "falcon": 1, "falcon, every head": 4, "gpt_oss": 1, "deepseek_v3": 1}  # fmt: skip
"""The largest number of ranks that share a layer's keys and values. GPT-2's, Falcon's and GPT-OSS's attention computes all heads,
DeepSeek's caches what all heads are computed from."""


def demand(requests, tokens, itemsize=4):
    return CacheDemand(requests=requests, tokens=tokens, itemsize=itemsize)


@pytest.mark.parametrize("name", list(KINDS))
def test_bytes_are_those_that_are_held(name):
    """Lengths are below the window, at it, and beyond it in the prompt and while tokens are added."""
    model = model_of(name)
    layout = cache_layout_of(model_of(name, "meta"))
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    for prompt, new in ((3, 1), (3, 3), (3, 9), (11, 5)):
        ids = torch.arange(3, 3 + prompt).expand(2, -1)
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        size = sum(one.nbytes for one in tensors(made.past_key_values))
        assert cache_bytes(layout, demand(2, prompt + new - 1)) == size


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_holds_no_more_memory_than_itself(name):
    """After a longer prompt, Transformers' layer keeps a view of the full prompt."""
    model = model_of(name)
    cache, layout = new_cache(model, None), cache_layout_of(model)
    with torch.no_grad():
        for length in (20, 1, 7):
            model(input_ids=torch.full((2, length), 5), past_key_values=cache)
            storages = [one.untyped_storage() for one in tensors(cache)]
            stored = {storage.data_ptr(): storage.nbytes() for storage in storages}
            size = cache_bytes(layout, demand(2, cache.get_seq_length()))
            assert sum(stored.values()) == size


@pytest.mark.parametrize("name", list(DIVIDED))
def test_ranks_of_tensor_parallelism(name):
    """Heads are divided as the plan divides them. A head that several ranks need is on each of them."""
    layout, work = cache_layout_of(model_of(name, "meta")), demand(3, 5, itemsize=2)
    full = cache_bytes(layout, work)
    for tp in (2, 4):
        assert cache_bytes(layout, work, tp=tp) == full // min(tp, DIVIDED[name])


def test_stages_of_a_pipeline():
    """Of stages with a window and without, the one with the largest cache counts."""
    # Two layers with all tokens, then two with a window.
    layout, work = cache_layout_of(model_of("qwen2", "meta")), demand(1, 20)
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


def test_states_stay_on_the_device():
    """Transformers moves layers with keys and values to the host, but no layer with a state alone."""
    layout, work = cache_layout_of(model_of("qwen3_next", "meta")), demand(1, 32)
    found = offloaded_cache(layout, work)
    moved = 2 * 2 * 8 * 4 * 32  # one layer in four
    assert (found.copied, found.pinned) == (moved, 2 * moved)
    assert found.device == cache_bytes(layout, work)


class Own(nn.Module):
    """Model with a cache of Transformers that is not one of its classes."""

    def __init__(self):
        super().__init__()
        self.config = model_of("llama", "meta").config

    def forward(self, input_ids, past_key_values=None):
        """Not called."""


def test_a_users_own_class_keeps_every_head_on_every_rank():
    layout, work = cache_layout_of(Own()), demand(2, 7)
    full = cache_bytes(cache_layout_of(model_of("llama", "meta")), work)
    assert cache_bytes(layout, work) == cache_bytes(layout, work, tp=2, pp=2) == full


def test_a_users_own_plan_divides_other_heads():
    """`parallel.plan` is used alone: attention that it does not name has all heads on every rank."""
    model, work = model_of("llama", "meta"), demand(2, 7)
    mlp = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
    mlp["model.layers.*.mlp.down_proj"] = "rowwise"
    heads = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    heads["model.layers.*.self_attn.o_proj"] = "rowwise"
    full = cache_bytes(cache_layout_of(model), work)
    for plan, size in ((mlp, full), (heads, full // 2), (None, full // 2)):
        assert cache_bytes(cache_layout_of(model, plan=plan), work, tp=2) == size


def test_sizes_that_are_guessed_say_why():
    assert cache_layout_of(model_of("llama", "meta")).guessed == ""
    reason = "AttributeError: type object 'Own' has no attribute '_from_config'"
    assert cache_layout_of(Own()).guessed == reason


def test_what_keeps_nothing_takes_nothing():
    layout = cache_layout_of(nn.Linear(2, 2))
    assert cache_bytes(layout, demand(4, 100), tp=2, pp=2) == 0
