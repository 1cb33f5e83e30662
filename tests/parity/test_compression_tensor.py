"""Compression with tensor parallelism.

Parameters that all ranks of the tp axis hold keep the same bits on them, and gradients stay near
those of one process.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait._torch.tensors import local_tensor
from plait.comm.all_reduce import Flat
from plait.comm.compress import POWERSGD_START, PowerSGDBuckets
from plait.comm.transport import connect
from plait.parallel.data import compression
from plait.parallel.data.compression import CompressionAutotuner
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepEnd
from plait.parallel.parameter_layout import sharded_axes
from plait.parallel.techniques import data_collectives
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import materialise_model, plain_trace
from tests.parity.tensor_parallel import plan, settings

METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0 int8": (0, {"compress_gradients": "int8", "error_feedback": True}),
    "stage 0 int4": (0, {"compress_gradients": "int4"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd", "powersgd_rank": 1}),
    "stage 2 int8": (2, {"compress_gradients": "int8", "compress_weights": "int8"}),
    "stage 3 int4": (3, {"compress_gradients": "int4", "error_feedback": True}),
}
BOUNDS = {"int8": 0.02, "int4": 0.3, "powersgd": 1e-5}
"""Largest errors over the largest element of all gradients: half a scale per rank and hop.

PowerSGD sends its first steps uncompressed.
"""


def build():
    return cases.build("plain", tied=False, dtype=torch.float32)


def engine_of(world, stage, **parallel):
    return cases.engine(build(), settings(world, 2, stage, 1, 1, **plan("plain"), **parallel))


def steps_of(micro_batches, steps):
    """Return steps that use every parameter, also the side branches, which no rule splits."""
    return [
        [{**batch, "side": True} for batch in step]
        for step in cases.steps_for("plain", micro_batches, steps=steps)
    ]


def unequal_parameters(engine):
    """Return the replicated parameters whose bits differ between ranks of the tp axis."""
    names = []
    for name, parameter in engine.model.named_parameters():
        if "tp" in sharded_axes(parameter):
            continue
        local = local_tensor(parameter.detach()).contiguous()
        copies = [torch.empty_like(local) for _ in range(engine.mesh.layout.tp)]
        dist.all_gather(copies, local, group=engine.mesh.group("tp"))
        if not all(torch.equal(copy, copies[0]) for copy in copies):
            names.append(name)
    return names


def trained(rank, world, method, steps):
    """Runs on every rank."""
    stage, parallel = METHODS[method]
    engine = engine_of(world, stage, **parallel)
    return engine_trace(engine, steps_of(world // 2, steps)), unequal_parameters(engine)


@cache
def reference():
    """Return the gradients of the first step in one plain process."""
    gradients = plain_trace(materialise_model(build()), steps_of(2, 1)).gradients[0]
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize("method", METHODS)
def test_replicated_parameters_keep_their_bits_over_tp(pool, method):
    """Split parameters have 51 and 50 rows, or 13 and 12 columns.

    Replicated parameters therefore begin at different places of the two ranks' buckets.
    """
    steps = POWERSGD_START + 3 if "powersgd" in method else 4
    largest = max(float(gradient.abs().max()) for gradient in reference().values())
    bound = BOUNDS[method.split()[-1]] * largest
    for trace, unequal in pool.run(4, trained, method, steps):
        assert unequal == []
        for name, expected in reference().items():
            assert float((trace.gradients[0][name] - expected).abs().max()) < bound, name


def test_factors_do_not_depend_on_other_buckets():
    """Ranks of the tp axis may fill different numbers of buckets before those they share."""

    def first_factors(own_buckets):
        flats = [Flat(torch.float32, ((40, 30),), tp_local=True)] * own_buckets
        flats.append(Flat(torch.float32, ((64, 20),)))
        # No process group exists in this process.
        with patch("torch.distributed.distributed_c10d.get_world_size", lambda *_: 2):
            group: Any = dist.group.WORLD
            buckets = PowerSGDBuckets(group, flats, torch.device("cpu"), rank=2)
        return buckets.state[f"{own_buckets}.0.right"]

    factors = first_factors(1)
    assert torch.equal(factors, first_factors(3))
    # They are random numbers and not one repeated column.
    assert not torch.equal(factors, first_factors(0)[:, :1].expand(-1, 20))


def decided(rank, world, stage):
    """Return the decision if compression saves time on one tp coordinate only.

    Runs on every rank.
    """
    engine = engine_of(world, stage, compress_gradients="auto", transport="torch")
    autotuner = engine.hooks.find(CompressionAutotuner)
    slow = engine.mesh.coordinates["tp"] == 1
    clock = 0.0

    def perf_counter():
        nonlocal clock
        if not slow:
            clock += 1e-3
        elif autotuner._active is None:
            clock += 1.0
        else:
            clock += 0.5
        return clock

    with patch.object(compression.time, "perf_counter", perf_counter):
        for _ in range(60):
            if int(autotuner.decision) >= 0:
                break
            autotuner.after_step(StepEnd(skipped=False))
    return int(autotuner.decision)


@pytest.mark.parametrize("stage", [0, 2])
def test_all_tp_ranks_take_one_decision(pool, stage):
    decisions = pool.run(4, decided, stage)
    assert decisions[0] >= 0
    assert len(set(decisions)) == 1


def chosen(rank, world):
    """Return the choices if one tp coordinate has no shared memory and other measurements.

    Runs on every rank.
    """

    def connect_without_shared_memory(group, **options):
        if rank % 2:
            options["requested"] = "torch"
        return connect(group, **options)

    with patch.object(data_collectives, "connect", connect_without_shared_memory):
        engine = engine_of(world, 0)
    # Measured links go through this function. Those of gloo never differ enough to change a choice.
    broadcast = data_collectives._broadcast_over_tp(engine.mesh, (rank, rank * 10))
    reduction = type(engine.hooks.find(Reducer).reduction)
    return reduction.__name__, engine.communication, broadcast[0]


def test_all_tp_ranks_sum_with_one_algorithm(pool):
    """The algorithm of a sum decides its order, and so its bits."""
    reductions, descriptions, broadcast = zip(*pool.run(4, chosen), strict=True)
    assert len(set(reductions)) == 1
    assert broadcast == (0, 0, 2, 2)
    assert not any("shared-memory" in description for description in descriptions)
