"""The disk tier's account: bytes of masters, gradients and states in files, padding included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
from plait._torch.units import shard_buffers, sharded_modules
from plait.config.resolving.resolve import load, resolve
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.optim.disk_optimizer import DiskTier
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from tests.fake import pipelines as pipeline
from tests.parity import cases
from tests.parity.experts import Case, build, configured
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import settings


def bytes_in_files(
    engine: plait.Engine, batch: dict[str, torch.Tensor], *, kinds: set[str], whole: bool = True
) -> int:
    """Of shards, gradients and states in a step; those of `kinds` are there, all of them if `whole`, and nothing of the others."""
    model, tier, found = engine.model, engine.hooks.find(DiskTier), {}

    def look() -> None:
        found["parameters"] = [
            buffer for module in sharded_modules(model) for buffer in shard_buffers(module)
        ]
        found["gradients"] = [
            local_tensor(p.grad) for p in model.parameters() if p.grad is not None
        ]

    engine.stepper.before_update.append(look)
    engine.train_batch(batch)
    found["states"] = [
        local_tensor(v)
        for state in engine.optimizer.state.values()
        for v in state.values()
        if v.ndim
    ]
    assert all(found.values())
    held = {
        kind: [tier.holds(tensor) for tensor in tensors if tensor.numel()]
        for kind, tensors in found.items()
    }
    assert all((all if whole else any)(held[kind]) for kind in kinds)
    assert whole == all(all(held[kind]) for kind in kinds)
    assert not any(any(held[kind]) for kind in set(held) - kinds)
    return sum(
        tensor.numel() * 4
        for kind in kinds
        for tensor in found[kind]
        if tensor.numel() and tier.holds(tensor)
    )


STATES, PARAMETERS = {"gradients", "states"}, {"parameters"}


def offloads(folder: Path, kinds: set[str], stage: int, ratio: float = 1) -> dict[str, Any]:
    """The sections that put `kinds` into files. Below stage 3 the masters go with the states."""
    section = {"device": "nvme", "nvme_path": str(folder), "buffer_size": 1000}
    found: dict[str, Any] = (
        {"offload_optimizer": section | {"ratio": ratio}} if kinds >= STATES else {}
    )
    return (
        {**found, "offload_param": {**section, "buffer_size": 50_000}}
        if stage == 3 and kinds >= PARAMETERS
        else found
    )


@pytest.mark.parametrize("ratio", [1, 0.3])
@pytest.mark.parametrize(
    ("world", "stage", "kind", "kinds"),
    [
        (2, 1, "llama", STATES | PARAMETERS),
        (4, 2, "qwen3", STATES | PARAMETERS),
        (3, 3, "gpt2", STATES | PARAMETERS),
        (3, 3, "gpt2", STATES),
        (3, 3, "gpt2", PARAMETERS),
        (1, 3, "llama", PARAMETERS),
    ],
)
def test_files_are_as_priced(
    fake_world: Callable[..., None],
    tmp_path: Path,
    world: int,
    stage: int,
    kind: str,
    kinds: set[str],
    ratio: float,
) -> None:
    """Uneven shards too. The optimizer's step counts stay in memory: a few bytes a parameter, which the ledger has in `optimizer`."""
    if ratio < 1 and kinds == PARAMETERS:
        pytest.skip("a ratio is one of states")
    fake_world(world)
    config = settings(world, 1, stage, 1, 1)
    config["zero_optimization"] |= offloads(tmp_path, kinds, stage, ratio)
    model = cases.build(kind, tied=False, dtype=torch.float32)
    facts = model_facts(model, find_blocks(model))
    resolved = resolve(load(config), world_size=world)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(32).view(2, 16) % cases.VOCABULARY
    # At stage 3 all shards are in files, whatever the share of the states.
    in_files = bytes_in_files(
        engine, {"input_ids": ids, "labels": ids}, kinds=kinds, whole=ratio == 1
    )
    assert in_files > 0
    at = resolved.layout
    start = Ledger.start(dp_replicate=at.dp_replicate, dp_shard=at.dp_shard, accumulation=1)
    ledger = account_all(resolved.techniques, start, facts)
    assert in_files == int(ledger.memory["files"][0])
    pieces = 4 * 4 * 1000 if kinds >= STATES else 0
    pool = (
        min(int(ledger.memory["parameters"][0]), 5 * 4 * 50_000)
        if stage == 3 and kinds >= PARAMETERS
        else 0
    )
    assert int(ledger.memory["step_buffers"][0]) == max(pieces, pool) < in_files + 1


@pytest.mark.parametrize(
    ("stage", "kinds"), [(2, STATES | PARAMETERS), (3, STATES | PARAMETERS), (3, STATES)]
)
def test_files_of_experts(
    fake_world: Callable[..., None], tmp_path: Path, stage: int, kinds: set[str]
) -> None:
    """Of a rank's own experts, and its shards of the rest."""
    fake_world(4, 3)
    config = configured(Case("mixtral", stage, (("ep", 2),), dp=4))
    config["zero_optimization"] |= offloads(tmp_path, kinds, stage)
    model = build(Case("mixtral"), dtype=torch.float32)
    facts = model_facts(model, find_blocks(model))
    resolved = resolve(load(config), world_size=4)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(64).view(4, 16) % cases.VOCABULARY
    in_files = bytes_in_files(engine, {"input_ids": ids, "labels": ids}, kinds=kinds)
    at = resolved.layout
    ledger = account_all(
        resolved.techniques, Ledger.of_rank(at, at.coordinates(3), accumulation=2), facts
    )
    assert in_files == int(ledger.memory["files"][0]) > 0


@pytest.mark.parametrize(
    ("rank", "stage", "schedule", "ratio"),
    [(0, 2, "zbv", 1), (2, 3, "1f1b", 1), (2, 2, "interleaved-1f1b", 0.5)],
)
def test_files_of_a_pipelines_rank(
    fake_world: Callable[..., None],
    tmp_path: Path,
    rank: int,
    stage: int,
    schedule: str,
    ratio: float,
) -> None:
    """Tied embeddings are in the files of both ends."""
    fake_world(4, rank)
    config = pipeline_settings(stage, 4, schedule, pp=2, dp_shard=2)
    config["zero_optimization"] |= offloads(tmp_path, STATES | PARAMETERS, stage, ratio)
    engine, resolved, facts, parts = pipeline.build(config, 4)
    in_files = bytes_in_files(
        engine, pipeline.batch(4), kinds=STATES | PARAMETERS, whole=ratio == 1
    )
    assert in_files == int(pipeline.predicted(resolved, facts, parts, rank).memory["files"][0])
