"""Compressed collectives between real processes: near the exact result, the same on every rank, resumed to the bit, and good enough to
train a language model."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import plait
from plait.cluster.mesh import split_by_node
from plait.comm.all_reduce import Flat
from plait.comm.compress import (
    POWERSGD_START,
    PowerSGDBuckets,
    QuantisedAllGather,
    QuantisedReduceScatter,
)
from plait.comm.quantise import Packing, Segment
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity import pipelines as pipeline
from tests.parity.data_parallel import settings

CPU = torch.device("cpu")


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gathers(rank, ranks, bits):
    """Vectors exact, matrices within half a scale. Runs in a worker."""
    segments = [Segment(700, True), Segment(9, False)]
    gather = QuantisedAllGather(segments, bits=bits)
    shards = [numbers(r, 709) for r in range(ranks)]
    output = gather.allocate((ranks * 709,), dtype=torch.float32, device=CPU)
    gather(output, shards[rank], dist.group.WORLD)
    rows = output.view(ranks, 709)
    for row, shard in zip(rows, shards, strict=True):
        assert torch.equal(row[700:], shard[700:])
        assert (
            0 < (row - shard)[:700].abs().max() <= 0.51 * shard.abs().max() / {8: 127, 4: 7}[bits]
        )
    whole = torch.arange(ranks * 4)
    found = torch.empty_like(whole)
    gather(found, whole.view(ranks, 4)[rank], dist.group.WORLD)
    assert torch.equal(found, whole), "whole numbers are no weights"
    return output


@pytest.mark.parametrize("bits", [4, 8])
def test_all_gather(pool, bits):
    """Also this rank's own shard is what arrived elsewhere."""
    results = pool.run(3, gathers, bits)
    assert all(torch.equal(result, results[0]) for result in results)


def two_machines():
    return split_by_node([range(4)], [0, 0, 1, 1])


def scatters(rank, ranks, hops):
    """(largest error, scale, bytes by size of the group). Runs in a worker."""
    segments = [Segment(5000, True), Segment(10, False)]
    scatter = QuantisedReduceScatter(
        segments, bits=8, feedback=False, levels=two_machines() if hops == 2 else None
    )
    inputs = [numbers(r, ranks, 5010) for r in range(ranks)]
    output = scatter.allocate((5010,), dtype=torch.float32, device=CPU)
    with count_traffic() as traffic:
        scatter(output, inputs[rank].view(-1), dist.group.WORLD, dist.ReduceOp.SUM)
    exact = torch.stack(inputs).sum(0)[rank]
    torch.testing.assert_close(output[5000:], exact[5000:], rtol=0, atol=1e-5)
    mean = torch.empty_like(output)
    scatter(mean, inputs[rank].view(-1), dist.group.WORLD, dist.ReduceOp.AVG)
    assert torch.equal(mean, output / ranks)
    sent: dict[int, int] = {}
    for call in traffic.calls:
        sent[call.ranks] = sent.get(call.ranks, 0) + round(call.wire_bytes)
    return (
        float((output - exact)[:5000].abs().max()),
        max(float(x.abs().max()) for x in inputs) / 127,
        sent,
    )


@pytest.mark.parametrize("hops", [1, 2])
def test_reduce_scatter(pool, hops):
    """Two hops round a second time, and send a half of the bytes of one hop across machines (2 machines of 2)."""
    row = Packing((Segment(5000, True), Segment(10, False)), 8).row_bytes(torch.float32)
    for error, scale, sent in pool.run(4, scatters, hops):
        assert 0 < error <= (0.51 * 4 if hops == 1 else 0.51 * 4 + 0.51 * 2 * 2) * scale
        # One hop: three parts to three others. Two hops: two parts inside the machine, then one across.
        assert sent == ({4: 3 * row} if hops == 1 else {2: 2 * row + row})


def like_torch(rank, ranks):
    """PowerSGD beside torch's DDP hook on the same gradients. Runs in a worker."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    shapes = ((40, 30), (64, 8), (3, 3))

    class Bucket:
        def __init__(self, flat):
            self.flat = flat

        def buffer(self):
            return self.flat

        def index(self):
            return 0

        def is_last(self):
            return True

        def gradients(self):
            sizes = [a * b for a, b in shapes]
            return [
                part.view(shape) for part, shape in zip(self.flat.split(sizes), shapes, strict=True)
            ]

    mine = PowerSGDBuckets(dist.group.WORLD, [Flat(torch.float32, shapes)], CPU, rank=2)
    state = PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=POWERSGD_START
    )
    worst = 0.0
    for step in range(POWERSGD_START + 8):
        gradient = numbers(step * 10 + rank, mine.buffers[0].numel())
        if step == POWERSGD_START:  # the first factors are random, and drawn otherwise
            right = torch.cat(
                [
                    tensor.T.reshape(-1)
                    for name, tensor in mine.state.items()
                    if name.endswith("right")
                ]
            )
            state.q_memory_dict[0], state.p_memory_dict[0] = (
                right.clone(),
                torch.zeros(2 * (40 + 64)),
            )
        mine.buffers[0].copy_(gradient)
        mine.start(0)
        mine.finish(0)
        theirs = powerSGD_hook(state, Bucket(gradient.clone())).wait() * ranks
        worst = max(worst, float((mine.buffers[0] - theirs).abs().max()))
    return worst


def test_powersgd_is_torchs(pool):
    assert max(pool.run(2, like_torch)) < 1e-3


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0 int8": (0, {"compress_gradients": "int8"}),
    "stage 0 int4": (0, {"compress_gradients": "int4"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd", "powersgd_rank": 2}),
    "stage 1 int8": (1, {"compress_gradients": "int8", "compress_weights": "int8"}),
    "stage 2 int4 with feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
    "stage 3 int8 and a secondary partition": (
        3,
        {"compress_gradients": "int8", "compress_weights": "int8", "secondary_partition": 2},
    ),
}


def configured(world, way, *, replicas=1, **more):
    stage, parallel = WAYS[way]
    config = settings(world, stage, replicas, 1, **more)
    config["parallel"] |= parallel
    return config


def trained(rank, world, config, steps):
    """Losses, and whether every rank that holds a number holds the same bits. Runs in a worker."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    losses = [
        float(engine.train_batch(step[rank]))
        for step in cases.steps_for("llama", world, steps=steps)
    ]
    return losses, same_everywhere(model)


def same_everywhere(model):
    """Whole parameters, by every rank's own reading."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        everyone = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, whole.detach().contiguous())
        if not all(torch.equal(other, everyone[0]) for other in everyone):
            return False
    return True


LAYOUTS = [(way, 4, 1) if "secondary partition" in way else (way, 2, 1) for way in WAYS] + [
    (way, 4, 2) for way in WAYS if "stage 0" not in way
]
"""(way, ranks, dp_replicate)."""


@pytest.mark.parametrize(("way", "world", "replicas"), LAYOUTS)
def test_training_is_near_the_exact_one(pool, way, world, replicas):
    config = configured(world, way, replicas=replicas)
    exact = {
        **config,
        "parallel": {k: v for k, v in config["parallel"].items() if k.startswith("dp_")},
    }
    steps = POWERSGD_START + 4 if "powersgd" in way else 6
    results = pool.run(world, trained, config, steps)
    reference = pool.run(world, trained, exact, steps)[0][0]
    losses = results[0][0]
    assert all(result == (losses, True) for result in results)
    assert losses != reference, "nothing was compressed"
    assert losses == pytest.approx(reference, rel=0.01)


def resumed(rank, world, config, folder, steps, half):
    """Losses of a run, of its second half from a checkpoint, and of that half with errors forgotten. Runs in a worker."""
    data = cases.steps_for("llama", world, steps=steps)

    def engine():
        return cases.engine(cases.build("llama", tied=False, dtype=torch.float32), config)

    whole = engine()
    losses = []
    for number, step in enumerate(data):
        if number == half:
            whole.save_checkpoint(folder)
        losses.append(float(whole.train_batch(step[rank])))
    again = engine()
    again.load_checkpoint(folder)
    with patch("plait.parallel.data.compression.Residuals.load_state", lambda *_: None):
        forgetful = engine()
        forgetful.load_checkpoint(folder)
    return [
        losses[half:],
        *([float(e.train_batch(step[rank])) for step in data[half:]] for e in (again, forgetful)),
    ]


@pytest.mark.parametrize("way", ["stage 0 int4", "stage 0 powersgd", "stage 2 int4 with feedback"])
def test_errors_are_in_the_checkpoint(pool, way, tmp_path):
    """A resumed run has the same losses to the bit; without the errors it has not."""
    steps = POWERSGD_START + 6 if "powersgd" in way else 6
    for going_on, again, forgetful in pool.run(
        2, resumed, configured(2, way), str(tmp_path), steps, steps - 3
    ):
        assert again == going_on
        assert forgetful != going_on


def overflowed(rank, world, config):
    """fp16 with a scale that overflows at first. Runs in a worker."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    results = [engine.train_batch(step[rank]) for step in cases.steps_for("llama", world, steps=10)]
    return (
        [r.skipped for r in results],
        [r.loss_scale for r in results],
        [float(r.loss) for r in results],
    )


def test_an_overflow_is_seen_through_the_compression(pool):
    """And leaves no trace in the error: later steps are finite."""
    config = configured(
        2,
        "stage 2 int4 with feedback",
        fp16={"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
    )
    (skipped, scales, losses), other = pool.run(2, overflowed, config)
    assert (skipped, scales, losses) == other
    assert skipped[0] and not skipped[-1]
    assert all(torch.isfinite(torch.tensor(losses)))


def on_two_machines(rank, world, config):
    """As if ranks 0 and 1 were on one machine and 2 and 3 on another. Runs in a worker."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": rank // 2,
    }
    with patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
        model = cases.build("llama", tied=False, dtype=torch.float32)
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        losses = []
        for step in cases.steps_for("llama", world, steps=3):
            with count_traffic() as traffic:
                losses.append(float(engine.train_batch(step[rank])))
    return losses, {call.ranks for call in traffic.calls if call.kind == "all_to_all"}


def test_two_hops_by_themselves_on_two_machines(pool):
    config = settings(4, 2, 1, 1)
    reference = pool.run(4, trained, config, 3)[0][0]
    config["parallel"] |= {"compress_gradients": "int8"}
    results = pool.run(4, on_two_machines, config)
    assert all(result == results[0] for result in results)
    losses, groups = results[0]
    assert groups == {2}
    assert losses == pytest.approx(reference, rel=0.01)


IN_PIPELINE = [
    ("stage 0 powersgd", "interleaved-1f1b"),
    ("stage 2 int4 with feedback", "zbv"),
    *(
        pytest.param(*case, marks=pytest.mark.proof)
        for case in [
            ("stage 0 int8", "1f1b"),
            ("stage 1 int8", "interleaved-1f1b"),
            ("stage 3 int8", "1f1b"),
        ]
    ),
]


def traced(rank, world, config):
    """Gradients of a step, and the weights of this rank at the end. Runs in a worker."""
    engine = cases.engine(cases.build("qwen3", tied=True, layers=pipeline.LAYERS // 2), config)
    trace = engine_trace(
        engine,
        cases.steps_for(
            "qwen3", pipeline.dp_of(config) * config["gradient_accumulation_steps"], steps=1
        ),
    )
    return trace, {
        name: full_tensor_on_cpu(p)
        for name, p in engine.model.named_parameters(remove_duplicate=False)
    }


def gradient_errors(found):
    """Of the first step, for every parameter, over its largest gradient."""
    exact, seen = pipeline.reference("qwen3", True, 8).gradients[0], found.gradients[0]
    pairs = ((seen[name], wanted) for name, wanted in exact.items() if wanted is not None)
    return [
        float((mine - wanted).abs().max() / wanted.abs().max())
        for mine, wanted in pairs
        if mine is not None
    ]


@pytest.mark.parametrize(("way", "schedule"), IN_PIPELINE)
def test_in_a_pipeline(pool, way, schedule):
    """Gradients are as near the exact ones as without a pipeline, and ranks that hold a weight, tied ones of two stages too, hold the same.
    PowerSGD sends its first steps whole."""
    stage, parallel = (
        (3, {"compress_gradients": "int8", "compress_weights": "int8"})
        if way == "stage 3 int8"
        else WAYS[way]
    )
    degrees = {"dp_shard": 2} if stage else {"dp_replicate": 2}
    config = pipeline.settings(stage, 4, schedule, pp=2, **degrees)
    flat = pipeline.settings(stage, 4, **degrees)
    for each in (config, flat):
        each["parallel"] |= parallel
    results = pool.run(4, traced, config)
    errors, alone = (
        gradient_errors(trace) for trace in (results[0][0], pool.run(2, traced, flat)[0][0])
    )
    assert len(errors) == len(alone)
    assert max(errors) <= 2 * max(alone) <= 0.5
    assert (max(errors) > 1e-3) == ("powersgd" not in way), "compressed, and only where it is to be"
    held: dict[str, torch.Tensor] = {}
    for _, weights in results:
        for name, tensor in weights.items():
            assert torch.equal(held.setdefault(name, tensor), tensor), name
