"""Bytes of optimizer states in other forms: measured in a step, and what the ledger, the predicted peak and the planner say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.pipeline.estimates import facts_of_rank
from tests.covers import cover
from tests.fake import peaks as peak
from tests.fake.worlds import FakeWorld
from tests.measured.memory import measure_step
from tests.parity import cases
from tests.parity.optimizers import optimizer
from tests.parity.tensor_parallel import settings

FORMS = ["bf16", "int8", "float8"]


LAYOUTS = [
    # (ranks, tp, ZeRO stage, replicas, rank)
    (1, 1, 0, 1, 0),
    (2, 1, 0, 1, 0),
    (3, 1, 1, 1, 2),
    (4, 1, 2, 2, 0),
    (7, 1, 3, 1, 6),
    (64, 1, 3, 1, 0),
    (4, 2, 0, 1, 1),
    (8, 4, 3, 1, 5),
]


@pytest.mark.parametrize(
    ("world", "tp", "stage", "replicas", "rank", "precision", "states"),
    cover(
        (
            (*layout, precision, states)
            for layout in LAYOUTS
            for precision in ("fp32", "bf16")
            for states in FORMS
        ),
        features=lambda *case: (case[:5], *case[5:]),
    ),
)
def test_as_priced(
    fake_world: FakeWorld,
    world: int,
    tp: int,
    stage: int,
    replicas: int,
    rank: int,
    precision: str,
    states: str,
) -> None:
    """Every kind, to the byte: uneven shards, ranks without a row, heads and rows split over tp."""
    fake_world(world, rank)
    config = {
        **settings(world, tp, stage, replicas, 1),
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": optimizer(states),
    }
    model = cases.build("wide", tied=True, dtype=torch.float32)
    blocks = find_blocks(model)
    facts = model_facts(
        model, blocks, tensor_plan=make_plan(model, tp=tp, blocks=blocks) if tp > 1 else None
    )
    resolved = resolve(load(config), world_size=world)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(16).view(2, 8)
    held = measure_step(engine, {"input_ids": ids, "labels": ids})
    at = resolved.layout.coordinates(rank)
    ledger = Ledger.of_rank(
        resolved.layout, at, accumulation=1, tokens=16, optimizer_states=resolved.optimizer.states
    )
    techniques = resolved.techniques
    found = account_all(techniques, ledger, facts).memory
    assert held == {name: int(count[0]) for name, count in found.items()}
    own = account_all(techniques, ledger.with_(optimizer_states=None), facts).memory
    if own["optimizer"][0]:
        assert found["optimizer"][0] < own["optimizer"][0] * (0.8 if states == "bf16" else 0.35)


@pytest.mark.parametrize("rank", [0, 2])
def test_in_a_pipeline(fake_world: FakeWorld, rank: int) -> None:
    """Tied embeddings are at both ends."""
    fake_world(4, rank)
    config = settings(4, 1, 2, 1, 4)
    config["parallel"] |= {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "1f1b"}}
    config["optimizer"] = optimizer("int8")
    model = cases.build("wide", tied=True, dtype=torch.float32, layers=4)
    resolved = resolve(load(config), world_size=4)
    facts = model_facts(model, find_blocks(model))
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    parts = engine.parts.plans.pipeline
    assert parts is not None
    at = resolved.layout.coordinates(rank)
    own = facts_of_rank(facts, parts.cut, parts.schedule.stages_of(at["pp"]))
    ledger = Ledger.of_rank(resolved.layout, at, accumulation=4, optimizer_states="int8")
    wanted = int(account_all(resolved.techniques, ledger, own).memory["optimizer"][0])
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    made = [value for state in engine.optimizer.state.values() for value in state.values()]
    local = [getattr(value, "_local_tensor", value) for value in made]
    assert sum(value.numel() * value.element_size() for value in local) == wanted


@pytest.mark.parametrize(
    ("stage", "tp", "bf16", "states"),
    cover(
        (
            (*case, states)
            for case in ((0, 1, False), (1, 2, True), (3, 1, True))
            for states in ("int8", "float8")
        ),
        strength=1,
    ),
)
def test_peak(fake_world: FakeWorld, stage: int, tp: int, bf16: bool, states: str) -> None:
    """Within 2 % of a real step's, and the states in it to the byte."""
    config = peak.settings(stage=stage, tp=tp, bf16=bf16) | {
        "optimizer": optimizer(states),
        "communication_data_type": "fp32",
    }
    predicted, measured = peak.predicted_and_measured(fake_world, "wide", config)
    peak.check(predicted, measured)


def test_planner() -> None:
    """Its own account of the states is the ledger's, and it proposes no host for them."""
    from plait.parallel.techniques.data_parallel import DataParallel
    from plait.parallel.techniques.mixed_precision import Precision
    from plait.parallel.techniques.tensor_parallel import TensorParallel
    from plait.planner.job import Layouts
    from plait.planner.request import job_of, states_of
    from tests.unit.planner.small_models import real_facts, request_for

    for states in FORMS:
        request = request_for("llama")
        request = type(request)(**{**request.__dict__, "optimizer_states": states})
        assert not request.offers.offload
        for tp, stage, shard in ((1, 3, 4), (2, 1, 2)):
            layouts = Layouts(tp=np.array([tp]), dp_shard=shard, stage=stage)
            found = states_of(request, job_of(request, layouts)).first["optimizer"][0]
            ledger = Ledger.start(tp=tp, dp_shard=shard, optimizer_states=states)
            techniques = (
                TensorParallel(),
                Precision(compute="bfloat16"),
                DataParallel(stage=stage),
            )
            assert (
                found
                == account_all(techniques, ledger, real_facts("llama", tp)).memory["optimizer"][0]
            )


def test_blocks_that_tensor_parallelism_would_cut(fake_world: FakeWorld) -> None:
    """384 numbers of a row in blocks of 16, split 16 ways: refused before weights are made, and states without blocks are not."""
    fake_world(16)
    config = settings(16, 16, 0, 1, 1)
    config["parallel"]["plan"] = {"blocks.*.down": "rowwise", "blocks.*.up": "colwise"}
    for states in ("int8", "bf16"):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Wide()
        made = {**config, "optimizer": optimizer(states)}
        if states == "bf16":
            plait.initialize(model, made, loss_fn=plait.causal_lm_loss)
            continue
        with pytest.raises(
            ConfigError,
            match="rows of 384 elements in blocks of 16, and 16 processes would cut a block",
        ):
            plait.initialize(model, made, loss_fn=plait.causal_lm_loss)


class Wide(torch.nn.Module):
    """Blocks whose second matrix has rows of 384."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(cases.VOCABULARY, 16)
        self.blocks = torch.nn.ModuleList(WideBlock() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return cases.Output(hidden)


class WideBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 384)
        self.down = torch.nn.Linear(384, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden))
