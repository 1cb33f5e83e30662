"""Optimizer states in files: the same bits as in memory, checkpoints from one to the other."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from plait._torch.tensors import local_tensor
from plait.optim.disk_optimizer import DiskTier
from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.parity import cases
from tests.parity import pipelines as pipeline
from tests.parity.digests import build, digest, digest_of
from tests.parity.optimizers import OPTIMIZERS, two_parts
from tests.parity.tensor_parallel import settings

SMALL_BUFFER = 5000
"""Bytes of a buffer that is smaller than some parameters, whose updates are cut into parts."""
LARGE_BUFFER = 10**6
OVERFLOWING_FLOAT16 = {"fp16": {"enabled": True, "initial_scale_power": 20}}


def zero_section(config, folder, *, buffer_size=SMALL_BUFFER, **fields):
    """Return the section `zero_optimization` with optimizer states in files."""
    offload = {"device": "nvme", "nvme_path": str(folder), "buffer_size": buffer_size, **fields}
    return {**config["zero_optimization"], "offload_optimizer": offload}


def in_files(engine, parameters):
    """Return whether parameters have states, and all of them are in files. Scalars never are."""
    states = chain.from_iterable(engine.optimizer.state[p].values() for p in parameters)
    tensors = [state for state in states if isinstance(state, torch.Tensor) and state.ndim]
    arena = engine.hooks.find(DiskTier).arena
    return bool(tensors) and all(arena.holds(local_tensor(tensor)) for tensor in tensors)


def digest_of_run(rank, world, kind, config, folder, dtype):
    """Train for some steps, and check that the states are in files. Runs on every rank."""
    engine = cases.engine(build(kind, dtype, dropout=True), config)
    offloaded = "offload_optimizer" in config["zero_optimization"]
    assert (engine.hooks.find(DiskTier) is not None) == offloaded
    accumulation = config["gradient_accumulation_steps"]
    micro_batches = accumulation * world // config["parallel"]["tp"]
    # With float16 the first step overflows.
    steps = cases.ragged_steps(micro_batches, steps=3 if "fp16" in config else 2)
    bits = digest(engine_trace(engine, steps))

    # A trace reads the gradients. Without it they are unscaled inside of the update.
    first = engine.dp_rank * accumulation
    for step in steps:
        engine.train_batch(step[first : first + accumulation])
    if offloaded:
        assert in_files(engine, engine.optimizer.state)
        # The files are unlinked as soon as they are open.
        assert not list(Path(folder).iterdir())
    return bits + digest_of(engine)


@pytest.mark.parametrize(
    ("kind", "tp", "stage", "optimizer", "sections", "dtype"),
    [
        ("gpt2", 1, 3, "AdamW", {}, torch.float64),
        ("llama", 1, 1, "SGD", {"bf16": {"enabled": True}}, torch.float32),
        ("llama", 2, 2, "AdamW", OVERFLOWING_FLOAT16, torch.float32),
        ("qwen3", 1, 2, "Adagrad", {}, torch.float32),
        ("llama", 1, 3, "Muon", {}, torch.float32),
    ],
)
def test_same_bits_as_in_memory(pool, tmp_path, kind, tp, stage, optimizer, sections, dtype):
    config = {
        **settings(2, tp, stage, 1, 2),
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        **sections,
    }
    buffer_sizes = (SMALL_BUFFER, LARGE_BUFFER) if dtype == torch.float64 else (SMALL_BUFFER,)
    configs = [config]
    for buffer_size in buffer_sizes:
        zero = zero_section(config, tmp_path, buffer_size=buffer_size)
        configs.append({**config, "zero_optimization": zero})
    expected, *others = [
        pool.run(2, digest_of_run, kind, config, str(tmp_path), dtype) for config in configs
    ]
    for digests in others:
        assert digests == expected


def digest_and_names(rank, world, config, dtype):
    """Return the bits, and parameters whose states are in files. Runs on every rank."""
    engine = cases.engine(build("llama", dtype, dropout=True), config)
    dp = world // config["parallel"]["tp"]
    steps = cases.ragged_steps(dp * config["gradient_accumulation_steps"])
    bits = digest(engine_trace(engine, steps)) + digest_of(engine)
    if engine.hooks.find(DiskTier) is None:
        return bits, []
    names = []
    for name, parameter in engine.model.named_parameters():
        # A rank may have no element of a small parameter.
        if local_tensor(parameter).numel() and in_files(engine, [parameter]):
            names.append(name)
    return bits, names


@pytest.mark.parametrize(
    ("world", "tp", "stage", "sections", "dtype"),
    [
        (1, 1, 2, {}, torch.float64),
        (2, 1, 3, {}, torch.float64),
        pytest.param(
            4,
            2,
            1,
            {"fp16": {"enabled": True, "initial_scale_power": 8}},
            torch.float32,
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_share_in_files(pool, tmp_path, world, tp, stage, sections, dtype):
    """`ratio` puts the states of the first block, of both blocks, or all of them into files."""
    config = {**settings(world, tp, stage, 1, 2), **sections}
    expected = pool.run(world, digest_and_names, config, dtype)
    names_by_ratio = {}
    for ratio in (0.2, 0.6, 1):
        zero = zero_section(config, tmp_path, ratio=ratio)
        ranks = pool.run(world, digest_and_names, {**config, "zero_optimization": zero}, dtype)
        assert [bits for bits, _ in ranks] == [bits for bits, _ in expected]
        assert all(names == ranks[0][1] for _, names in ranks), "all ranks choose alike"
        names_by_ratio[ratio] = set(ranks[0][1])

    first, both, everything = names_by_ratio.values()
    blocks = {name for name in everything if name.startswith("model.layers.")}
    assert first and all(name.startswith("model.layers.0.") for name in first)
    assert {name.split(".")[2] for name in both & blocks} == {"0", "1"}
    assert first < both < everything
    assert everything - blocks


def resumed(rank, world, config, folder, offloaded):
    """Train, save and resume, each part with states in files or not. Runs on every rank."""
    zeros = []
    for is_offloaded in offloaded:
        offload_zero = zero_section(config, f"{folder}/files")
        zeros.append(offload_zero if is_offloaded else config["zero_optimization"])
    engines = two_parts(world, config, zeros, f"{folder}/checkpoints-{offloaded}")
    for is_offloaded, engine in zip(offloaded, engines, strict=True):
        if is_offloaded:
            assert in_files(engine, engine.optimizer.state)
    return digest_of(engine)


def test_checkpoints_move_between_memory_and_files(pool, tmp_path):
    """At stage 1. test_parameter_offload.py does this at stage 3."""
    config = settings(2, 1, 1, 1, 1)
    expected = pool.run(2, resumed, config, str(tmp_path), [False, False])
    for offloaded in ([False, True], [True, False], [True, True]):
        assert pool.run(2, resumed, config, str(tmp_path), offloaded) == expected


PIPELINES = [
    (4, pipeline.settings(2, 4, "zbv", pp=2, dp_shard=2)),
    (4, pipeline.settings(3, 4, "gpipe", pp=2, dp_shard=2)),
    (2, pipeline.settings(2, 4, "1f1b", pp=2)),
    (4, pipeline.settings(1, 4, "interleaved-1f1b", pp=2, dp_shard=2)),
    (8, pipeline.settings(2, 4, "1f1b", pp=2, dp_shard=2, tp=2)),
]


@pytest.mark.parametrize(
    ("world", "config"),
    proof_after(3, PIPELINES, name=lambda world, config: pipeline.named(config)),
)
def test_a_pipeline_equals_one_process(pool, tmp_path, world, config):
    """The gradient of the embedding, tied between the first and the last stage, is in files."""
    config = {**config, "zero_optimization": zero_section(config, tmp_path)}
    pipeline.check(pool, world, "qwen3", True, config)
