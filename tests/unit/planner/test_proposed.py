"""What a plan does not propose because it cannot be, or is not priced."""

from plait.planner.hardware import cluster
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.models import find_model
from plait.planner.offers import SPLIT_BACKWARD, offered, supports_measures
from plait.planner.request import Request
from plait.planner.space import space_of


def test_no_recomputation_where_gradients_of_weights_are_put_off() -> None:
    recomputed = RECOMPUTE.index("full")
    for name in (*SPLIT_BACKWARD, "1f1b"):
        schedule = SCHEDULES.index(name)
        splits = name in SPLIT_BACKWARD
        assert offered().runs(name, pp=2, micro_batches=8, chunks=1 + splits, zero=1)
        assert supports_measures(Layouts(schedule=schedule))
        assert supports_measures(Layouts(schedule=schedule, recompute=recomputed)) == (not splits)


def test_every_proposed_stage_has_a_layer() -> None:
    """126 layers: 128 chunks would divide layers and ends, and two stages would be empty, which the engine refuses."""
    request = Request(find_model("llama-3-405b", sequence=8192), cluster("h100", 1024), 1024, 8192)
    space = space_of(request).layouts
    interleaved = [SCHEDULES.index(name) for name in ("interleaved", "interleaved-zb")]
    assert ((space.pp * space.vpp) <= 126).all() and any(
        (space.schedule == kind).any() for kind in interleaved
    )
