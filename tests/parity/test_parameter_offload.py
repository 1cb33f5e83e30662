"""Parameters in files at stage 3, with and without optimizer states: same bits as in memory."""

from pathlib import Path

import pytest
import torch

from plait._torch.tensors import local_tensor
from plait._torch.units import shard_buffers, sharded_modules
from plait.errors import ConfigError
from plait.optim.disk_optimizer import DiskTier
from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.parity import cases
from tests.parity import pipelines as pipeline
from tests.parity.digests import build, digest, digest_of
from tests.parity.optimizers import OPTIMIZERS, two_parts
from tests.parity.tensor_parallel import settings

NOTHING: frozenset[str] = frozenset()
PARAMETERS = frozenset({"offload_param"})
STATES = frozenset({"offload_optimizer"})


def zero_section(config, folder, offloaded, buffer_size=6_000):
    """Return the section `zero_optimization` with parameters or states in files."""
    sections = {
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": f"{folder}/states",
            "buffer_size": 5000,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": f"{folder}/parameters",
            "buffer_size": buffer_size,
        },
    }
    return config["zero_optimization"] | {name: sections[name] for name in offloaded}


def check_places(engine, offloaded):
    """Check that files hold what the sections name, and nothing else."""
    shards = []
    for unit in sharded_modules(engine.model):
        shards += [buffer for buffer in shard_buffers(unit) if buffer.numel()]
    states = []
    for state in engine.optimizer.state.values():
        states += [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
    assert states
    # Without offloading, one process that casts nothing has no sharded units.
    assert shards or "offload_param" not in offloaded

    tier = engine.hooks.find(DiskTier)
    for name, tensors in (("offload_param", shards), ("offload_optimizer", states)):
        for tensor in tensors:
            in_files = tier is not None and tier.holds(local_tensor(tensor.detach()))
            assert in_files == (name in offloaded), name


def bits_of_run(rank, world, kind, config, dtype, offloaded, folder):
    """Train with traces, then with evaluations between the steps. Runs on every rank."""
    engine = cases.engine(build(kind, dtype, dropout=True), config)
    accumulation = config["gradient_accumulation_steps"]
    # With float16 the first step overflows.
    steps = cases.ragged_steps(engine.dp_size * accumulation, steps=3 if "fp16" in config else 2)
    bits = [digest(engine_trace(engine, steps))]
    first = engine.dp_rank * accumulation
    for step in steps:
        micro_batches = step[first : first + accumulation]
        bits.append(str(engine.eval_batch(micro_batches[0])))
        bits.append(str(float(engine.train_batch(micro_batches))))
        bits.append(str(engine.eval_batch(micro_batches[0])))
        bits.append(str(engine.eval_batch(micro_batches[-1])))
    check_places(engine, offloaded)
    # The files are unlinked as soon as they are open.
    assert not [path for path in Path(folder).rglob("*") if path.is_file()]
    return [*bits, digest_of(engine)]


CASES = [
    (1, "gpt2", {}, torch.float64, 12_000),
    (1, "llama", {"bf16": {"enabled": True}}, torch.float32, 6_000),
    (2, "llama", {"parallel.recompute": {"mode": "full"}}, torch.float64, 6_000),
    (
        2,
        "qwen3",
        {"optimizer": {"type": "Muon", "params": OPTIMIZERS["Muon"]}},
        torch.float32,
        6_000,
    ),
    (2, "gpt2", {"fp16": {"enabled": True, "initial_scale_power": 20}}, torch.float32, 6_000),
    (4, "qwen3", {"parallel.recompute": {"mode": "selective"}}, torch.float64, 6_000),
    (
        4,
        "llama",
        {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "bf16": {"enabled": True}},
        torch.float32,
        6_000,
    ),
    (4, "llama", {"parallel.tp": 2, "parallel.dp_shard": 2}, torch.float32, 6_000),
    (4, "gpt2", {"parallel.secondary_partition": 2}, torch.float32, 6_000),
]
"""Ranks, model, changed fields, dtype, and bytes of the buffer.

The largest buffer has room to prefetch.
"""


@pytest.mark.parametrize(("world", "kind", "fields", "dtype", "buffer_size"), proof_after(4, CASES))
def test_same_bits_as_in_memory(pool, tmp_path, world, kind, fields, dtype, buffer_size):
    config = settings(world, 1, 3, 1, 2)
    for name, value in fields.items():
        section = config["parallel"] if name.startswith("parallel.") else config
        section[name.removeprefix("parallel.")] = value

    def bits(offloaded, buffer_size):
        zero = zero_section(config, tmp_path, offloaded, buffer_size)
        arguments = (kind, {**config, "zero_optimization": zero}, dtype, offloaded, str(tmp_path))
        return pool.run(world, bits_of_run, *arguments)

    expected = bits(NOTHING, 0)
    assert bits(PARAMETERS, buffer_size) == expected
    assert bits(PARAMETERS | STATES, buffer_size) == expected
    if world == 1:
        # The buffer has room for the model.
        assert bits(PARAMETERS, 10**6) == expected
        assert bits(STATES, 0) == expected


def resumed(rank, world, config, folder, places):
    """Train, save and resume, each part with its sections. Runs on every rank."""
    zeros = [zero_section(config, f"{folder}/files", offloaded) for offloaded in places]
    names = "-".join(",".join(sorted(offloaded)) for offloaded in places)
    engines = two_parts(world, config, zeros, f"{folder}/checkpoints-{names}")
    for offloaded, engine in zip(places, engines, strict=True):
        check_places(engine, offloaded)
    return digest_of(engine)


def test_checkpoints_move_between_memory_and_files(pool, tmp_path):
    config = settings(2, 1, 3, 1, 1)
    expected = pool.run(2, resumed, config, str(tmp_path), [NOTHING, NOTHING])
    both = PARAMETERS | STATES
    for places in ([NOTHING, PARAMETERS], [PARAMETERS, both], [both, NOTHING]):
        assert pool.run(2, resumed, config, str(tmp_path), places) == expected


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, pipeline.settings(3, 4, "1f1b", pp=2)),
        pytest.param(
            4,
            pipeline.settings(3, 4, "interleaved-1f1b", pp=2, dp_shard=2),
            marks=pytest.mark.proof,
        ),
    ],
)
def test_in_a_pipeline(pool, tmp_path, world, config):
    """Units are gathered in another order than that of the model."""
    zero = zero_section(config, tmp_path, PARAMETERS | STATES, 20_000)
    pipeline.check(pool, world, "qwen3", True, {**config, "zero_optimization": zero})


def message_about_buffer(rank, world, folder, buffer_size):
    """Return the message of a refusal, or nothing. Runs on every rank."""
    config = settings(world, 1, 3, 1, 1)
    config["zero_optimization"] = zero_section(config, folder, PARAMETERS, buffer_size)
    try:
        cases.engine(cases.build("llama", tied=True, dtype=torch.float32), config)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_buffer_too_small_for_a_unit_is_refused(pool, tmp_path):
    """The message names the smallest size that is enough."""
    message, other = pool.run(2, message_about_buffer, str(tmp_path), 100)
    assert message == other
    assert "zero_optimization.offload_param.buffer_size = 100" in message
    assert "gathered as one" in message
    smallest = int(message.split("set it to ")[1].split(" ")[0])
    assert pool.run(2, message_about_buffer, str(tmp_path), smallest) == ["", ""]
    assert all(pool.run(2, message_about_buffer, str(tmp_path), smallest - 1))
