"""Tokens of a model with PEFT's adapters are PEFT's on one process, on every layout that trains it; what would be wrong is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import InputError
from plait.verify.keep_float64 import keeping_float64
from tests.covers import proof_after
from tests.parity.generation import PROMPTS, built, by_transformers, engine_on
from tests.parity.layouts import FOUR, TWO

pytest.importorskip("peft")
NEW = 4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 8},
    "ranks and scales": {
        "r": 2,
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"up_proj": 32},
        "use_rslora": True,
    },
    "dora": {"r": 3, "use_dora": True},
    "modules_to_save": {"r": 2, "modules_to_save": ["lm_head"]},
}
SPLIT = ("lora", "ranks and scales")
"""Those that tensor parallelism splits."""
TWO_RANKS = [name for name in TWO if name != "sequence parallel"]
FOUR_RANKS = ["tp x pp", "pp x ZeRO 3", "hybrid sharding"]


def base():
    return built().double()


def adapted(kind):
    """With a second adapter that is not active, and what PEFT adds different from what it begins with."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(
        base(), LoraConfig(target_modules=LINEAR, task_type="CAUSAL_LM", **KINDS[kind])
    )
    if kind == "lora":
        made.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter) * 0.2)
    return made


def by_peft(kind, *, active=True):
    """New tokens of PROMPTS, of one process."""
    model = adapted(kind).eval()
    of = model if active else model.get_base_model()
    if not active:
        model.base_model.disable_adapter_layers()
    return by_transformers(of, NEW)[:, -NEW:].tolist()


def generated(rank, world, kind, layouts):
    """By layout: prompts and new tokens, with a cache, and at tp without. Runs in a worker."""
    found = {}
    for name in layouts:
        model = adapted(kind)
        with keeping_float64(model):
            engine = engine_on({**TWO, **FOUR}[name], model)
            try:
                mine = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
                assert engine.sharded.new_cache() is not None
                ways = [
                    engine.generate(mine, max_new_tokens=NEW, use_cache=cached)
                    for cached in ((True, False) if name == "tp" else (True,))
                ]
                found[name] = [(one.prompt_ids, one.token_ids) for made in ways for one in made]
            finally:
                engine.close()
    return found


def compare(results, kind):
    expected = dict(zip(map(tuple, PROMPTS), by_peft(kind), strict=True))
    assert list(expected.values()) != by_peft(kind, active=False)
    for rank, found in enumerate(results):
        for name, rows in found.items():
            assert all(tokens == expected[tuple(prompt)] for prompt, tokens in rows), (
                kind,
                rank,
                name,
            )


@pytest.mark.parametrize(
    "layouts", proof_after(1, [["ZeRO 3", "tp", "pp, interleaved"], TWO_RANKS], name=", ".join)
)
def test_two_ranks(pool, layouts):
    compare(pool.run(2, generated, "lora", layouts), "lora")


@pytest.mark.parametrize("kind", proof_after(1, [kind for kind in KINDS if kind != "lora"]))
def test_other_kinds(pool, kind):
    compare(
        pool.run(2, generated, kind, ["tp", "ZeRO 3"] if kind in SPLIT else ["ZeRO 3", "pp"]), kind
    )


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks(pool, kind):
    compare(
        pool.run(
            4, generated, kind, [name for name in FOUR_RANKS if kind in SPLIT or "tp" not in name]
        ),
        kind,
    )


LEARNT = {"num_virtual_tokens": 3, "token_dim": 32, "num_layers": 4, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("PromptTuningConfig", LEARNT, "PROMPT_TUNING puts 3 virtual tokens before the prompt"),
        (
            "LoraConfig",
            {"r": 2, "target_modules": ["q_proj"], "alora_invocation_tokens": [5, 17]},
            "alora_invocation_tokens",
        ),
    ],
)
def test_what_is_refused(kind, fields, said):
    """Prompts that are learnt, and an adapter that begins at some tokens."""
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **fields)
    engine = engine_on({}, peft.get_peft_model(base(), config), size=1)
    try:
        with pytest.raises(InputError, match=said):
            engine.generate(PROMPTS, max_new_tokens=2)
    finally:
        engine.close()
