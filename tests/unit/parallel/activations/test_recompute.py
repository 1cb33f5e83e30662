"""Which blocks recompute, and a budget solved from figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.cluster.layout import Layout
from plait.errors import ConfigError, ModelError
from plait.parallel.accounting.activations import (
    ONE_STAGE,
    BlockMode,
    RankActivations,
    StageFacts,
    StageMode,
)
from plait.parallel.parts import Parts
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.sizes import GIB


def rank_of(
    count: int,
    *,
    kept: dict[BlockMode, int],
    flops: dict[BlockMode, int],
    outside: int = 3,
    head: int = 11,
) -> RankActivations:
    """Without a pipeline."""
    modes = {
        mode: StageMode(
            (size,) * count,
            outside,
            head,
            returning=(kept["none"] - size,) * count,
            flops=flops[mode],
        )
        for mode, size in kept.items()
    }
    return RankActivations(ONE_STAGE, 0, (StageFacts(modes),))


KEPT: dict[BlockMode, int] = {"none": 100, "selective": 30, "full": 4}
FLOPS: dict[BlockMode, int] = {"none": 300, "selective": 340, "full": 400}


def test_every() -> None:
    assert Recompute(mode="full", every=2).modes(5) == ("full", "none", "full", "none", "full")
    assert Recompute(mode="selective").modes(2) == ("selective", "selective")
    assert Recompute().modes(2) == ("none", "none")


def test_the_account_by_hand() -> None:
    rank = rank_of(3, kept=KEPT, flops=FLOPS)
    (found,) = rank.stages
    assert found.saved(("full", "none", "selective")) == 3 + 4 + 100 + 30
    assert found.returning(("full", "none", "selective")) == 96
    assert found.returning(("none",) * 3) == 0
    assert rank.most(("full",) * 3) == 3 + 12 + 11 + 96


@given(budget=st.integers(0, 500), count=st.integers(1, 5))
def test_a_budget_is_kept_with_the_least_work(budget: int, count: int) -> None:
    """Against every assignment there is."""
    from itertools import product

    found = rank_of(count, kept=KEPT, flops=FLOPS)
    solved = found.solve(budget)
    work = {"none": 0, "selective": 40, "full": 100}
    fitting = [modes for modes in product(KEPT, repeat=count) if found.most(modes) <= budget]
    if solved is None:
        assert not fitting
        return
    assert found.most(solved) <= budget
    assert sum(work[mode] for mode in solved) == min(
        sum(work[mode] for mode in modes) for modes in fitting
    )


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    technique = Recompute(mode="budget", budget_bytes=GIB, sequence_length=8)
    large = rank_of(2, kept={"none": 3 * GIB, "full": GIB}, flops=FLOPS, outside=0, head=0)
    with pytest.raises(
        ConfigError,
        match=r"budget_gib = 1.0: with every block recomputed a micro-batch holds 4 GiB",
    ):
        technique.solved([large])
    assert technique.solved([rank_of(2, kept=KEPT, flops=FLOPS)]).modes(2) == ("none", "none")


class Block(nn.Module):
    gradient_checkpointing = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def context(
    model: nn.Module, blocks: tuple[str, ...], *, compiled: bool, sequence: bool
) -> TechniqueContext:
    return TechniqueContext(
        Layout(),
        (TensorParallel(sequence_parallel=sequence), Compile(enabled=compiled)),
        model=model,
        blocks=blocks,
    )


@pytest.mark.parametrize(
    ("technique", "compiled", "sequence", "said"),
    [
        (Recompute(mode="full"), False, False, "already recomputes"),
        (Recompute(mode="selective"), True, False, "inside a compiled block"),
        (Recompute(mode="full", partition_inputs=True), False, True, "sharded over tp already"),
        (Recompute(mode="selective", keep=("mm",)), False, False, "no such operator"),
    ],
)
def test_refusals(technique: Recompute, compiled: bool, sequence: bool, said: str) -> None:
    """With the remedy."""
    model = nn.Sequential(Block(), Block())
    if said != "already recomputes":
        for block in model:
            block.gradient_checkpointing = False  # type: ignore[assignment]
    with pytest.raises((ConfigError, ModelError), match=said):
        technique.check(context(model, ("0", "1"), compiled=compiled, sequence=sequence))
    Recompute().check(context(model, (), compiled=True, sequence=True))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no repeated blocks"):
        Recompute(mode="full").check(context(nn.Linear(2, 2), (), compiled=False, sequence=False))


class Counting(nn.Module):
    """A block whose forward changes its buffers: in place, uncounted by torch, by assignment, and by the power iterations of a
    parametrization."""

    steps: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("still", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.norm(self.linear(x - self.mean))) * (1 + 0.1 * self.steps)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_buffers_that_a_forward_changes(mode: Any) -> None:
    """A recomputation begins with what the forward began with, and leaves what it left: the bits of no recompute at all."""

    def run(technique: Recompute | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), Counting())
        if technique is not None:
            technique.apply(Parts(model=model, blocks=("0", "1")), SimpleNamespace())  # type: ignore[arg-type]
        model.eval()
        model(torch.randn(3, 4)).sum().backward()
        model.train()
        for _ in range(2):
            first, second = (
                model(torch.randn(3, 4)),
                model(torch.randn(3, 4)),
            )  # two micro-batches are on their way
            first.square().sum().backward(retain_graph=True)
            second.square().sum().backward()
            first.sum().backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    for found, wanted in zip(run(Recompute(mode=mode)), run(None), strict=True):
        assert torch.equal(found, wanted)
