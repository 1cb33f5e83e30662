"""What the checks conclude from numbers: planted differences fail a row."""

from __future__ import annotations

import pytest

from plait.parallel.schedules.schedule import SCHEDULES
from plait.units import GIB
from plait.validation import catalogue, links, memory, overlap, parity, planned, steps
from plait.validation.catalogue import Machine, rows_of
from plait.validation.rows import exit_code, not_run
from plait.verify.parity import Trace


def test_a_prediction_of_memory() -> None:
    """Within 2 %, either way; scaled by 1.05 it is not."""
    assert memory.difference(1000, 1000) == memory.difference(1019, 1000) == memory.difference(981, 1000) == ""
    assert "+5.0%, allowed 2%" in memory.difference(1050, 1000) and memory.difference(950, 1000)
    assert memory.difference(1, 0)


def test_the_shape_of_the_largest_model() -> None:
    """Its layers take about a twentieth of the memory."""
    shape = memory.shape_of(24 * GIB)
    assert 0.03 < 16 * 12.25 * shape["hidden_size"] ** 2 / (24 * GIB) < 0.06
    assert shape["hidden_size"] % shape["num_attention_heads"] == 0


def test_intervals() -> None:
    assert overlap.union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert overlap.outside([(0, 10)], [(1, 2), (4, 5), (9, 12)]) == [(0, 1), (2, 4), (5, 9)]
    assert overlap.outside([(0, 1), (5, 6)], []) == [(0, 1), (5, 6)]


def test_what_is_exposed() -> None:
    """Half of an all-gather and no copy; nothing that overlaps has failed, and so has a trace without what was to be seen."""
    compute, gather = ("gemm", 0.0, 1.0), ("ncclDevKernel_AllGather_RING_LL(", 0.5, 1.5)
    copies = [("Memcpy HtoD (Pinned -> Device)", 0.2, 0.3), ("Memcpy DtoD (Device -> Device)", 1.5, 2.0)]
    found = overlap.shares([compute, gather, *copies], "collectives")
    assert found.outcome == "passed" and found.numbers["collectives"]["hidden_share"] == pytest.approx(0.5)
    assert found.numbers["collectives"]["exposed_share_of_step"] == pytest.approx(0.25)
    assert found.numbers["copies"]["exposed_share_of_step"] == 0
    assert overlap.shares([compute, ("ncclKernel", 1.0, 2.0)], "collectives").outcome == "failed"
    assert "saw no copies" in overlap.shares([compute, gather], "copies").reason
    assert overlap.shares([], "copies").outcome == "failed"


def test_ratios() -> None:
    """The median of the rounds counts."""
    assert steps.of_ratio({"plait": [1.0, 1.0, 9.0], "DDP": [1.0, 1.0, 1.0]}, "DDP", {}).outcome == "passed"
    slow = steps.of_ratio({"plait": [1.3, 1.3, 1.0], "DDP": [1.0, 1.0, 1.0]}, "DDP", {})
    assert slow.outcome == "failed" and "1.30 times that of DDP" in slow.reason
    assert steps.of_ratio({"plait": [float("nan")], "DDP": [1.0]}, "DDP", {}).outcome == "failed"
    assert planned.against(1.4, 1.0).outcome == planned.against(1.0, 1.4).outcome == "passed"
    assert planned.against(1.6, 1.0).outcome == planned.against(1.0, 1.6).outcome == planned.against(1.0, 0.0).outcome == "failed"
    assert links.slower("to_host", 20e9, 25e9) == "" and "12.0 GB/s" in links.slower("to_host", 12e9, 25e9)


def test_compressed_gradients() -> None:
    """A loss that is 3 % off, or not a number, has failed."""

    def trace(*losses: float) -> Trace:
        return Trace(losses, tuple(1.0 for _ in losses), (), {})

    assert parity.compressed(trace(2.0, 1.01), trace(2.0, 1.0)).outcome == "passed"
    assert parity.compressed(trace(2.0, 1.03), trace(2.0, 1.0)).outcome == "failed"
    assert parity.compressed(trace(float("nan")), trace(2.0)).outcome == "failed"


@pytest.mark.parametrize("gpus", range(1, 9))
def test_rows_of_a_machine(gpus: int) -> None:
    """Names are unique, every schedule has a row, and what needs links is not run on one GPU."""
    rows = rows_of(Machine(gpus=gpus, memory_bytes=80 * GIB))
    assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in rows} >= {f"parity/pp-{schedule}" for schedule in SCHEDULES}
    alone = {row.name for row in rows if "one GPU" in row.without}
    assert alone == ({"links/gpus", "overlap/collectives"} if gpus == 1 else set())
    assert all(row.ranks <= 8 for row in rows) and all(row.ranks <= gpus or row.check.startswith(("parity", "memory")) for row in rows)
    assert {row.name for row in rows if "DeepSpeed is not installed" in row.without} == {
        "step/deepspeed-1", "step/deepspeed-2", "step/deepspeed-3", "offload/deepspeed",
    }  # fmt: skip
    assert (f"parity/all-{gpus}-zero3" in {row.name for row in rows}) == (gpus > 2)


def test_rows_that_a_machine_cannot_run() -> None:
    """With the reason; a validation of which nothing ran does not end well."""
    small = {row.name: row.without for row in rows_of(Machine(gpus=1, memory_bytes=4 * GIB))}
    assert small["parity/3d-bf16"] == "8 ranks on a GPU need 8 GiB, and it has 4.0 GiB" and not small["parity/pp4-fp32"]
    bare = rows_of(Machine(gpus=2, memory_bytes=80 * GIB, transformers=False))
    assert {row.name for row in bare if not row.without} == {"links/host", "links/gpus"}
    assert exit_code([not_run(row, row.without) for row in bare if row.without]) == 1
    assert max(row.ranks for row in rows_of(Machine(gpus=16, memory_bytes=80 * GIB))) == catalogue.MOST_GPUS
