"""MISSION M4: published shapes of 7 to 530 billion parameters, built and stepped as one rank of layouts of 1,024 to 4,480 ranks; the bytes
of their states equal the ledger's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config.resolving.resolve import load, resolve
from plait.engine.single_rank import SingleRankRun, run_single_rank
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.pipeline.estimates import facts_of_rank

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"vocab_size": 32000, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1
    "GPT-3 175B": (
        "gpt2",
        {
            "vocab_size": 51200,
            "n_embd": 12288,
            "n_layer": 96,
            "n_head": 96,
            "n_positions": 2048,
            **NO_DROPOUT,
        },
    ),
    # Smith et al. 2022, arXiv:2201.11990, section 2
    "Turing-NLG 530B": (
        "gpt2",
        {
            "vocab_size": 51200,
            "n_embd": 20480,
            "n_layer": 105,
            "n_head": 128,
            "n_positions": 2048,
            **NO_DROPOUT,
        },
    ),
    # Touvron et al. 2023, arXiv:2307.09288, table 1 and the released configurations
    "LLaMA-2 7B": (
        "llama",
        {
            **LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "LLaMA-2 13B": (
        "llama",
        {
            **LLAMA,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
        },
    ),
    "LLaMA-2 70B": (
        "llama",
        {
            **LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
}
PARAMETERS = {
    "GPT-3 175B": 175e9,
    "Turing-NLG 530B": 530e9,
    "LLaMA-2 7B": 6.74e9,
    "LLaMA-2 13B": 13.0e9,
    "LLaMA-2 70B": 69.0e9,
}

Case = tuple[str, dict[str, Any], int, int, int]
CASES: list[Case] = [
    # (model, degrees, ZeRO stage, micro-batches, rank). Megatron-LM's for 175B: tp 8, pp 8 on 1,024 GPUs (arXiv:2104.04473)
    ("GPT-3 175B", {"pp": 8, "dp_shard": 16, "tp": 8}, 1, 8, 0),
    ("GPT-3 175B", {"pp": 8, "dp_shard": 16, "tp": 8}, 3, 8, 1023),
    # Megatron-Turing's: tp 8, pp 35, dp 16 on 4,480 GPUs (arXiv:2201.11990, section 2.3)
    ("Turing-NLG 530B", {"pp": 35, "dp_shard": 16, "tp": 8}, 1, 36, 0),
    ("Turing-NLG 530B", {"pp": 35, "dp_shard": 16, "tp": 8}, 2, 36, 2240),
    ("LLaMA-2 7B", {"dp_shard": 1024}, 3, 1, 0),
    ("LLaMA-2 13B", {"dp_replicate": 128, "dp_shard": 8, "tp": 1}, 3, 1, 0),
    ("LLaMA-2 70B", {"pp": 4, "dp_shard": 32, "tp": 8, "sequence_parallel": True}, 1, 8, 992),
    ("LLaMA-2 70B", {"dp_replicate": 2, "dp_shard": 128, "tp": 8}, 3, 1, 2047),
]


def single_rank_run(case: Case) -> tuple[SingleRankRun, Ledger, int]:
    """(what the rank held, its ledger, parameters of the whole model)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, degrees, stage, micro_batches, rank = case
    kind, sizes = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW"},
        "parallel": degrees,
    }
    world = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        world *= degrees.get(axis, 1)
    resolved = resolve(load(file), world_size=world)
    layout, blocks = resolved.layout, find_blocks(model)
    facts = model_facts(
        model,
        blocks,
        tensor_plan=make_plan(model, tp=layout.tp, blocks=blocks) if layout.tp > 1 else None,
    )
    pipeline = resolved.pipeline.plan(resolved.context(model=model, blocks=blocks))
    at = layout.coordinates(rank)
    own = (
        facts_of_rank(facts, pipeline.cut, pipeline.schedule.stages_of(at["pp"]))
        if pipeline is not None
        else facts
    )
    ledger = Ledger.of_rank(layout, at, accumulation=1)
    ledger = account_all(resolved.techniques, ledger, own)
    found = run_single_rank(model, resolved, rank=rank, samples=1, length=2048)
    return found, ledger, facts.numel


def named(case: Case) -> str:
    return f"{case[0]}-zero{case[2]}-rank{case[4]}"


FEW = [
    pytest.param(case, id=named(case), marks=() if case[0] == "LLaMA-2 7B" else pytest.mark.proof)
    for case in CASES
]


@pytest.mark.parametrize("case", FEW)
def test_published_layouts(case: Case) -> None:
    """Exact, parameters, gradients and optimizer states, which do not depend on how many micro-batches there are: one."""
    name, degrees, stage, _, rank = case
    check((name, degrees, stage, 1, rank))


@pytest.mark.proof
@pytest.mark.parametrize("case", [case for case in CASES if case[3] > 1], ids=named)
def test_with_all_micro_batches(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    found, ledger, parameters = single_rank_run(case)
    assert parameters == pytest.approx(PARAMETERS[case[0]], rel=0.02)
    measured = {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
    }
    assert measured == {kind: int(ledger.memory[kind][0]) for kind in measured}
