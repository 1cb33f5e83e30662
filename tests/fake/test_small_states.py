"""Bytes of quantised optimizer states: measured, and in the ledger, the peak and the planner."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
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
    (1, 1, 0, 1, 0), (2, 1, 0, 1, 0), (3, 1, 1, 1, 2), (4, 1, 2, 2, 0),
    (7, 1, 3, 1, 6), (64, 1, 3, 1, 0), (4, 2, 0, 1, 1), (8, 4, 3, 1, 5),
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
def test_memory(fake_world, world, tp, stage, replicas, rank, precision, states):
    """The layouts have uneven shards, ranks without a row, and heads and rows split over tp."""
    config = {
        **settings(world, tp, stage, replicas, 1),
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": optimizer(states),
    }
    fake = fake_rank(fake_world, "wide", config, rank=rank, tied=True)
    memory = integers(fake.ledger.memory)
    assert measure_step(fake.engine, fake.data) == memory
    model = cases.build("wide", tied=True, dtype=torch.float32)
    plain = account(model, resolved_of(config), rank, optimizer_states=None)
    plain_bytes = integers(plain.memory)["optimizer"]
    share = 0.8 if states == "bf16" else 0.35
    assert not plain_bytes or memory["optimizer"] < plain_bytes * share


@pytest.mark.parametrize("rank", [0, 2])
def test_pipeline(fake_world, rank):
    """Both ends have states of tied embeddings."""
    fake_world(4, rank)
    config = {**settings(4, 1, 2, 1, 4), "optimizer": optimizer("int8")}
    config["parallel"] |= {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "1f1b"}}
    model = cases.build("wide", tied=True, dtype=torch.float32, layers=4)
    resolved = resolved_of(config)
    expected = integers(account(model, resolved, rank).memory)["optimizer"]
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    assert sum(local_tensor(value).nbytes for value in states) == expected


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
    config = peak.settings(stage=stage, tp=tp, bf16=bf16) | {
        "optimizer": optimizer(states),
        "communication_data_type": "fp32",
    }
    peak.check(*peak.predicted_and_measured(fake_world, "wide", config))


@pytest.mark.parametrize("states", FORMS)
def test_planner(states):
    """The planner counts states as the ledger does, and does not offload them."""
    request = replace(request_for("llama"), optimizer_states=states)
    assert not request.techniques.offload
    for tp, stage, shard in ((1, 3, 4), (2, 1, 2)):
        layouts = Layouts(tp=np.array([tp]), dp_shard=shard, stage=stage)
        planned = states_of(request, job_of(request, layouts)).first["optimizer"][0]
        ledger = Ledger.start(tp=tp, dp_shard=shard, optimizer_states=states)
        techniques = (TensorParallel(), Precision(compute="bfloat16"), DataParallel(stage=stage))
        ledger = account_all(techniques, ledger, real_facts("llama", tp))
        assert planned == ledger.memory["optimizer"][0]


class WideBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 384)
        self.down = torch.nn.Linear(384, 16)

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden))


class Wide(torch.nn.Module):
    """Blocks whose second matrix has rows of 384 elements."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(cases.VOCABULARY, 16)
        self.blocks = torch.nn.Sequential(WideBlock(), WideBlock())

    def forward(self, input_ids):
        return cases.Output(self.blocks(self.embed(input_ids)))


def test_layout_that_cuts_quantisation_blocks_is_refused(fake_world):
    """16 ranks get 24 elements of a row each, and a block has 16. States in bf16 have no blocks."""
    fake_world(16)
    plan = {"blocks.*.down": "rowwise", "blocks.*.up": "colwise"}
    config = settings(16, 16, 0, 1, 1, plan=plan, blocks=["blocks.*"])

    def initialize(states):
        with torch.device("meta"):
            model = Wide()
        config["optimizer"] = optimizer(states)
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)

    initialize("bf16")
    message = "rows of 384 elements in blocks of 16, and 16 processes would cut a block"
    with pytest.raises(ConfigError, match=message):
        initialize("int8")
