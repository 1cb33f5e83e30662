"""What the planner says of model states against the ledger of the real model, split by its real plan."""

from dataclasses import replace

import numpy as np
import pytest

from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import OptimizerOffload
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.planner.job import SCHEDULES, Layouts
from plait.planner.request import job_of
from plait.planner.states import account_states
from tests.unit.planner.small_models import SMALL, real_facts, request_for

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", SMALL)  # fmt: skip
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("stage", "replicate", "shard", "accumulation"),
    [(0, 2, 1, 1), (0, 2, 1, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 1, 4, 1)],
)
def test_equal_to_the_accounts_of_the_real_model(kind, tp, stage, replicate, shard, accumulation):
    request = request_for(kind)
    layouts = Layouts(
        tp=np.array([tp]),
        dp_replicate=replicate,
        dp_shard=shard,
        stage=stage,
        accumulation=accumulation,
    )
    found = account_states(job_of(request, layouts)).first
    ledger = Ledger.start(tp=tp, dp_replicate=replicate, dp_shard=shard, accumulation=accumulation)
    techniques = (TensorParallel(), Precision(compute="bfloat16"), DataParallel(stage=stage))
    memory = account_all(techniques, ledger, real_facts(kind, tp)).memory
    assert found["weights"][0] == memory["parameters"][0]
    assert found["gradients"][0] == max(memory["gradients"][0], memory["unsharded_gradients"][0])
    assert found["optimizer"][0] == memory["optimizer"][0]
    assert found["gathered"][0] >= memory["gathered_parameters"][0]


def test_stages_of_a_pipeline_hold_the_whole_model_between_them():
    request = request_for("llama")
    one = account_states(job_of(request, Layouts(tp=np.array([1]))))
    layouts = Layouts(tp=np.array([1]), pp=3, schedule=SCHEDULES.index("1f1b"), accumulation=1)
    three = account_states(job_of(request, layouts))
    model = request.model.architecture
    middle = 4 * float(model.block_parameters) / 3
    assert three.first["weights"][0] + three.last["weights"][0] + middle == pytest.approx(
        one.first["weights"][0]
    )


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline():
    request = request_for("llama")
    architecture = request.model.architecture
    layouts = Layouts(tp=np.array([1]), pp=2, schedule=SCHEDULES.index("1f1b"), accumulation=1)
    tied, untied = (
        account_states(
            job_of(
                replace(
                    request,
                    model=replace(request.model, architecture=replace(architecture, tied=value)),
                ),
                layouts,
            )
        )
        for value in (True, False)
    )
    table = 4 * architecture.vocab * architecture.hidden
    for ends in (tied, untied):
        assert ends.first["weights"][0] >= table and ends.last["weights"][0] == pytest.approx(
            untied.last["weights"][0]
        )


def test_the_share_of_states_on_the_host_is_the_engines():
    """The engine takes blocks, so up to one more than the share; of them the host has master weights, gradients and states."""
    facts, request = real_facts("llama", 1), request_for("llama")
    found = account_states(
        job_of(request, Layouts(tp=np.array([1]), dp_shard=8, stage=2, offload=np.array([0.5])))
    ).first
    ledger = Ledger.start(tp=1, dp_shard=8, accumulation=1)
    techniques = (
        Precision(compute="bfloat16"),
        OptimizerOffload(device="cpu", ratio=0.5),
        DataParallel(stage=2),
    )
    host = account_all(techniques, ledger, facts).memory["host"][0]
    block = (
        float(request.model.architecture.block_parameters / request.model.architecture.layers)
        * 16
        / 8
    )
    assert found["host"][0] <= host + 8 * len(facts.parameters) and host <= found["host"][0] + block
    whole = account_states(job_of(request, Layouts(tp=np.array([1]), dp_shard=8, stage=2))).first
    assert found["optimizer"][0] == pytest.approx(whole["optimizer"][0] / 2)


def test_offload_takes_the_optimizer_off_the_device():
    job = job_of(
        request_for("llama"),
        Layouts(tp=np.array([1, 1]), dp_shard=8, stage=2, offload=np.array([0, 1])),
    )
    states = account_states(job).first
    for kind in ("weights", "gradients", "optimizer"):
        assert states[kind][0] > 0 and states[kind][1] == 0, kind
    assert states["gathered"][0] == states["gathered"][1] > 0
