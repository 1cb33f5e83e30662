"""Model states in the planner equal the ledger of the real model, split by its real plan."""

from dataclasses import replace

import pytest

from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import OptimizerOffload
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.planner.job import SCHEDULES
from plait.planner.request import job_of
from plait.planner.states import account_states
from tests.unit.planner.jobs import layouts
from tests.unit.planner.small_models import SMALL, real_facts, request_for

pytest.importorskip("transformers")


def states_of(request, **fields):
    """Return the states of one layout, at both ends of its pipeline."""
    return account_states(job_of(request, layouts(**fields)))


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("stage", "replicate", "shard", "accumulation"),
    [(0, 2, 1, 1), (0, 2, 1, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 1, 4, 1)],
)
def test_equal_to_the_accounts_of_the_real_model(kind, tp, stage, replicate, shard, accumulation):
    degrees = {"tp": tp, "dp_replicate": replicate, "dp_shard": shard, "accumulation": accumulation}
    states = states_of(request_for(kind), stage=stage, **degrees).first
    ledger = Ledger.start(**degrees)
    techniques = (TensorParallel(), Precision(compute="bfloat16"), DataParallel(stage=stage))
    memory = account_all(techniques, ledger, real_facts(kind, tp)).memory
    assert states["weights"][0] == memory["parameters"][0]
    assert states["gradients"][0] == max(memory["gradients"][0], memory["unsharded_gradients"][0])
    assert states["optimizer"][0] == memory["optimizer"][0]
    assert states["gathered"][0] >= memory["gathered_parameters"][0]


def test_the_stages_of_a_pipeline_hold_the_model_once():
    request = request_for("llama")
    full = states_of(request, tp=1).first["weights"][0]
    ends = states_of(request, tp=1, pp=3, schedule=SCHEDULES.index("1f1b"), accumulation=1)
    middle = 4 * float(request.model.architecture.block_parameters) / 3
    weights = ends.first["weights"][0] + ends.last["weights"][0] + middle
    assert weights == pytest.approx(full)


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline():
    request = request_for("llama")
    architecture = request.model.architecture
    table = 4 * architecture.vocab * architecture.hidden

    def ends(tied):
        model = replace(request.model, architecture=replace(architecture, tied=tied))
        fields = {"tp": 1, "pp": 2, "schedule": SCHEDULES.index("1f1b"), "accumulation": 1}
        return states_of(replace(request, model=model), **fields)

    head = ends(tied=False).last["weights"][0]
    for tied in (True, False):
        assert ends(tied).first["weights"][0] >= table
        assert ends(tied).last["weights"][0] == pytest.approx(head)


def test_the_share_of_states_on_the_host_is_the_engines():
    facts = real_facts("llama", 1)
    request = request_for("llama")
    states = states_of(request, tp=1, dp_shard=8, stage=2, offload=0.5).first
    ledger = Ledger.start(tp=1, dp_shard=8, accumulation=1)
    techniques = (
        Precision(compute="bfloat16"),
        OptimizerOffload(device="cpu", ratio=0.5),
        DataParallel(stage=2),
    )
    host = account_all(techniques, ledger, facts).memory["host"][0]

    # The engine offloads full blocks, so up to one more than the share. Their master weights,
    # gradients and states have 16 bytes per parameter. Shards are padded.
    architecture = request.model.architecture
    block = float(architecture.block_parameters / architecture.layers) * 16 / 8
    padding = 8 * len(facts.parameters)
    assert host - block <= states["host"][0] <= host + padding
    full = states_of(request, tp=1, dp_shard=8, stage=2).first
    assert states["optimizer"][0] == pytest.approx(full["optimizer"][0] / 2)


def test_offload_takes_the_optimizer_off_the_device():
    request = request_for("llama")
    on_device = states_of(request, tp=1, dp_shard=8, stage=2).first
    on_host = states_of(request, tp=1, dp_shard=8, stage=2, offload=1).first
    for kind in ("weights", "gradients", "optimizer"):
        assert on_device[kind][0] > 0 and on_host[kind][0] == 0, kind
    assert on_device["gathered"][0] == on_host["gathered"][0] > 0
