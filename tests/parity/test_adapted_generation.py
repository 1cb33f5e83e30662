"""A model with PEFT's adapters generates the tokens of PEFT in one process, on every layout."""

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
NEW_TOKENS = 4
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
SPLIT_BY_TP = ("lora", "ranks and scales")
TWO_RANKS = [name for name in TWO if name != "sequence parallel"]


def base():
    return built().double()


def adapted(kind):
    """Return a model whose adapters differ from PEFT's initial ones.

    With "lora" it has a second adapter, which is not active.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=LINEAR, task_type="CAUSAL_LM", **KINDS[kind])
    model = get_peft_model(base(), config)
    if kind == "lora":
        inactive = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model.add_adapter("other", inactive)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter) * 0.2)
    return model


def new_tokens(model):
    """Return the new tokens of PROMPTS in one process."""
    return by_transformers(model, NEW_TOKENS)[:, -NEW_TOKENS:].tolist()


def generated(rank, world, kind, layouts):
    """Return prompts and new tokens by layout, with a KV cache. Runs on every rank.

    With tensor parallelism the tokens without a cache follow.
    """
    result = {}
    for name in layouts:
        model = adapted(kind)
        with keeping_float64(model):
            engine = engine_on({**TWO, **FOUR}[name], model)
            try:
                assert engine.sharded.new_cache() is not None
                prompts = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
                answers = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
                if name == "tp":
                    answers += engine.generate(prompts, max_new_tokens=NEW_TOKENS, use_cache=False)
                result[name] = [(answer.prompt_ids, answer.token_ids) for answer in answers]
            finally:
                engine.close()
    return result


def compare(pool, world, kind, layouts):
    model = adapted(kind).eval()
    expected = dict(zip(map(tuple, PROMPTS), new_tokens(model), strict=True))
    # Without the adapters the tokens are others.
    model.base_model.disable_adapter_layers()
    assert list(expected.values()) != new_tokens(model.get_base_model())

    for rank, by_layout in enumerate(pool.run(world, generated, kind, layouts)):
        for name, answers in by_layout.items():
            for prompt, tokens in answers:
                assert tokens == expected[tuple(prompt)], (kind, rank, name)


@pytest.mark.parametrize(
    "layouts", proof_after(1, [["ZeRO 3", "tp", "pp, interleaved"], TWO_RANKS], name=", ".join)
)
def test_lora_on_two_ranks(pool, layouts):
    compare(pool, 2, "lora", layouts)


@pytest.mark.parametrize("kind", proof_after(1, [kind for kind in KINDS if kind != "lora"]))
def test_other_adapters_on_two_ranks(pool, kind):
    compare(pool, 2, kind, ["tp", "ZeRO 3"] if kind in SPLIT_BY_TP else ["ZeRO 3", "pp"])


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks(pool, kind):
    layouts = ["pp x ZeRO 3", "hybrid sharding"]
    if kind in SPLIT_BY_TP:
        layouts.append("tp x pp")
    compare(pool, 4, kind, layouts)


VIRTUAL_TOKENS = {
    "num_virtual_tokens": 3,
    "token_dim": 32,
    "num_layers": 4,
    "num_attention_heads": 4,
}
ACTIVATED_LORA = {"r": 2, "target_modules": ["q_proj"], "alora_invocation_tokens": [5, 17]}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "PromptTuningConfig",
            VIRTUAL_TOKENS,
            "PROMPT_TUNING puts 3 virtual tokens before the prompt",
        ),
        ("LoraConfig", ACTIVATED_LORA, "alora_invocation_tokens"),
    ],
)
def test_adapters_that_depend_on_the_prompt_are_refused(kind, fields, message):
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **fields)
    engine = engine_on({}, peft.get_peft_model(base(), config), size=1)
    try:
        with pytest.raises(InputError, match=message):
            engine.generate(PROMPTS, max_new_tokens=2)
    finally:
        engine.close()
