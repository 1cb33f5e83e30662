"""Models whose layers have heads of several widths or counts (Gemma 4): what their keys and values take, and the tokens they give."""

import pytest
import torch

from plait.inference.capacity import (
    LAYERS_ON_DEVICE,
    CacheDemand,
    cache_bytes,
    cache_layout_of,
    offloaded_cache,
)
from plait.inference.deployment import InferenceWork, load_model, needs_of
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.model.facts import attention_facts

VOCABULARY, SEEN, NEW = 96, 9, 6
PROMPTS = [[5, 17, 33, 2, 90, 41, 7], [8, 3, 60]]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None,
}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
FEWER = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 32}
SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS = {
    "gemma4_text": {**SIZES, **PER_LAYER},
    "gemma4_text, fewer heads": {**SIZES, **PER_LAYER, **FEWER},
    "gemma4_text, shared layers": {**SIZES, **PER_LAYER, **SHARED},
    "gemma4_unified_text": SIZES,
    "gemma4_unified": {"text_config": {**SIZES, "model_type": "gemma4_unified_text"}, "vision_config": None, "audio_config": None, "initializer_range": 0.3},
}  # fmt: skip


def built(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split(",")[0], **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def kept(model):
    """Bytes of the layers of a cache that has seen some tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(3, 3 + SEEN).unsqueeze(0), past_key_values=cache)
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [layer.keys.nbytes + layer.values.nbytes for layer in layers]


@pytest.mark.parametrize("kind", list(KINDS))
def test_bytes_of_a_real_cache(kind):
    model = built(kind)
    sizes = kept(model)
    assert len(set(sizes)) > 1
    layout, work = cache_layout_of(model), CacheDemand(requests=1, tokens=SEEN, itemsize=4)
    total = sum(sizes)
    needs = needs_of(InferenceWork(None, model, tokens=SEEN, requests=1))
    assert cache_bytes(layout, work) == needs.cache(1, 1) == total
    # The model's plan may divide heads or not.
    assert cache_bytes(layout, work, tp=2) in (total // 2, total)
    # This is the stage with the largest cache.
    assert total // 2 <= cache_bytes(layout, work, pp=2) <= total
    found = offloaded_cache(layout, work)
    assert found.device == sum(sorted(sizes)[-LAYERS_ON_DEVICE:])
    assert found.pinned >= total + max(sizes) and found.copied == total
    facts = attention_facts(model)
    assert facts is None or facts.head_dim == facts.value_dim == KINDS[kind]["global_head_dim"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_those_of_transformers(tmp_path, kind):
    model = built(kind)
    expected = []
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(made[0, len(prompt) :].tolist())
    model.save_pretrained(tmp_path)
    sharded = load_model(open_source(tmp_path))
    try:
        found = generate(sharded, PROMPTS, max_new_tokens=NEW, temperature=0)
    finally:
        sharded.close()
    assert [one.token_ids for one in found] == expected
