"""Compressed collectives between real processes.

Results are near the exact ones, equal on all ranks, and resumed to the bit.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

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
from tests.covers import proof_after
from tests.measured.traffic import count_traffic
from tests.parity import cases, pipelines
from tests.parity.data_parallel import as_two_machines, settings
from tests.parity.full_tensors import full_weights

CPU = torch.device("cpu")


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gathers(rank, ranks, bits):
    """Check an all-gather of a matrix and a vector, and return the result. Runs on every rank."""
    gather = QuantisedAllGather([Segment(700, True), Segment(9, False)], bits=bits)
    shards = [numbers(other, 709) for other in range(ranks)]
    output = gather.allocate((ranks * 709,), dtype=torch.float32, device=CPU)
    gather(output, shards[rank], dist.group.WORLD)
    for row, shard in zip(output.view(ranks, 709), shards, strict=True):
        scale = shard.abs().max() / {8: 127, 4: 7}[bits]
        assert 0 < (row - shard)[:700].abs().max() <= 0.51 * scale
        # Vectors are sent exactly.
        assert torch.equal(row[700:], shard[700:])

    # Integers are no weights and are sent exactly.
    integers = torch.arange(ranks * 4)
    gathered = torch.empty_like(integers)
    gather(gathered, integers.view(ranks, 4)[rank], dist.group.WORLD)
    assert torch.equal(gathered, integers)
    return output


@pytest.mark.parametrize("bits", [4, 8])
def test_all_gather(pool, bits):
    """A rank's own shard is rounded too, so that all ranks have the same values."""
    results = pool.run(3, gathers, bits)
    assert all(torch.equal(result, results[0]) for result in results)


def scatters(rank, ranks, hops):
    """Return the largest error, the scale, and bytes by the size of the group.

    Runs on every rank.
    """
    scatter = QuantisedReduceScatter(
        [Segment(5000, True), Segment(10, False)],
        bits=8,
        feedback=False,
        levels=split_by_node([range(4)], [0, 0, 1, 1]) if hops == 2 else None,
    )
    inputs = [numbers(other, ranks, 5010) for other in range(ranks)]
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
    error = float((output - exact)[:5000].abs().max())
    return error, float(torch.stack(inputs).abs().max()) / 127, sent


@pytest.mark.parametrize("hops", [1, 2])
def test_reduce_scatter(pool, hops):
    """Two hops round a second time, and send half of one hop's bytes across machines."""
    row = Packing((Segment(5000, True), Segment(10, False)), 8).row_bytes(torch.float32)
    if hops == 1:
        # Three rows to three others. Four inputs are rounded to half a scale.
        expected_bytes = {4: 3 * row}
        roundings = 4
    else:
        # Two rows inside of the machine, then one across. A sum of two has a scale of two.
        expected_bytes = {2: 2 * row + row}
        roundings = 4 + 2 * 2
    for error, scale, sent in pool.run(4, scatters, hops):
        assert 0 < error <= 0.51 * roundings * scale
        assert sent == expected_bytes


SHAPES = ((40, 30), (64, 8), (3, 3))


class Bucket:
    """The methods of a bucket that torch's hook calls."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def index(self):
        return 0

    def is_last(self):
        return True

    def gradients(self):
        tensors = self.flat.split([rows * columns for rows, columns in SHAPES])
        return [tensor.view(shape) for tensor, shape in zip(tensors, SHAPES, strict=True)]


def difference_from_torch(rank, ranks):
    """Return the largest difference from torch's DDP hook. Runs on every rank."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    buckets = PowerSGDBuckets(dist.group.WORLD, [Flat(torch.float32, SHAPES)], CPU, rank=2)
    state = PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=POWERSGD_START
    )
    differences = []
    for step in range(POWERSGD_START + 8):
        gradient = numbers(step * 10 + rank, buckets.buffers[0].numel())
        if step == POWERSGD_START:
            # The first factors are random, and torch draws them in another way.
            factors = [
                tensor.T.reshape(-1)
                for name, tensor in buckets.state.items()
                if name.endswith("right")
            ]
            state.q_memory_dict[0] = torch.cat(factors)
            state.p_memory_dict[0] = torch.zeros(2 * (40 + 64))
        buckets.buffers[0].copy_(gradient)
        buckets.start(0)
        buckets.finish(0)
        # torch returns the mean.
        expected = powerSGD_hook(state, Bucket(gradient.clone())).wait() * ranks
        differences.append(float((buckets.buffers[0] - expected).abs().max()))
    return max(differences)


def test_powersgd_equals_torch(pool):
    assert max(pool.run(2, difference_from_torch)) < 1e-3


BOTH_INT8 = {"compress_gradients": "int8", "compress_weights": "int8"}
METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0 int8": (0, {"compress_gradients": "int8"}),
    "stage 0 int4": (0, {"compress_gradients": "int4"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd", "powersgd_rank": 2}),
    "stage 1 int8": (1, BOTH_INT8),
    "stage 2 int4 with feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
    "stage 3 int8": (3, BOTH_INT8),
    "stage 3 int8 and a secondary partition": (3, {**BOTH_INT8, "secondary_partition": 2}),
}


def configured(world, method, *, replicas=1, **sections):
    stage, parallel = METHODS[method]
    config = settings(world, stage, replicas, 1, **sections)
    config["parallel"] |= parallel
    return config


def engine_of(config):
    return cases.engine(cases.build("llama", tied=False, dtype=torch.float32), config)


def trained(rank, world, config, steps):
    """Return the losses, and whether all ranks have the same weights. Runs on every rank."""
    engine = engine_of(config)
    losses = []
    for step in cases.steps_for("llama", world, steps=steps):
        losses.append(float(engine.train_batch(step[rank])))
    return losses, has_equal_weights(engine.model)


def has_equal_weights(model):
    """Compare the full parameters as every rank reads them."""
    for tensor in full_weights(model).values():
        first = tensor.clone()
        dist.broadcast(first, src=0)
        equal = torch.tensor(float(torch.equal(first, tensor)))
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        if not equal:
            return False
    return True


SECONDARY = "stage 3 int8 and a secondary partition"
LAYOUTS = [
    ("stage 0 int8", 2, 1),
    ("stage 0 int4", 2, 1),
    ("stage 0 powersgd", 2, 1),
    ("stage 1 int8", 2, 1),
    ("stage 2 int4 with feedback", 2, 1),
    (SECONDARY, 4, 1),
    ("stage 1 int8", 4, 2),
    ("stage 2 int4 with feedback", 4, 2),
    (SECONDARY, 4, 2),
]
"""Method, number of ranks, dp_replicate."""


@pytest.mark.parametrize(("method", "world", "replicas"), LAYOUTS)
def test_training_is_near_the_exact_one(pool, method, world, replicas):
    config = configured(world, method, replicas=replicas)
    degrees = {key: value for key, value in config["parallel"].items() if key.startswith("dp_")}
    steps = POWERSGD_START + 4 if "powersgd" in method else 6
    results = pool.run(world, trained, config, steps)
    exact, _ = pool.run(world, trained, {**config, "parallel": degrees}, steps)[0]
    losses = results[0][0]
    assert all(result == (losses, True) for result in results)
    # Equal losses would mean that nothing was compressed.
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.01)


def resumed(rank, world, config, folder, steps, save_at):
    """Return the losses after a checkpoint of three engines. Runs on every rank.

    The first one saved it, the second loaded it, and the third loaded it without the errors.
    """
    batches = [step[rank] for step in cases.steps_for("llama", world, steps=steps)]
    engine = engine_of(config)
    engine.save_checkpoint(folder, tag="start")
    first_losses = [float(engine.train_batch(batch)) for batch in batches[:save_at]]
    engine.save_checkpoint(folder)
    copy = engine_of(config)
    copy.load_checkpoint(folder)
    with patch("plait.parallel.data.compression.Residuals.load_state", lambda *_: None):
        without_errors = engine_of(config)
        without_errors.load_checkpoint(folder)
    losses = [
        [float(each.train_batch(batch)) for batch in batches[save_at:]]
        for each in (engine, copy, without_errors)
    ]
    # Errors of this run do not reach the steps after a load.
    engine.load_checkpoint(folder, tag="start")
    assert [float(engine.train_batch(batch)) for batch in batches[:save_at]] == first_losses
    return losses


@pytest.mark.parametrize(
    "method", ["stage 0 int4", "stage 0 powersgd", "stage 2 int4 with feedback"]
)
def test_errors_are_in_the_checkpoint(pool, method, tmp_path):
    steps = POWERSGD_START + 6 if "powersgd" in method else 6
    config = configured(2, method)
    for losses, resumed_losses, losses_without_errors in pool.run(
        2, resumed, config, str(tmp_path), steps, steps - 3
    ):
        assert resumed_losses == losses
        assert losses_without_errors != losses


def loaded_after_training(rank, world, config, folder, steps):
    """Return whether a trained engine that loads equals a new one that loads. Runs on every rank.

    The checkpoint has no state of PowerSGD.
    """
    batches = [step[rank] for step in cases.steps_for("llama", world, steps=steps)]
    parallel = {**config["parallel"]}
    del parallel["compress_gradients"]
    plain = engine_of({**config, "parallel": parallel})
    plain.save_checkpoint(folder)
    trained_engine = engine_of(config)
    for batch in batches:
        trained_engine.train_batch(batch)
    new_engine = engine_of(config)
    states = []
    for engine in (new_engine, trained_engine):
        engine.load_checkpoint(folder)
        states.append({name: value.clone() for name, value in engine.hooks.state().items()})
    new_state, state = states
    return [name for name in new_state if not torch.equal(new_state[name], state[name])]


def test_a_load_without_factors_resets_them(pool, tmp_path):
    config = configured(2, "stage 0 powersgd")
    assert pool.run(2, loaded_after_training, config, str(tmp_path), POWERSGD_START + 2) == [[], []]


def overflowed(rank, world, config):
    """Train in float16 with a scale that overflows at first. Runs on every rank."""
    engine = engine_of(config)
    results = []
    for step in cases.steps_for("llama", world, steps=10):
        result = engine.train_batch(step[rank])
        results.append((result.skipped, result.loss_scale, float(result.loss)))
    return results


def test_an_overflow_leaves_no_trace_in_the_errors(pool):
    fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    config = configured(2, "stage 2 int4 with feedback", fp16=fp16)
    first, second = pool.run(2, overflowed, config)
    assert first == second
    assert first[0][0] and not first[-1][0]
    assert all(math.isfinite(loss) for _, _, loss in first)


def on_two_machines(rank, world, config):
    """Return the losses, and the sizes of groups that exchange gradients. Runs on every rank."""
    with as_two_machines(rank, world):
        engine = engine_of(config)
        losses = []
        for step in cases.steps_for("llama", world, steps=3):
            with count_traffic() as traffic:
                losses.append(float(engine.train_batch(step[rank])))
    return losses, {call.ranks for call in traffic.calls if call.kind == "all_to_all"}


def test_two_machines_use_two_hops(pool):
    config = settings(4, 2, 1, 1)
    exact = pool.run(4, trained, config, 3)[0][0]
    config["parallel"] |= {"compress_gradients": "int8"}
    results = pool.run(4, on_two_machines, config)
    assert all(result == results[0] for result in results)
    losses, groups = results[0]
    assert groups == {2}
    assert losses == pytest.approx(exact, rel=0.01)


def traced(rank, world, config):
    """Return the trace of a step and the weights of this rank. Runs on every rank."""
    model = cases.build("qwen3", tied=True, layers=pipelines.LAYERS // 2)
    engine = cases.engine(model, config)
    micro_batches = pipelines.dp_of(config) * config["gradient_accumulation_steps"]
    trace = engine_trace(engine, cases.steps_for("qwen3", micro_batches, steps=1))
    parameters = dict(engine.model.named_parameters(remove_duplicate=False))
    return trace, {name: full_tensor_on_cpu(parameter) for name, parameter in parameters.items()}


def gradient_errors(trace):
    """Return the errors of the first step's gradients over their largest elements."""
    expected = pipelines.reference("qwen3", True, 8).gradients[0]
    errors = []
    for name, gradient in expected.items():
        actual = trace.gradients[0][name]
        if gradient is not None and actual is not None:
            errors.append(float((actual - gradient).abs().max() / gradient.abs().max()))
    return errors


PIPELINES = [
    ("stage 0 powersgd", "interleaved-1f1b"),
    ("stage 2 int4 with feedback", "zbv"),
    ("stage 0 int8", "1f1b"),
    ("stage 1 int8", "interleaved-1f1b"),
    ("stage 3 int8", "1f1b"),
]


@pytest.mark.parametrize(("method", "schedule"), proof_after(2, PIPELINES))
def test_in_a_pipeline(pool, method, schedule):
    """Gradients are as exact as without a pipeline, and copies of a weight are equal.

    This includes the tied weights of two stages.
    """
    stage, parallel = METHODS[method]
    degrees = {"dp_shard": 2} if stage else {"dp_replicate": 2}
    config = pipelines.settings(stage, 4, schedule, pp=2, **degrees)
    config["parallel"] |= parallel
    flat_config = pipelines.settings(stage, 4, **degrees)
    flat_config["parallel"] |= parallel

    results = pool.run(4, traced, config)
    errors = gradient_errors(results[0][0])
    flat_errors = gradient_errors(pool.run(2, traced, flat_config)[0][0])
    assert len(errors) == len(flat_errors)
    assert max(errors) <= 2 * max(flat_errors) <= 0.5
    # PowerSGD sends its first steps uncompressed.
    assert (max(errors) > 1e-3) == ("powersgd" not in method)
    first_copies: dict[str, torch.Tensor] = {}
    for _, weights in results:
        for name, tensor in weights.items():
            assert torch.equal(first_copies.setdefault(name, tensor), tensor), name
