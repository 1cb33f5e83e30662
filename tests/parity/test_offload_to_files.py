"""Optimizer states and parameters in files: the same bits as in memory.

Checkpoints move from one to the other.
"""

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
# Bytes of buffers: smaller than some parameters, of one unit, and larger than the model.
STATE_BUFFER = 5000
UNIT_BUFFER = 6000
LARGE_BUFFER = 10**6


def zero_section(
    config, folder, offloaded, *, state_buffer=STATE_BUFFER, parameter_buffer=UNIT_BUFFER, ratio=1
):
    """Return the section `zero_optimization` with parameters or states in files."""
    sections = {
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": f"{folder}/states",
            "buffer_size": state_buffer,
            "ratio": ratio,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": f"{folder}/parameters",
            "buffer_size": parameter_buffer,
        },
    }
    return config["zero_optimization"] | {name: sections[name] for name in offloaded}


def states_of(engine, parameter):
    """Return the optimizer states of a parameter that are not scalars."""
    states = engine.optimizer.state[parameter].values()
    return [state for state in states if isinstance(state, torch.Tensor) and state.ndim]


def in_files(engine, tensor):
    tier = engine.hooks.find(DiskTier)
    return tier is not None and tier.holds(local_tensor(tensor.detach()))


def check_places(engine, offloaded, stage):
    """Check that files hold what the sections name, and nothing else."""
    shards = []
    for unit in sharded_modules(engine.model):
        shards += [buffer for buffer in shard_buffers(unit) if buffer.numel()]
    # Without offloading, one process that casts nothing has no sharded units.
    assert shards or "offload_param" not in offloaded
    states = []
    for parameter in engine.optimizer.state:
        states += states_of(engine, parameter)
    assert states
    for state in states:
        assert in_files(engine, state) == ("offload_optimizer" in offloaded)
    # Below stage 3 the shards are master weights, which `offload_optimizer` puts into files.
    if stage == 3:
        for shard in shards:
            assert in_files(engine, shard) == ("offload_param" in offloaded)


def bits_of_run(rank, world, kind, config, dtype, offloaded, folder):
    """Train with traces, then with evaluations between the steps. Runs on every rank."""
    engine = cases.engine(build(kind, dtype, dropout=True), config)
    accumulation = config["gradient_accumulation_steps"]
    # With float16 the first step overflows.
    steps = cases.ragged_steps(engine.dp_size * accumulation, steps=3 if "fp16" in config else 2)
    bits = [digest(engine_trace(engine, steps))]

    # A trace reads the gradients. Without it they are unscaled inside of the update.
    first = engine.dp_rank * accumulation
    for step in steps:
        micro_batches = step[first : first + accumulation]
        bits.append(str(engine.eval_batch(micro_batches[0])))
        bits.append(str(float(engine.train_batch(micro_batches))))
        bits.append(str(engine.eval_batch(micro_batches[0])))
        bits.append(str(engine.eval_batch(micro_batches[-1])))
    check_places(engine, offloaded, config["zero_optimization"]["stage"])
    # The files are unlinked as soon as they are open.
    assert not [path for path in Path(folder).rglob("*") if path.is_file()]
    return [*bits, digest_of(engine)]


def optimizer(name):
    return {"type": name, "params": OPTIMIZERS[name]}


BF16 = {"bf16": {"enabled": True}}
OVERFLOWING_FLOAT16 = {"fp16": {"enabled": True, "initial_scale_power": 20}}
TENSOR_PARALLEL = {"parallel.tp": 2, "parallel.dp_shard": 1}
CASES = [
    (1, 3, "gpt2", {}, torch.float64),
    (2, 2, "qwen3", {"optimizer": optimizer("Adagrad")}, torch.float32),
    (1, 3, "llama", BF16, torch.float32),
    (2, 1, "llama", {"optimizer": optimizer("SGD"), **BF16}, torch.float32),
    (2, 2, "llama", {**TENSOR_PARALLEL, **OVERFLOWING_FLOAT16}, torch.float32),
    (2, 3, "gpt2", OVERFLOWING_FLOAT16, torch.float32),
    (2, 3, "llama", {"parallel.recompute": {"mode": "full"}}, torch.float64),
    (2, 3, "qwen3", {"optimizer": optimizer("Muon")}, torch.float32),
    (4, 3, "qwen3", {"parallel.recompute": {"mode": "selective"}}, torch.float64),
    (4, 3, "llama", {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, **BF16}, torch.float32),
    (4, 3, "llama", {"parallel.tp": 2, "parallel.dp_shard": 2}, torch.float32),
    (4, 3, "gpt2", {"parallel.secondary_partition": 2}, torch.float32),
]
"""Ranks, ZeRO stage, model, changed fields, and dtype."""


@pytest.mark.parametrize(("world", "stage", "kind", "fields", "dtype"), proof_after(2, CASES))
def test_same_bits_as_in_memory(pool, tmp_path, world, stage, kind, fields, dtype):
    config = settings(world, 1, stage, 1, 2)
    for name, value in fields.items():
        section = config["parallel"] if name.startswith("parallel.") else config
        section[name.removeprefix("parallel.")] = value

    def bits(offloaded, **buffers):
        zero = zero_section(config, tmp_path, offloaded, **buffers)
        arguments = ({**config, "zero_optimization": zero}, dtype, offloaded, str(tmp_path))
        return pool.run(world, bits_of_run, kind, *arguments)

    expected = bits(NOTHING)
    if world <= 2:
        assert bits(STATES) == expected
    if stage == 3:
        # The float64 model of one rank has larger units.
        unit = {"parameter_buffer": 12_000} if world == 1 and dtype == torch.float64 else {}
        assert bits(PARAMETERS, **unit) == expected
        assert bits(PARAMETERS | STATES, **unit) == expected
    if world == 1:
        assert bits(PARAMETERS, parameter_buffer=LARGE_BUFFER) == expected
        assert bits(STATES, state_buffer=LARGE_BUFFER) == expected


def digest_and_names(rank, world, config, dtype):
    """Return the bits, and parameters whose states are in files. Runs on every rank."""
    engine = cases.engine(build("llama", dtype, dropout=True), config)
    steps = cases.ragged_steps(engine.dp_size * config["gradient_accumulation_steps"])
    bits = digest(engine_trace(engine, steps)) + digest_of(engine)
    names = []
    for name, parameter in engine.model.named_parameters():
        # A rank may have no element of a small parameter.
        if local_tensor(parameter).numel():
            states = states_of(engine, parameter)
            if states and all(in_files(engine, state) for state in states):
                names.append(name)
    return bits, names


@pytest.mark.parametrize(
    ("world", "tp", "stage", "sections", "dtype"),
    [
        (1, 1, 2, {}, torch.float64),
        pytest.param(2, 1, 3, {}, torch.float64, marks=pytest.mark.proof),
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
    assert not any(names for _, names in expected)
    names_by_ratio = {}
    for ratio in (0.2, 0.6, 1):
        zero = zero_section(config, tmp_path, STATES, ratio=ratio)
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


def resumed(rank, world, config, folder, places):
    """Train, save and resume, each part with its sections. Runs on every rank."""
    zeros = [zero_section(config, f"{folder}/files", offloaded) for offloaded in places]
    names = "-".join(",".join(sorted(offloaded)) for offloaded in places)
    engines = two_parts(world, config, zeros, f"{folder}/checkpoints-{names}")
    for offloaded, engine in zip(places, engines, strict=True):
        check_places(engine, offloaded, config["zero_optimization"]["stage"])
    return digest_of(engine)


@pytest.mark.parametrize(
    ("stage", "moves"),
    [
        (1, [(NOTHING, STATES), (STATES, NOTHING), (STATES, STATES)]),
        (
            3,
            [
                (NOTHING, PARAMETERS),
                (PARAMETERS, PARAMETERS | STATES),
                (PARAMETERS | STATES, NOTHING),
            ],
        ),
    ],
    ids=["stage 1", "stage 3"],
)
def test_checkpoints_move_between_memory_and_files(pool, tmp_path, stage, moves):
    config = settings(2, 1, stage, 1, 1)
    expected = pool.run(2, resumed, config, str(tmp_path), (NOTHING, NOTHING))
    for places in moves:
        assert pool.run(2, resumed, config, str(tmp_path), places) == expected


PIPELINES = [
    (2, pipeline.settings(2, 4, "1f1b", pp=2), STATES),
    (2, pipeline.settings(3, 4, "1f1b", pp=2), PARAMETERS | STATES),
    (4, pipeline.settings(2, 4, "zbv", pp=2, dp_shard=2), STATES),
    (4, pipeline.settings(3, 4, "gpipe", pp=2, dp_shard=2), STATES),
    (4, pipeline.settings(1, 4, "interleaved-1f1b", pp=2, dp_shard=2), STATES),
    (4, pipeline.settings(3, 4, "interleaved-1f1b", pp=2, dp_shard=2), PARAMETERS | STATES),
    (8, pipeline.settings(2, 4, "1f1b", pp=2, dp_shard=2, tp=2), STATES),
]


@pytest.mark.parametrize(
    ("world", "config", "offloaded"),
    proof_after(2, PIPELINES, name=lambda world, config, offloaded: pipeline.named(config)),
)
def test_a_pipeline_equals_one_process(pool, tmp_path, world, config, offloaded):
    """The gradient of the embedding, tied between the first and the last stage, is in files.

    Units are gathered in another order than that of the model.
    """
    zero = zero_section(config, tmp_path, offloaded, parameter_buffer=20_000)
    pipeline.check(pool, world, "qwen3", True, {**config, "zero_optimization": zero})


def message_about_buffer(rank, world, folder, buffer_size):
    """Return the message of a refusal, or nothing. Runs on every rank."""
    config = settings(world, 1, 3, 1, 1)
    zero = zero_section(config, folder, PARAMETERS, parameter_buffer=buffer_size)
    model = cases.build("llama", tied=True, dtype=torch.float32)
    try:
        cases.engine(model, {**config, "zero_optimization": zero})
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
