"""Bytes of optimizer states in other forms: measured in a step, and what the ledger, the predicted peak and the planner say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import plait
from plait.errors import ConfigError
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.planner.job import Layouts
from plait.planner.request import job_of, states_of
from tests.covers import cover
from tests.fake import peaks as peak
from tests.fake.worlds import account, fake_rank, integers, resolved_of
from tests.measured.memory import measure_step
from tests.parity import cases
from tests.parity.optimizers import optimizer
from tests.parity.tensor_parallel import settings
from tests.unit.planner.small_models import real_facts, request_for

FORMS = ["bf16", "int8", "float8"]
LAYOUTS = [
    # (ranks, tp, ZeRO stage, replicas, rank)
    (1, 1, 0, 1, 0), (2, 1, 0, 1, 0), (3, 1, 1, 1, 2), (4, 1, 2, 2, 0), (7, 1, 3, 1, 6), (64, 1, 3, 1, 0), (4, 2, 0, 1, 1), (8, 4, 3, 1, 5),
]  # fmt: skip


def features(world, tp, stage, replicas, rank, precision, states):
    return frozenset({(world, tp, stage), (stage, states), (tp > 1, states), (precision, states)})


@pytest.mark.parametrize(
    ("world", "tp", "stage", "replicas", "rank", "precision", "states"),
    cover(
        (
            (*layout, precision, states)
            for layout in LAYOUTS
            for precision in ("fp32", "bf16")
            for states in FORMS
        ),
        features=features,
        strength=1,
    ),
)
def test_as_priced(fake_world, world, tp, stage, replicas, rank, precision, states):
    """Every kind, to the byte: uneven shards, ranks without a row, heads and rows split over tp."""
    config = {
        **settings(world, tp, stage, replicas, 1),
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": optimizer(states),
    }
    fake = fake_rank(fake_world, "wide", config, rank=rank, tied=True)
    found = integers(fake.ledger.memory)
    assert measure_step(fake.engine, fake.data) == found
    model = cases.build("wide", tied=True, dtype=torch.float32)
    usual = integers(account(model, resolved_of(config), rank, optimizer_states=None).memory)[
        "optimizer"
    ]
    assert not usual or found["optimizer"] < usual * (0.8 if states == "bf16" else 0.35)


@pytest.mark.parametrize("rank", [0, 2])
def test_in_a_pipeline(fake_world, rank):
    """Tied embeddings are at both ends."""
    fake_world(4, rank)
    config = {**settings(4, 1, 2, 1, 4), "optimizer": optimizer("int8")}
    config["parallel"] |= {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "1f1b"}}
    model, resolved = (
        cases.build("wide", tied=True, dtype=torch.float32, layers=4),
        resolved_of(config),
    )
    wanted = integers(account(model, resolved, rank).memory)["optimizer"]
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    made = [value for state in engine.optimizer.state.values() for value in state.values()]
    assert (
        sum(local.nbytes for local in (getattr(value, "_local_tensor", value) for value in made))
        == wanted
    )


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
def test_peak(fake_world, stage, tp, bf16, states):
    """Within 2 % of a real step's, and the states in it to the byte."""
    config = peak.settings(stage=stage, tp=tp, bf16=bf16) | {
        "optimizer": optimizer(states),
        "communication_data_type": "fp32",
    }
    peak.check(*peak.predicted_and_measured(fake_world, "wide", config))


@pytest.mark.parametrize("states", FORMS)
def test_planner(states):
    """Its own account of the states is the ledger's, and it proposes no host for them."""
    request = replace(request_for("llama"), optimizer_states=states)
    assert not request.techniques.offload
    for tp, stage, shard in ((1, 3, 4), (2, 1, 2)):
        layouts = Layouts(tp=np.array([tp]), dp_shard=shard, stage=stage)
        found = states_of(request, job_of(request, layouts)).first["optimizer"][0]
        ledger = Ledger.start(tp=tp, dp_shard=shard, optimizer_states=states)
        techniques = (TensorParallel(), Precision(compute="bfloat16"), DataParallel(stage=stage))
        assert (
            found == account_all(techniques, ledger, real_facts("llama", tp)).memory["optimizer"][0]
        )


class WideBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 384), torch.nn.Linear(384, 16)

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden))


class Wide(torch.nn.Module):
    """Blocks whose second matrix has rows of 384."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(cases.VOCABULARY, 16)
        self.blocks = torch.nn.Sequential(WideBlock(), WideBlock())

    def forward(self, input_ids):
        return cases.Output(self.blocks(self.embed(input_ids)))


def test_blocks_that_tensor_parallelism_would_cut(fake_world):
    """384 numbers of a row in blocks of 16, split 16 ways: refused before weights are made, and states without blocks are not."""
    fake_world(16)
    config = settings(
        16,
        16,
        0,
        1,
        1,
        plan={"blocks.*.down": "rowwise", "blocks.*.up": "colwise"},
        blocks=["blocks.*"],
    )
    with torch.device("meta"):
        models = Wide(), Wide()
    plait.initialize(
        models[0], {**config, "optimizer": optimizer("bf16")}, loss_fn=plait.causal_lm_loss
    )
    with pytest.raises(
        ConfigError,
        match="rows of 384 elements in blocks of 16, and 16 processes would cut a block",
    ):
        plait.initialize(
            models[1], {**config, "optimizer": optimizer("int8")}, loss_fn=plait.causal_lm_loss
        )
