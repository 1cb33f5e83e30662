"""Recomputed blocks change no bit of a layout's losses, gradients and parameters, with dropout."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait._torch.tensors import local_tensor
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.dryrun.dry_model import rank_activations, token_batch
from plait.model.blocks import find_blocks
from plait.parallel.parts import Parts
from plait.sizes import GIB
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.fake.activations import LAYERS, LENGTH, foretold
from tests.parity import cases
from tests.parity.data_parallel import assert_same
from tests.parity.digests import build, digest
from tests.parity.pipelines import SCHEDULES, named
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import check, plan, settings

Mode = dict[str, Any]
FULL: Mode = {"mode": "full"}
SELECTIVE: Mode = {"mode": "selective"}
BUDGET: Mode = {"mode": "budget"}
SLICED: Mode = {"mode": "full", "partition": True}
"""Blocks of which each rank of tp keeps a slice of the inputs."""
ALL_MODES: list[Mode] = [
    FULL,
    {"mode": "full", "every": 2},
    SELECTIVE,
    {"mode": "selective", "keep": ["attention"]},
    {"mode": "selective", "keep": ["matmul", "attention", "aten.gelu"]},
]


def train(world, kind, config, mode, dtype, *, exact=False):
    """Return the trace of a run. An empty `mode` recomputes nothing."""
    section = {key: value for key, value in mode.items() if key != "partition"}
    parallel = config["parallel"]
    config = {
        **config,
        "parallel": {**parallel, "recompute": section} if mode else parallel,
        "activation_checkpointing": {"partition_activations": "partition" in mode},
    }
    # Sequence parallelism refuses dropout.
    model = build(kind, dtype, dropout=not parallel["sequence_parallel"])
    steps = cases.ragged_steps(world // parallel["tp"] * config["gradient_accumulation_steps"])
    with keeping_float64(model) if exact else nullcontext():
        engine = cases.engine(model, config)
        block_modes = engine.config.recompute.modes(len(engine.parts.blocks))
        assert (set(block_modes) != {"none"}) == bool(mode)
        return engine_trace(engine, steps)


def digests(rank, world, kind, config, modes, dtype):
    """Train without recompute and with each of `modes`. Runs on every rank."""
    return [digest(train(world, kind, config, mode, dtype)) for mode in ({}, *modes)]


def assert_same_bits(pool, world, kind, config, modes, dtype=torch.float64):
    for expected, *others in pool.run(world, digests, kind, config, modes, dtype):
        for mode, actual in zip(modes, others, strict=True):
            assert actual == expected, mode


@pytest.mark.parametrize(
    ("kind", "tp", "stage", "modes"),
    [
        pytest.param("gpt2", 1, 0, ALL_MODES, marks=pytest.mark.proof),
        pytest.param("llama", 1, 1, [SELECTIVE], marks=pytest.mark.proof),
        ("qwen3", 1, 2, [FULL]),
        pytest.param("gpt2", 1, 3, ALL_MODES[1:3], marks=pytest.mark.proof),
        ("llama", 2, 0, [*ALL_MODES[2:4], SLICED]),
        pytest.param("gpt2", 2, 0, [*ALL_MODES[2:], SLICED], marks=pytest.mark.proof),
    ],
)
def test_zero_and_tensor_parallelism(pool, kind, tp, stage, modes):
    assert_same_bits(pool, 2, kind, settings(2, tp, stage, 1, 2), modes)


def traces(rank, world, kind, config, modes):
    """Train without recompute and with each of `modes`. Runs on every rank."""
    runs = [train(world, kind, config, mode, torch.float64, exact=True) for mode in ({}, *modes)]
    return runs if rank == 0 else []


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(FULL, marks=pytest.mark.proof, id="full"),
        pytest.param(SELECTIVE, id="selective"),
    ],
)
def test_with_sequence_parallelism(pool, mode):
    """Lengths are not multiples of tp, and the backward uses the length of its micro-batch.

    Slices of sequences are not aligned in memory as full sequences are, and products of float64
    then differ in the last bit, so that bits are not compared.
    """
    expected, actual = pool.run(4, traces, "qwen3", settings(4, 2, 3, 1, 2, True), [mode])[0]
    assert_same(expected, actual, bar=1e-11)


def train_in_pipeline(rank, world, config, modes):
    """Train without recompute and with each of `modes`. Runs on every rank.

    Returns the digest of each run and the recompute mode of each block.
    """
    bits = []
    block_modes = []
    micro_batches = config["parallel"].get("dp_shard", 1) * config["gradient_accumulation_steps"]
    for mode in ({}, *modes):
        section = dict(mode)
        if mode == BUDGET:
            # Enough for some blocks on every rank, but not for all.
            bounds = []
            for activations in foretold(config, world, torch.float64):
                least = activations.least()[0]
                most = activations.peak_bytes(("none",) * activations.blocks)
                bounds.append(least + 0.4 * (most - least))
            section |= {"budget_gib": max(bounds) / GIB, "sequence_length": LENGTH}
        file = {**config, "parallel": {**config["parallel"], "recompute": section}}
        engine = cases.engine(build("llama", torch.float64, dropout=True, layers=LAYERS), file)
        bits.append(digest(engine_trace(engine, cases.ragged_steps(micro_batches))))
        block_modes.append(engine.parts.recompute_modes)
    return bits, block_modes


PIPELINES = [
    *(pipeline_settings(0, 4, schedule, pp=2, tp=2) for schedule in SCHEDULES),
    pipeline_settings(3, 4, "interleaved-1f1b", pp=2, dp_shard=2),
]


@pytest.mark.proof
@pytest.mark.parametrize("config", PIPELINES, ids=named)
def test_in_a_pipeline(pool, config):
    """The budget covers all micro-batches in flight, and each stage decides for its blocks.

    Embeddings are tied, and backwards in two halves (zbv) recompute twice.
    """
    ranks = pool.run(4, train_in_pipeline, config, [BUDGET, SELECTIVE, FULL])
    for bits, block_modes in ranks:
        assert bits == [bits[0]] * 4, block_modes
        assert set(block_modes[0]) == {"none"}
    assert any(set(block_modes[1]) != {"none"} for _, block_modes in ranks), ranks


def decide_with_uneven_slices(rank, world, pp):
    """Return the modes of blocks for a budget that separates the ranks of tp. Runs on every rank.

    The budget is one byte less than rank 1 needs without recompute. Rank 0, whose slice of the
    vocabulary differs, alone would decide otherwise.
    """
    if pp == 1:
        config = settings(world, 2, 0, 1, 1)
        model = build("llama", torch.float32, dropout=False)
        parts = Parts(model, find_blocks(model))
        mesh = build_mesh(Layout(tp=2))
        (activations,) = rank_activations(parts, mesh=mesh, batch=token_batch(2, LENGTH))
    else:
        config = pipeline_settings(0, 2, "1f1b", pp=2, tp=2)
        activations = foretold(config, world)[1]
    budget = torch.tensor(activations.peak_bytes(("none", "none")) - 1)
    dist.broadcast(budget, src=1)

    section = {"budget_gib": int(budget) / GIB, "sequence_length": LENGTH}
    config["parallel"]["recompute"] = section
    model = build("llama", torch.float32, dropout=False, layers=LAYERS if pp > 1 else None)
    engine = cases.engine(model, config)
    engine.train_batch(cases.ragged_steps(config["gradient_accumulation_steps"])[0])
    return engine.parts.recompute_modes


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_ranks_with_uneven_slices_decide_alike(pool, pp):
    """A block that only one rank of tp recomputes would wait forever in a collective."""
    modes = pool.run(2 * pp, decide_with_uneven_slices, pp)
    assert modes[::2] == modes[1::2]
    assert any(set(of_rank) != {"none"} for of_rank in modes)


@pytest.mark.proof
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_tensor_and_data_parallelism(pool, kind, stage, sequence):
    """Every mode, with two ranks of tp and two of dp."""
    if kind == "gpt2" and sequence:
        pytest.skip("GPT-2 has no sequence parallelism")
    sliced = [] if sequence else [SLICED, {"mode": "selective", "partition": True}]
    config = settings(4, 2, stage, 1, 2, sequence)
    assert_same_bits(pool, 4, kind, config, [*ALL_MODES, *sliced])


@pytest.mark.parametrize(
    "precision",
    [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}],
    ids=["bf16", "fp16"],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_with_mixed_precision(pool, precision, tp):
    config = {**settings(2, tp, 2, 1, 2), **precision}
    assert_same_bits(pool, 2, "llama", config, [FULL if tp == 1 else SELECTIVE], torch.float32)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.proof), "plain"])
def test_equals_one_process(pool, kind, mode):
    check(pool, 4, kind, False, settings(4, 2, 3, 1, 2, recompute={"mode": mode}, **plan(kind)))


def gradients_of_two_micro_batches(rank, world, mode):
    """Run both forwards before the backwards, as a pipeline does. Runs on every rank."""
    config = settings(2, 2, 0, 1, 2, True, recompute={"mode": mode})
    engine = cases.engine(build("llama", torch.float64, dropout=False), config)
    losses = []
    for length in (11, 6):
        ids = torch.arange(2 * length).view(2, length) % cases.VOCABULARY
        losses.append(plait.causal_lm_loss(engine.model(input_ids=ids), {"labels": ids})[0])
    torch.stack(losses).sum().backward()
    gradients = {}
    for name, parameter in engine.model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = local_tensor(parameter.grad).clone()
    return gradients


def test_a_micro_batch_is_recomputed_with_its_own_length(pool):
    """A micro-batch of another length has run since its forward."""
    expected = pool.run(2, gradients_of_two_micro_batches, "none")
    actual = pool.run(2, gradients_of_two_micro_batches, "full")
    for plain, recomputed in zip(expected, actual, strict=True):
        assert all(torch.equal(gradient, recomputed[name]) for name, gradient in plain.items())
