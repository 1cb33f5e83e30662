"""What a rank stands waiting is told by collective and axis, and a late rank makes the others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import plait
from plait.comm.waits import Waits
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.pool import Pool

LATE_SECONDS = 0.05


def late_by(seconds: float, key: str) -> None:
    """Stand still, from when the other rank waits on."""
    dist.distributed_c10d._get_default_store().wait([key])
    time.sleep(seconds)


@contextmanager
def saying_when_it_waits(key: str) -> Iterator[None]:
    """Put `key` into the store when this rank begins to wait."""
    honest = Waits.during

    @contextmanager
    def during(self: Waits, what: str) -> Iterator[None]:
        with honest(self, what):
            dist.distributed_c10d._get_default_store().set(key, "yes")
            yield

    with patch.object(Waits, "during", during):
        yield


def waited(rank: int, world: int, config: dict[str, Any], late: int | None) -> tuple[dict[str, float], float]:
    """(what the second step waited, its seconds); the rank `late` comes late to it. Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=False), config, loss_fn=plait.causal_lm_loss)
    batches = cases.steps_for("plain", engine.dp_size * config["gradient_accumulation_steps"])[0]
    batch = batches[engine.dp_rank * config["gradient_accumulation_steps"]]
    if config["gradient_accumulation_steps"] > 1:
        batch = batches[: config["gradient_accumulation_steps"]]
    engine.train_batch(batch)
    hook = None
    if rank == late:
        last = list(engine.model.parameters())[-1]
        hook = last.register_hook(lambda gradient: late_by(LATE_SECONDS, str(config)))
    began = time.perf_counter()
    with saying_when_it_waits(str(config)) if late not in (None, rank) else nullcontext():
        result = engine.train_batch(batch)
    seconds = time.perf_counter() - began
    if hook is not None:
        hook.remove()
    return dict(result.exposed_communication_seconds), seconds


@pytest.mark.parametrize("transport", ["auto", "torch"])
@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (0, {"all_reduce dp_replicate"}),
        (2, {"all_gather dp_shard", "reduce_scatter dp_shard"}),
        (3, {"all_gather dp_shard", "reduce_scatter dp_shard"}),
    ],
)
def test_by_collective_and_axis(pool: Pool, transport: str, stage: int, names: set[str]) -> None:
    config = settings(2, stage, 1, 1)
    config["parallel"] |= {"transport": transport, "measure_seconds": 0.1}
    for found, seconds in pool.run(2, waited, config, None):
        assert set(found) == names
        assert 0 < sum(found.values()) < seconds


def test_compressed_collectives_are_counted(pool: Pool) -> None:
    config = settings(2, 2, 1, 1)
    config["parallel"] |= {"compress_gradients": "int8", "compress_weights": "int8"}
    found, _ = pool.run(2, waited, config, None)[0]
    assert set(found) == {"all_gather dp_shard", "reduce_scatter dp_shard"}


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_the_others_wait_for_a_late_rank(pool: Pool, transport: str) -> None:
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": transport, "measure_seconds": 0.1}
    (first, _), _ = pool.run(2, waited, config, 1)
    assert sum(first.values()) >= LATE_SECONDS


def test_a_pipeline_waits_for_its_messages(pool: Pool) -> None:
    config = settings(2, 0, 1, 2)
    config["parallel"] = {"pp": 2}
    for found, seconds in pool.run(2, waited, config, None):
        assert set(found) == {"message pp"}
        assert 0 < found["message pp"] < seconds


def test_taking_begins_anew() -> None:
    waits = Waits()
    for _ in range(2):
        with waits.during("a"):
            time.sleep(0.001)
    with pytest.raises(KeyError), waits.not_counted(), waits.during("b"):
        raise KeyError
    found = waits.take()
    assert found["a"] >= 0.002 and set(found) == {"a"}
    assert waits.take() == {}
