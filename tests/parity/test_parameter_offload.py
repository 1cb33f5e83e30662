"""Parameters in files at stage 3, with and without the optimizer's states: the bits of a run in memory, whatever runs between two steps."""

from pathlib import Path

import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
from plait._torch.units import shard_buffers, sharded_modules
from plait.errors import ConfigError
from plait.optim.disk_optimizer import DiskTier
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity import pipelines as pipeline
from tests.parity.digests import build, digest, digest_of
from tests.parity.optimizers import OPTIMIZERS, two_parts
from tests.parity.tensor_parallel import settings

PARAMETERS, STATES = {"offload_param"}, {"offload_optimizer"}


def in_files(zero, folder, sections, buffer):
    """`zero` with sections that put parameters or states into files under `folder`."""
    more = {
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": f"{folder}/states",
            "buffer_size": 5000,
        }
    }
    more["offload_param"] = {
        "device": "nvme",
        "nvme_path": f"{folder}/parameters",
        "buffer_size": buffer,
    }
    return {**zero, **{name: more[name] for name in sections}}


def are_in_files(engine, sections):
    """Everything that the sections name is, and nothing else."""
    tier = engine.hooks.find(DiskTier)
    shards = [
        buffer
        for unit in sharded_modules(engine.model)
        for buffer in shard_buffers(unit)
        if buffer.numel()
    ]
    states = [
        v
        for state in engine.optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.ndim
    ]
    assert states and (
        shards or "offload_param" not in sections
    )  # one process in its own dtype shards nothing by itself
    for name, tensors in (("offload_param", shards), ("offload_optimizer", states)):
        held = [
            tier is not None and tier.holds(local_tensor(tensor.detach())) for tensor in tensors
        ]
        assert all(held) if name in sections else not any(held), name


def run(engine, config):
    """Steps that are looked into, evaluations and a prediction between them, and steps that are not: all bits of it."""
    count = config["gradient_accumulation_steps"]
    steps = cases.ragged_steps(
        engine.dp_size * count, steps=3 if "fp16" in config else 2
    )  # float16 overflows at first
    found = digest(engine_trace(engine, steps))
    for step in steps:
        pieces = list(step[engine.dp_rank * count : (engine.dp_rank + 1) * count])
        found += f" {engine.eval_batch(pieces[0])}"
        found += f" {float(engine.train_batch(pieces))}"
        found += f" {engine.eval_batch(pieces[0])} {engine.eval_batch(pieces[-1])}"
    return found + digest_of(engine)


def digests(rank, world, kind, config, folder, dtype, buffer):
    """In memory, then with each kind of files; one process also with room for everything, and with the states alone. Runs in a worker."""
    found = []
    more = ((PARAMETERS, 10**6), (STATES, 0)) if world == 1 else ()
    for sections, size in (({}, 0), (PARAMETERS, buffer), (PARAMETERS | STATES, buffer), *more):
        zero = in_files(config["zero_optimization"], folder, set(sections), size)
        engine = cases.engine(
            build(kind, dtype, dropout=True), {**config, "zero_optimization": zero}
        )
        found.append(run(engine, config))
        are_in_files(engine, set(sections))
        assert not [path for path in Path(folder).rglob("*") if path.is_file()]
    return found


CASES = [
    (1, "gpt2", {}, torch.float64, 12_000),
    (1, "llama", {"bf16": {"enabled": True}}, torch.float32, 6_000),
    (2, "llama", {"parallel.recompute": {"mode": "full"}}, torch.float64, 6_000),
    (2, "gpt2", {"fp16": {"enabled": True, "initial_scale_power": 20}}, torch.float32, 6_000),
    (
        2,
        "qwen3",
        {"optimizer": {"type": "Muon", "params": OPTIMIZERS["Muon"]}},
        torch.float32,
        6_000,
    ),
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


COVER = (0, 1, 2, 4)
"""What `make test` takes of them."""


@pytest.mark.parametrize(
    ("world", "kind", "more", "dtype", "buffer"),
    [
        pytest.param(*case, marks=[] if number in COVER else pytest.mark.proof)
        for number, case in enumerate(CASES)
    ],
)
def test_same_bits(pool, tmp_path, world, kind, more, dtype, buffer):
    """Accumulation, clipping, tied embeddings, dropout, evaluations between steps; pools with and without room to read ahead."""
    config = settings(world, 1, 3, 1, 2)
    for name, value in more.items():
        if name.startswith("parallel."):
            config["parallel"][name.removeprefix("parallel.")] = value
        else:
            config[name] = value
    for found in pool.run(world, digests, kind, config, str(tmp_path), dtype, buffer):
        assert len(found) > 2 and set(found) == {found[0]}


def resumed(rank, world, config, folder, parts):
    """Each of the two parts of `two_parts` with its sections. Runs in a worker."""
    zeros = [
        in_files(config["zero_optimization"], f"{folder}/files", set(sections), 6_000)
        for sections in parts
    ]
    for sections, engine in zip(
        parts, two_parts(world, config, zeros, f"{folder}/checkpoints-{parts}"), strict=True
    ):
        are_in_files(engine, set(sections))
    return digest_of(engine)


def test_checkpoints(pool, tmp_path):
    """From each place to another."""
    config = settings(2, 1, 3, 1, 1)
    memory, parameters, both = [], ["offload_param"], ["offload_optimizer", "offload_param"]
    wanted = pool.run(2, resumed, config, str(tmp_path), [memory, memory])
    for parts in ([memory, parameters], [parameters, both], [both, memory]):
        assert pool.run(2, resumed, config, str(tmp_path), parts) == wanted


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
    """One process in float64; units are gathered in an order that is not the model's."""
    zero = in_files(config["zero_optimization"], str(tmp_path), PARAMETERS | STATES, 20_000)
    pipeline.check(pool, world, "qwen3", True, {**config, "zero_optimization": zero})


def refused(rank, world, folder):
    """What a pool says that is too small for a unit. Runs in a worker."""
    config = settings(world, 1, 3, 1, 1)
    config["zero_optimization"] = in_files(config["zero_optimization"], folder, PARAMETERS, 100)
    model = cases.build("llama", tied=True, dtype=torch.float32)
    with pytest.raises(ConfigError) as caught:
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    return str(caught.value)


def test_a_pool_too_small_for_a_unit_is_refused(pool, tmp_path):
    """With the least size that is enough, which then is."""
    said = pool.run(2, refused, str(tmp_path))
    assert (
        said[0] == said[1]
        and "zero_optimization.offload_param.buffer_size = 100" in said[0]
        and "gathered as one" in said[0]
    )
    least = int(said[0].split("set it to ")[1].split(" ")[0])
    assert pool.run(2, fits, str(tmp_path), least) == [True, True] and pool.run(
        2, fits, str(tmp_path), least - 1
    ) == [False, False]


def fits(rank, world, folder, buffer):
    """Whether a pool is accepted. Runs in a worker."""
    config = settings(world, 1, 3, 1, 1)
    config["zero_optimization"] = in_files(config["zero_optimization"], folder, PARAMETERS, buffer)
    try:
        cases.engine(cases.build("llama", tied=True, dtype=torch.float32), config)
    except ConfigError:
        return False
    return True
