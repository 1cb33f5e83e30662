"""The disk tier's account: bytes of masters, gradients and states in files, padding included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import plait
from plait._torch import local_tensor, shard_buffers, sharded_modules
from plait.config.resolve import load, resolve
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.parallel.ledger import Ledger
from plait.parallel.order import account_all
from tests.fake import test_pipeline_bytes as pipeline
from tests.parity import cases
from tests.parity.test_pipeline import settings as pipeline_settings
from tests.parity.test_tensor_parallel import settings


def bytes_in_files(engine: plait.Engine, batch: dict[str, torch.Tensor], *, whole: bool = True) -> int:
    """Of shards, gradients and states in a step; all of them are there if the model is as a whole."""
    model, arena, found = engine.model, engine.parts.disk_tier.arena, {}

    def look() -> None:
        found["parameters"] = [buffer for module in sharded_modules(model) for buffer in shard_buffers(module)]
        found["gradients"] = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]

    engine.stepper.before_update.append(look)
    engine.train_batch(batch)
    found["states"] = [local_tensor(v) for state in engine.optimizer.state.values() for v in state.values() if v.ndim]
    tensors = [tensor for kind in found.values() for tensor in kind if tensor.numel()]
    assert all(arena.holds(tensor) for tensor in tensors) == whole
    return sum(tensor.numel() * 4 for tensor in tensors if arena.holds(tensor))


@pytest.mark.parametrize("ratio", [1, 0.3])
@pytest.mark.parametrize(("world", "stage", "kind"), [(1, 2, "llama"), (2, 1, "llama"), (3, 3, "gpt2"), (4, 2, "qwen3")])
def test_files_are_as_priced(fake_world: Callable[..., None], tmp_path: Path, world: int, stage: int, kind: str, ratio: float) -> None:
    """Uneven shards too. The optimizer's step counts stay in memory: a few bytes a parameter, which the ledger has in `optimizer`."""
    fake_world(world)
    config = settings(world, 1, stage, 1, 1)
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 1000, "ratio": ratio}
    model = cases.build(kind, tied=False, dtype=torch.float32)
    facts = model_facts(model, find_blocks(model))
    resolved = resolve(load(config), world_size=world)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(32).view(2, 16) % cases.VOCABULARY
    # A model that is not sharded is computed with where it is: its parameters stay in memory.
    in_files = bytes_in_files(engine, {"input_ids": ids, "labels": ids}, whole=ratio == 1)
    assert in_files > 0
    at = resolved.layout
    start = Ledger.start(dp_replicate=at.dp_replicate, dp_shard=at.dp_shard, accumulation=1)
    ledger = account_all((resolved.precision, resolved.data_parallel, resolved.optimizer_offload), start, facts)
    assert in_files == int(ledger.memory["files"][0])
    assert int(ledger.memory["step_buffers"][0]) == min(in_files, 4 * 4 * 1000)


@pytest.mark.parametrize(("rank", "stage", "schedule", "ratio"), [(0, 2, "zbv", 1), (2, 3, "1f1b", 1), (2, 2, "interleaved-1f1b", 0.5)])
def test_files_of_a_pipelines_rank(
    fake_world: Callable[..., None], tmp_path: Path, rank: int, stage: int, schedule: str, ratio: float
) -> None:
    """Tied embeddings are in the files of both ends."""
    fake_world(4, rank)
    config = pipeline_settings(stage, 4, schedule, pp=2, dp_shard=2)
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 1000, "ratio": ratio}
    engine, resolved, facts, parts = pipeline.build(config, 4)
    in_files = bytes_in_files(engine, pipeline.batch(4), whole=ratio == 1)
    start = pipeline.predicted(resolved, facts, parts, rank)
    own = pipeline.facts_of_rank(facts, parts.cut, parts.schedule.stages_of(resolved.layout.coordinates(rank)["pp"]))
    assert in_files == int(resolved.optimizer_offload.account(start, own).memory["files"][0])
