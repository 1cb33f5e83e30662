"""`plait verify` on tensor parallelism: equal plans are found equal, planted defects of a split are found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait._torch.tensors import local_window
from plait.comm.collectives import enter
from plait.config.resolving.resolve import load
from plait.parallel import materialise
from plait.parallel.tensor import styles
from plait.verify.plan import VerificationPlan, prepare
from plait.verify.report import Report
from plait.verify.run import compare, run_layout
from tests.integration.verified import FILE, LLAMA
from tests.pool import Pool

QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True}
PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def _summed_twice(module: torch.nn.Module, region: Any) -> Any:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        doubled = {
            name: enter(enter(p, region.group), region.group)
            for name, p in module.named_parameters(recurse=False)
        }
        with styles.own_values(module, doubled):
            return original(*args, **kwargs)

    return forward


def _untied(model: torch.nn.Module, *args: Any, **options: Any) -> None:
    _initialise(model, *args, **options)
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _next_ranks(parameter: Any) -> tuple[slice, ...]:
    """The neighbour's slice of a fused weight."""
    window = _window(parameter)
    rows = window[0]
    size = rows.stop - rows.start
    if size * 2 != parameter.shape[0] or parameter.shape[0] <= parameter.shape[1]:
        return window
    start = parameter.shape[0] - rows.stop
    return slice(start, start + size), *window[1:]


_initialise, _window = materialise.initialise, local_window
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "missing all-reduce": (styles, "leave", lambda x, group: x),
    "missing all-reduce of gradients": (styles, "enter", lambda x, group: x),
    "replicated gradient counted double": (styles, "summed_gradient", _summed_twice),
    "untied embedding": (materialise, "initialise", _untied),
    "wrong shard": (materialise, "local_window", _next_ranks),
}


def planned(
    model: dict[str, Any], *, processes: int = 2, sequence: bool = False, stage: int = 0
) -> VerificationPlan:
    """tp 2 of FILE, the rest data parallel."""
    changes = {
        "parallel": {"tp": 2, "sequence_parallel": sequence},
        "zero_optimization": {"stage": stage},
        "model": {"config": model},
    }
    return prepare(
        load({**FILE, **changes}),
        model=None,
        processes=processes,
        most_processes=8,
        steps=2,
        passes=("float64",),
    )


def work(rank: int, world: int, plan: VerificationPlan, defect: str | None) -> Any:
    """Runs in a worker."""
    if defect is None:
        return run_layout(plan)
    owner, name, replacement = DEFECTS[defect]
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        return run_layout(plan)
    finally:
        setattr(owner, name, original)


def compared(pool: Pool, plan: VerificationPlan, defect: str | None = None) -> Report:
    """Of a plan whose layout runs in the pool."""
    return compare(plan, pool.run(plan.world_size, work, plan, defect)[0])


@pytest.mark.parametrize(
    ("model", "processes", "sequence", "stage"),
    [(QWEN3, 2, False, 0), (QWEN3, 4, True, 3), (PHI3, 2, False, 0)],
    ids=["qwen3", "qwen3-sp-zero3", "phi3"],
)
def test_equal(
    pool: Pool, model: dict[str, Any], processes: int, sequence: bool, stage: int
) -> None:
    """In float64."""
    report = compared(pool, planned(model, processes=processes, sequence=sequence, stage=stage))
    assert report.equal, report.as_dict()


@pytest.mark.parametrize(
    ("defect", "model"),
    [
        ("missing all-reduce", QWEN3),
        ("missing all-reduce of gradients", QWEN3),
        ("replicated gradient counted double", QWEN3),
        ("untied embedding", QWEN3),
        ("wrong shard", PHI3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_defects_are_found_and_named(pool: Pool, defect: str, model: dict[str, Any]) -> None:
    """Each by the name of a parameter that differs."""
    report = compared(pool, planned(model), defect)
    assert not report.equal
    assert report.as_dict()["first_different"]
