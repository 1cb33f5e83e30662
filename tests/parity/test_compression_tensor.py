"""Compression with tensor parallelism (defect A18): what every rank of the tp axis holds keeps the same bits on all of them, and gradients
stay near those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait._torch.tensors import local_tensor
from plait.cluster.mesh import Mesh
from plait.comm.all_reduce import Flat
from plait.comm.compress import POWERSGD_START, PowerSGDBuckets
from plait.comm.transport import connect
from plait.model.blocks import find_blocks
from plait.parallel import materialise
from plait.parallel.data import compression
from plait.parallel.data.compression import CompressionAutotuner
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepEnd
from plait.parallel.parameter_layout import sharded_axes
from plait.parallel.techniques import data_collectives
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import SEED, plain_trace
from tests.parity.tensor_parallel import plan, settings

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0 int8": (0, {"compress_gradients": "int8", "error_feedback": True}),
    "stage 0 int4": (0, {"compress_gradients": "int4"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd", "powersgd_rank": 1}),
    "stage 2 int8": (2, {"compress_gradients": "int8", "compress_weights": "int8"}),
    "stage 3 int4": (3, {"compress_gradients": "int4", "error_feedback": True}),
}
BOUNDS = {"int8": 0.02, "int4": 0.3}
"""Of the largest element of all gradients: half a scale a rank and hop."""


def data(micro_batches, steps):
    """Every parameter is used, those that no rule splits too (`blocks.*.side`)."""
    return [
        [{**piece, "side": True} for piece in step]
        for step in cases.steps_for("plain", micro_batches, steps=steps)
    ]


def differing(engine):
    """Parameters that the tp axis does not split, and whose bits are not the same on all of its ranks."""
    found = []
    group = engine.mesh.group("tp")
    for name, parameter in engine.model.named_parameters():
        if "tp" in sharded_axes(parameter):
            continue
        mine = local_tensor(parameter.detach()).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(engine.mesh.layout.tp)]
        dist.all_gather(everyone, mine, group=group)
        if not all(torch.equal(other, everyone[0]) for other in everyone):
            found.append(name)
    return found


def configured(world, way):
    stage, parallel = WAYS[way]
    return settings(world, 2, stage, 1, 1, **plan("plain"), **parallel)


def trained(rank, world, way, steps):
    """Runs in a worker."""
    engine = cases.engine(
        cases.build("plain", tied=False, dtype=torch.float32), configured(world, way)
    )
    return engine_trace(engine, data(world // 2, steps)), differing(engine)


@cache
def reference(micro_batches):
    """The first step of one plain process."""
    model = cases.build("plain", tied=False, dtype=torch.float32)
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, find_blocks(model), seed=SEED)
    steps = data(micro_batches, 1)
    return plain_trace(model, steps)


@pytest.mark.parametrize("way", WAYS)
def test_replicated_parameters_keep_their_bits_over_tp(pool, way):
    """A18: 51 and 50 rows of the vocabulary and 13 and 12 columns are before and between what is whole on both ranks."""
    steps = POWERSGD_START + 3 if "powersgd" in way else 4
    for trace, different in pool.run(4, trained, way, steps):
        assert different == []
        exact = {
            name: gradient
            for name, gradient in reference(2).gradients[0].items()
            if gradient is not None
        }
        largest = max(float(gradient.abs().max()) for gradient in exact.values())
        for name, wanted in exact.items():
            found = trace.gradients[0][name]
            assert found is not None
            bound = next((b for bits, b in BOUNDS.items() if bits in way), 1e-5)
            assert float((found - wanted).abs().max()) < bound * largest, name


def test_factors_do_not_depend_on_other_buckets():
    """A18: a rank of the tp axis whose parts fill more buckets starts with the same factors for what all ranks hold."""

    def first_factors(parts):
        flats = [
            *[Flat(torch.float32, ((40, 30),), tp_local=True)] * parts,
            Flat(torch.float32, ((64, 20),)),
        ]
        with patch("torch.distributed.distributed_c10d.get_world_size", lambda *_: 2):
            made = PowerSGDBuckets(dist.group.WORLD, flats, torch.device("cpu"), rank=2)  # type: ignore[arg-type]
        return made.state[f"{parts}.0.right"]

    assert torch.equal(first_factors(1), first_factors(3))
    assert not torch.equal(first_factors(1), first_factors(0)[:, :1].expand(-1, 20))


def decided(rank, world, stage):
    """One tp coordinate's links seem slow, and only there compression would pay. Runs in a worker."""
    config = settings(
        world, 2, stage, 1, 1, **plan("plain"), compress_gradients="auto", transport="torch"
    )
    engine = cases.engine(cases.build("plain", tied=False, dtype=torch.float32), config)
    assert engine.hooks.find(CompressionAutotuner) is not None
    deciding, slow, clock = (
        engine.hooks.find(CompressionAutotuner),
        engine.mesh.coordinates["tp"] == 1,
        0.0,
    )

    def now():
        nonlocal clock
        clock += (1.0 if deciding._active is None else 0.5) if slow else 1e-3
        return clock

    with patch.object(compression.time, "perf_counter", now):
        for _ in range(60):
            if int(deciding.decision) >= 0:
                break
            deciding.after_step(StepEnd(skipped=False))
    return int(engine.hooks.find(CompressionAutotuner).decision)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_first_steps_decide_for_all_of_tp(pool, stage):
    """A18: a decision by time is one for all ranks that hold the same parameters."""
    found = pool.run(4, decided, stage)
    assert found[0] >= 0
    assert len(set(found)) == 1


def chosen(rank, world):
    """What is chosen where one tp coordinate has no shared memory, and where its links were measured otherwise. Runs in a worker."""

    def half(group, **how):
        return connect(group, **{**how, "requested": "torch"} if rank % 2 else how)

    config = settings(world, 2, 0, 1, 1, **plan("plain"))
    with patch.object(data_collectives, "connect", half):
        engine = cases.engine(cases.build("plain", tied=False, dtype=torch.float32), config)
    assert engine.hooks.find(Reducer) is not None
    mesh: Mesh = engine.mesh
    agreed = data_collectives._broadcast_over_tp(mesh, (rank, rank * 10))
    return (
        type(engine.hooks.find(Reducer).reduction).__name__,
        engine.communication,
        agreed[0],
        str(agreed),
    )


def test_all_of_tp_sum_in_one_way(pool):
    """A18: the algorithm of a sum decides its order."""
    found = pool.run(4, chosen)
    assert len({kind for kind, *_ in found}) == 1
    assert [first for _, _, first, _ in found] == [0, 0, 2, 2]
    assert not any("shared-memory" in said for _, said, _, _ in found)
