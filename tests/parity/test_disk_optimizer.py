"""States in files: the bits of a run in memory, checkpoints that go from one to the other, and no trace of the files."""

from pathlib import Path

import pytest
import torch

from plait._torch.tensors import local_tensor
from plait.optim.disk_optimizer import DiskTier
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity import pipelines as pipeline
from tests.parity.digests import build, digest, digest_of
from tests.parity.optimizers import OPTIMIZERS, two_parts
from tests.parity.tensor_parallel import settings


def digests(rank, world, kind, config, folder, dtype):
    """In memory, in files with pieces smaller than a parameter, and for float64 in files with all in one. Runs in a worker."""
    found = []
    for size in (None, 5000, 10**6) if dtype == torch.float64 else (None, 5000):
        zero = dict(config["zero_optimization"])
        if size is not None:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "buffer_size": size}
        engine = cases.engine(
            build(kind, dtype, dropout=True), {**config, "zero_optimization": zero}
        )
        tier = engine.hooks.find(DiskTier)
        assert (tier is not None) == (size is not None)
        dp = world // config["parallel"]["tp"]
        count = config["gradient_accumulation_steps"]
        steps = cases.ragged_steps(
            dp * count, steps=3 if "fp16" in config else 2
        )  # float16 overflows at first
        inspected = digest(engine_trace(engine, steps))
        for step in (
            steps
        ):  # once more without a look at the gradients, which are then scaled inside the step
            engine.train_batch(list(step[engine.dp_rank * count : (engine.dp_rank + 1) * count]))
        found.append(inspected + digest_of(engine))
        if tier is not None:
            states = [
                v
                for state in engine.optimizer.state.values()
                for v in state.values()
                if isinstance(v, torch.Tensor) and v.ndim
            ]
            assert states and all(tier.arena.holds(local_tensor(value)) for value in states)
            assert not list(Path(folder).iterdir())
    return found


@pytest.mark.parametrize(
    ("kind", "tp", "stage", "optimizer", "more", "dtype"),
    [
        ("gpt2", 1, 3, "AdamW", {}, torch.float64),
        ("llama", 1, 1, "SGD", {"bf16": {"enabled": True}}, torch.float32),
        (
            "llama",
            2,
            2,
            "AdamW",
            {"fp16": {"enabled": True, "initial_scale_power": 20}},
            torch.float32,
        ),
        ("qwen3", 1, 2, "Adagrad", {}, torch.float32),
        ("llama", 1, 3, "Muon", {}, torch.float32),
    ],
)
def test_same_bits(pool, tmp_path, kind, tp, stage, optimizer, more, dtype):
    """Accumulation, clipping, overflow, pieces that cut parameters."""
    config = {
        **settings(2, tp, stage, 1, 2),
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        **more,
    }
    for found in pool.run(2, digests, kind, config, str(tmp_path), dtype):
        assert len(found) > 1 and set(found) == {found[0]}


def shares(rank, world, config, folder, dtype):
    """(bits, names of the parameters whose gradients and states are in files) without files and with shares of the model in them. Runs in a
    worker."""
    found = []
    for ratio in (None, 0.2, 0.6, 1):
        zero = dict(config["zero_optimization"])
        if ratio is not None:
            zero["offload_optimizer"] = {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_size": 5000,
                "ratio": ratio,
            }
        engine = cases.engine(
            build("llama", dtype, dropout=True), {**config, "zero_optimization": zero}
        )
        dp = world // config["parallel"]["tp"]
        seen = digest(
            engine_trace(engine, cases.ragged_steps(dp * config["gradient_accumulation_steps"]))
        )
        tier = engine.hooks.find(DiskTier)
        filed = [
            name
            for name, parameter in engine.model.named_parameters()
            for values in [
                [
                    v
                    for v in engine.optimizer.state[parameter].values()
                    if v.ndim and local_tensor(v).numel()
                ]
            ]
            if tier is not None
            and values
            and all(tier.arena.holds(local_tensor(value)) for value in values)
        ]
        found.append((seen + digest_of(engine), filed))
    return found


@pytest.mark.parametrize(
    ("world", "tp", "stage", "more", "dtype"),
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
def test_a_share_in_files(pool, tmp_path, world, tp, stage, more, dtype):
    """`ratio`: the same bits; the first block, both blocks, all, alike on every rank."""
    ranks = pool.run(
        world, shares, {**settings(world, tp, stage, 1, 2), **more}, str(tmp_path), dtype
    )
    for found in ranks:
        assert [bits for bits, _ in found] == [found[0][0]] * 4
        none, first, blocks, whole = (names for _, names in found)
        assert none == [] and first and all(name.startswith("model.layers.0.") for name in first)
        assert {name.split(".")[2] for name in blocks if name.startswith("model.layers.")} == {
            "0",
            "1",
        } and set(first) < set(blocks)
        assert set(blocks) < set(whole) and any(
            not name.startswith("model.layers.") for name in whole
        )
    assert all([names for _, names in found] == [names for _, names in ranks[0]] for found in ranks)


def resumed(rank, world, config, folder, disk):
    """Each of the two parts of `two_parts` in files or not. Runs in a worker."""
    section = {"device": "nvme", "nvme_path": f"{folder}/files", "buffer_size": 5000}
    zeros = [
        config["zero_optimization"] | ({"offload_optimizer": section} if in_files else {})
        for in_files in disk
    ]
    for in_files, engine in zip(
        disk, two_parts(world, config, zeros, f"{folder}/checkpoints-{disk}"), strict=True
    ):
        if in_files:
            states = [
                v
                for state in engine.optimizer.state.values()
                for v in state.values()
                if isinstance(v, torch.Tensor) and v.ndim
            ]
            assert states and all(
                engine.hooks.find(DiskTier).arena.holds(local_tensor(value)) for value in states
            )
    return digest_of(engine)


def test_checkpoints(pool, tmp_path):
    """From memory to files, from files to memory, from files to files; test_parameter_offload.py: at stage 3."""
    config = settings(2, 1, 1, 1, 1)
    wanted = pool.run(2, resumed, config, str(tmp_path), [False, False])
    for disk in ([False, True], [True, False], [True, True]):
        assert pool.run(2, resumed, config, str(tmp_path), disk) == wanted


PIPELINES = [
    (4, pipeline.settings(1, 4, "interleaved-1f1b", pp=2, dp_shard=2)),
    (4, pipeline.settings(2, 4, "zbv", pp=2, dp_shard=2)),
    (4, pipeline.settings(3, 4, "gpipe", pp=2, dp_shard=2)),
    (2, pipeline.settings(2, 4, "1f1b", pp=2)),
    *((4, pipeline.settings(stage, 4, "1f1b", pp=2, dp_shard=2)) for stage in (1, 2, 3)),
    (8, pipeline.settings(2, 4, "1f1b", pp=2, dp_shard=2, tp=2)),
]


@pytest.mark.parametrize(
    ("world", "config"),
    [
        pytest.param(
            *case, id=pipeline.named(case[1]), marks=[] if at in (1, 2, 3) else [pytest.mark.proof]
        )
        for at, case in enumerate(PIPELINES)
    ],
)
def test_in_a_pipeline(pool, tmp_path, world, config):
    """One process in float64; embeddings tied between the first and the last stage, whose gradients are summed where they are, in files."""
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 5000}
    pipeline.check(
        pool,
        world,
        "qwen3",
        True,
        {
            **config,
            "zero_optimization": {**config["zero_optimization"], "offload_optimizer": offload},
        },
    )
