"""`plait verify`: equal layouts are found equal, planted defects are found and named, wrong input is refused before any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests.parity.cases import PlainModel
from tests.pool import Pool
from torch import nn

import plait
from plait.cli.main import main
from plait.config.resolve import load
from plait.engine.engine import Engine
from plait.engine.step import Stepper
from plait.errors import ParityError, PlaitError
from plait.parallel import materialise
from plait.parallel.reducer import Reducer
from plait.verify.plan import Plan, prepare
from plait.verify.report import Report, failure
from plait.verify.run import judge, run_layout

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 5001,
}
FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "model": {"config": LLAMA},
    "run": {"seed": 5},
}


# ---- models that functions bring ----------------------------------------------------------------------------------------------------


def plain() -> nn.Module:
    """A language model with weights of its own."""
    return PlainModel(tied=False)


class BareLogits(nn.Module):
    """Takes `tokens` and returns the logits themselves; its attention drops."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.3) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return hidden @ self.embed.weight.T


def bare_logits() -> nn.Module:
    """A language model in plain torch."""
    return BareLogits()


def regression() -> tuple[nn.Module, Any, Callable[[int, torch.Generator], Any]]:
    """No language model: it brings its loss and its data."""

    def micro_batch(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, 6, generator=generator).double(), torch.randn(samples, 2, generator=generator).double()

    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    return model, plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum")), micro_batch


def random_model() -> nn.Module:
    """Noise that no dropout rate turns off."""

    class Noisy(PlainModel):
        def forward(self, input_ids: torch.Tensor, side: bool = False) -> Any:
            output = super().forward(input_ids, side)
            output.logits = output.logits + torch.randn_like(output.logits)
            return output

    return Noisy(tied=True)


# ---- planted defects ----------------------------------------------------------------------------------------------------------------


class _Done:
    def wait(self) -> None:
        pass


def _launch_nothing(self: Reducer, bucket: Any) -> None:
    self._next += 1
    bucket.work = _Done()


def _launch_in_float32(self: Reducer, bucket: Any) -> None:
    self.reduce_dtype = torch.float32
    _launch(self, bucket)


def _local_weight(self: Engine, weights: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(weight, dtype=torch.float64) for weight in weights]).sum()


def _unclipped(self: Stepper, grads: list[torch.Tensor], norm: torch.Tensor, inverse: float) -> None:
    pass


def _initialise_by_rank(model: nn.Module, template: nn.Module, blocks: tuple[str, ...], *, seed: int) -> None:
    _initialise(model, template, blocks, seed=seed + torch.distributed.get_rank())


def _step_on_rank_0(self: Stepper, **arguments: Any) -> Any:
    if torch.distributed.get_rank():
        with patch.object(self.optimizer, "step"):
            return _step(self, **arguments)
    return _step(self, **arguments)


_launch, _initialise, _step = Reducer._launch, materialise.initialise, Stepper.__call__
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "missing all-reduce": (Reducer, "_launch", _launch_nothing),
    "mean instead of sum": (plait.engine.build, "reduce_by_sum", lambda parts: None),
    "wrong weight": (Engine, "_global_weight", _local_weight),
    "unsynchronised weights": (materialise, "broadcast", lambda *_, **__: None),
    "initialised by rank": (materialise, "initialise", _initialise_by_rank),
    "reduced in float32": (Reducer, "_launch", _launch_in_float32),
    "not clipped": (Stepper, "_rescale", _unclipped),
    "updated on rank 0 only": (Stepper, "__call__", _step_on_rank_0),
}


def planned(*, model: str | None = None, processes: int = 2, passes: Any = ("float64",), **changes: Any) -> Plan:
    """Of FILE with changes, as the command makes it."""
    return prepare(load({**FILE, **changes}), model=model, processes=processes, most_processes=8, steps=2, passes=passes)


def work(rank: int, world: int, plan: Plan, defect: str | None) -> Any:
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


def verdict(pool: Pool, plan: Plan, defect: str | None = None) -> Report:
    """Of a plan whose layout runs in the pool."""
    return judge(plan, pool.run(plan.world_size, work, plan, defect)[0])


@pytest.mark.parametrize(
    ("defect", "changes"),
    [
        ("missing all-reduce", {"model": plain}),
        ("mean instead of sum", {"model": plain}),
        ("mean instead of sum", {"zero_optimization": {"stage": 2}}),
        ("wrong weight", {"zero_optimization": {"stage": 1}}),
        ("unsynchronised weights", {"model": plain}),
        ("unsynchronised weights", {"model": plain, "zero_optimization": {"stage": 3}}),
        ("initialised by rank", {"zero_optimization": {"stage": 3}}),
        ("reduced in float32", {}),
        ("not clipped", {"zero_optimization": {"stage": 3}}),
        ("updated on rank 0 only", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_defects_are_found_and_named(pool: Pool, defect: str, changes: dict[str, Any]) -> None:
    """Without the defect all is equal, with it a parameter is named."""
    function = changes.pop("model", None) if changes.get("model") is plain else None
    plan = planned(model=f"{__name__}:{function.__name__}" if function else None, **changes)
    report = verdict(pool, plan, defect)
    assert not report.equal
    named = report.as_dict()["first_different"]
    assert named in dict(plan.build(torch.float64).model.named_parameters())
    assert named in failure(report)
    assert not [row for row in report.sections[0].rows if row.error > 0.5] or defect != "reduced in float32"


# ---- equal layouts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (2, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}),
        (2, {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}),
        (3, {"zero_optimization": {"stage": 2}}),
        (2, {"model": {"config": {**LLAMA, "tie_word_embeddings": True}, "dtype": "bfloat16"}}),
        (2, {"model": {"config": {"model_type": "gemma3_text", "vocab_size": 5001}}}),
        (2, {"model": {"config": {"model_type": "mixtral", "num_hidden_layers": 4}}, "zero_optimization": {"stage": 2}}),
        (2, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}}),
    ],
    ids=["bf16", "fp16", "uneven", "tied-bf16-parameters", "islands", "experts", "muon"],
)
def test_equal(pool: Pool, processes: int, changes: dict[str, Any]) -> None:
    """Both comparisons, in whatever precision and with whatever a model rounds by itself."""
    report = verdict(pool, planned(processes=processes, passes=("float64", "configured"), **changes))
    assert report.equal, failure(report)
    assert [section.name for section in report.sections] == ["float64", "configured"]
    assert "within 1e-10" in report.sections[0].title


@pytest.mark.parametrize("function", [plain, bare_logits, regression])
@pytest.mark.parametrize("stage", [0, 3])
def test_equal_for_plain_modules(pool: Pool, function: Any, stage: int) -> None:
    """Models that Transformers does not know, with weights of their own that differ on every rank until the engine makes them equal."""
    report = verdict(pool, planned(model=f"{__name__}:{function.__name__}", zero_optimization={"stage": stage}))
    assert report.equal, failure(report)
