"""Canonical arithmetic in families of models: 10,000 tokens of each, in float32 and in bfloat16, generated on three layouts and scored on
others, in other batches, are the same bits for the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import cases
from tests.parity.canonical_pairs import check
from tests.pool import Pool

WINDOW = 16
"""Sequences are longer by far."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "llama, grouped heads": {},
    "llama, tied": {},
    "mistral, sliding window": {"sliding_window": WINDOW},
    "qwen2, tied": {},
    "qwen3": {},
    "gemma, tied": {},
    "gemma2, tied, sliding window": {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text, tied, sliding window": {"sliding_window": WINDOW},
    "phi3": {},
    "stablelm": {},
    "gpt2, tied": {"n_positions": 256},
    "gpt_neox": {},
    "gptj": {"n_positions": 256},
    "bloom, tied": {},
    "opt, tied": {},
    "falcon, tied": {},
}
"""What the configuration has besides that of `cases`."""
PAIRS: dict[str, list[tuple[str, int]]] = {
    "tp 2": [("ZeRO 3 x 2", 9), ("pp 2", 17), ("one process", 30)],
    "ZeRO 3 x 2": [("tp 2", 11), ("sequence parallel", 25), ("tp 2 x pp 2", 7)],
    "pp 2": [("one process", 13)],
}
"""Layout of the generation to those of the scores, with batch sizes."""
INSTEAD = {"opt, tied": {"sequence parallel": "tp 4"}, "falcon, tied": {"pp 2": "ZeRO 1 x 2", "tp 2 x pp 2": "tp 2 x ZeRO 3"}}
"""Of layouts that a family is refused on."""
REQUESTS, NEW = 84, 60


def built(family: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """With weights, the same on every rank, and without an end."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    name, *more = family.split(", ")
    config = cases.transformers_config(name, tied="tied" in more)
    config.update({**FAMILIES.get(family, {}), "eos_token_id": None, "initializer_range": 0.1})
    return AutoModelForCausalLM.from_config(config).to(dtype)


@pytest.mark.parametrize("family", ["gemma2, tied, sliding window", "bloom, tied"])
def test_attention_in_plain_operators(pool: Pool, family: str) -> None:
    """Their classes in Transformers have no other: with soft caps and a window, and with ALiBi."""
    check(pool, family, torch.float32, "tp 2", [("pp 2", 3), ("one process", 2)], build=built, count=4, max_new_tokens=WINDOW + 4)


@pytest.mark.parametrize("family", ["llama, grouped heads", "bloom, tied"])
def test_generated_in_a_pipeline(pool: Pool, family: str) -> None:
    """The second's blocks are given what is as long as the cache."""
    check(pool, family, torch.float32, "pp 2", [("one process", 2), ("tp 2", 3)], build=built, count=4, max_new_tokens=8)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_ten_thousand_tokens(pool: Pool, family: str, dtype: torch.dtype, record_property: pytest.RecordProperty) -> None:
    """That many are generated on each of three layouts, and scored on others."""
    assert len(PAIRS) * REQUESTS * NEW >= 10_000
    compared = 0
    instead = INSTEAD.get(family, {})
    for one, others in PAIRS.items():
        others = [(instead.get(other, other), size) for other, size in others]
        compared += check(pool, family, dtype, instead.get(one, one), others, build=built, count=REQUESTS, max_new_tokens=NEW)
    record_property("tokens compared", compared)
    print(f"{family}, {dtype}: {compared:,} tokens in {sum(map(len, PAIRS.values()))} pairs of layouts, 0 mismatches", flush=True)
