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
"""Ranks that a layer's keys and values are shared between at most. GPT-2's, Falcon's and GPT-OSS's compute all heads, DeepSeek's keep what
all heads are made of."""


@pytest.mark.parametrize("name", list(KINDS))
def test_bytes_are_those_that_are_held(name):
    """Lengths below the window, at it, and beyond it in the prompt and while tokens are added."""
    model = model_of(name)
    keeps = cache_layout_of(model_of(name, "meta"))
    for prompt, new in ((3, 1), (3, 3), (3, 9), (11, 5)):
        ids = torch.arange(3, 3 + prompt).expand(2, -1)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        held = sum(one.nbytes for one in tensors(made.past_key_values))
        assert (
            cache_bytes(keeps, CacheDemand(requests=2, tokens=prompt + new - 1, itemsize=4)) == held
        )


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_holds_no_more_memory_than_itself(name):
    """After a prompt longer than it, Transformers' own layer keeps a view of the whole prompt."""
    model = model_of(name)
    cache, keeps = new_cache(model, None), cache_layout_of(model)
    with torch.no_grad():
        for length in (20, 1, 7):
            model(input_ids=torch.full((2, length), 5), past_key_values=cache)
            seen = cache.get_seq_length()
            stored = {
                one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
                for one in tensors(cache)
            }
            assert sum(stored.values()) == cache_bytes(
                keeps, CacheDemand(requests=2, tokens=seen, itemsize=4)
            )


@pytest.mark.parametrize("name", list(DIVIDED))
def test_ranks_of_tensor_parallelism(name):
    """Heads are divided as the plan divides them; a head that several ranks need is on each."""
    keeps, asked = (
        cache_layout_of(model_of(name, "meta")),
        CacheDemand(requests=3, tokens=5, itemsize=2),
    )
    whole = cache_bytes(keeps, asked)
    for tp in (2, 4):
        assert cache_bytes(keeps, asked, tp=tp) == whole // min(tp, DIVIDED[name])


def test_stages_of_a_pipeline():
    """Of stages with a window and without, the one that keeps most, as the model is cut."""
    keeps = cache_layout_of(
        model_of("qwen2", "meta")
    )  # two layers with all tokens, then two with a window
    asked = CacheDemand(requests=1, tokens=20, itemsize=4)
    layer = 2 * 2 * 8 * 4
    assert cache_bytes(keeps, asked) == layer * (2 * 20 + 2 * 5)
    assert cache_bytes(keeps, asked, pp=2) == layer * 2 * 20
    assert cache_bytes(keeps, asked, pp=4) == layer * 20
    assert cache_bytes(keeps, asked, blocks=["model.layers.2", "model.layers.3"]) == layer * 2 * 5
    assert cache_bytes(keeps, asked, blocks=["base_model.model.model.layers.1"]) == layer * 20
    assert growing_bytes(keeps, asked) == layer * 20 // 2


def test_states_stay_on_the_device():
    """Transformers moves layers with keys and values to the host, and none with a state alone."""
    keeps, asked = (
        cache_layout_of(model_of("qwen3_next", "meta")),
        CacheDemand(requests=1, tokens=32, itemsize=4),
    )
    found = offloaded_cache(keeps, asked)
    moved = 2 * 2 * 8 * 4 * 32  # one layer in four
    assert (
        found.copied == moved
        and found.device == cache_bytes(keeps, asked)
        and found.pinned == 2 * moved
    )


class Own(nn.Module):
    """With a cache of Transformers, and no class of it."""

    def __init__(self):
        super().__init__()
        self.config = model_of("llama", "meta").config

    def forward(self, input_ids, past_key_values=None):
        """Not called."""


def test_a_users_own_class_keeps_every_head_on_every_rank():
    keeps, asked = cache_layout_of(Own()), CacheDemand(requests=2, tokens=7, itemsize=4)
    assert (
        cache_bytes(keeps, asked)
        == cache_bytes(keeps, asked, tp=2, pp=2)
        == cache_bytes(cache_layout_of(model_of("llama", "meta")), asked)
    )


def test_a_users_own_plan_divides_other_heads():
    """`parallel.plan`, used alone: attention that it does not name has all heads on every rank."""
    model, asked = model_of("llama", "meta"), CacheDemand(requests=2, tokens=7, itemsize=4)
    mlp = {f"model.layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")} | {
        "model.layers.*.mlp.down_proj": "rowwise"
    }
    heads = {
        f"model.layers.*.self_attn.{name}_proj": "rowwise" if name == "o" else "colwise"
        for name in "qkvo"
    }
    full = cache_bytes(cache_layout_of(model), asked)
    assert cache_bytes(cache_layout_of(model, plan=mlp), asked, tp=2) == full
    assert (
        cache_bytes(cache_layout_of(model, plan=heads), asked, tp=2)
        == full // 2
        == cache_bytes(cache_layout_of(model), asked, tp=2)
    )


def test_sizes_that_are_guessed_say_why():
    assert cache_layout_of(model_of("llama", "meta")).guessed == ""
    assert (
        cache_layout_of(Own()).guessed
        == "AttributeError: type object 'Own' has no attribute '_from_config'"
    )


def test_what_keeps_nothing_takes_nothing():
    assert (
        cache_bytes(
            cache_layout_of(nn.Linear(2, 2)),
            CacheDemand(requests=4, tokens=100, itemsize=4),
            tp=2,
            pp=2,
        )
        == 0
    )
