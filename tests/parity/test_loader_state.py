"""A loader's position in a checkpoint: a run that goes on in the middle of an epoch reads the same samples and has the same weights."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from plait.errors import CheckpointError, InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import settings

STEPS, SAVED = 5, 2
TORCHDATA = importlib.util.find_spec("torchdata") is not None


class Counting:
    """Batches of a shuffled order; says where it stands as torchdata's loader does."""

    def __init__(self, rank, world):
        self._order = torch.randperm(24, generator=torch.Generator().manual_seed(1))[
            rank::world
        ].tolist()
        self._at = 0

    def __iter__(self):
        while self._at < len(self._order):
            self._at += 2
            yield torch.tensor(self._order[self._at - 2 : self._at])

    def state_dict(self):
        return {
            "at": self._at,
            "order": tuple(self._order),
            "generator": torch.zeros(3, dtype=torch.uint8),
        }

    def load_state_dict(self, state_dict):
        assert isinstance(state_dict["order"], tuple)
        self._at, self._order = state_dict["at"], list(state_dict["order"])


def made(kind, rank, world):
    if kind == "duck":
        return Counting(rank, world)
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = torch.arange(24)
    sampler: Any = DistributedSampler(data, num_replicas=world, rank=rank, seed=4)  # type: ignore[arg-type]
    return StatefulDataLoader(data, batch_size=2, sampler=sampler)


def batch_of(numbers):
    ids = torch.stack([torch.arange(8) * (int(n) + 3) % cases.VOCABULARY for n in numbers])
    return {"input_ids": ids, "labels": ids.clone()}


def engine_of(world):
    return cases.engine(cases.build("plain", tied=True), settings(world, 2, 1, 1))


def steps(engine, loader, count):
    seen = []
    for numbers in loader:
        seen.append(numbers.tolist())
        engine.train_batch(batch_of(numbers))
        if len(seen) == count:
            break
    return seen


def weights(engine):
    return {
        name: full_tensor_on_cpu(p).detach().clone() for name, p in engine.model.named_parameters()
    }


def in_one_go(rank, world, kind, folder):
    """Runs in a worker."""
    engine, loader = engine_of(world), made(kind, rank, world)
    seen = []
    for numbers in loader:
        seen.append(numbers.tolist())
        engine.train_batch(batch_of(numbers))
        if len(seen) == SAVED:
            engine.save_checkpoint(folder, loader=loader)
        if len(seen) == STEPS:
            break
    found = weights(engine)
    engine.close()
    return seen, found


def gone_on(rank, world, kind, folder):
    """Runs in a worker."""
    engine, loader = engine_of(world), made(kind, rank, world)
    assert engine.load_checkpoint(folder, loader=loader) is not None
    seen = steps(engine, loader, STEPS - SAVED)
    found = weights(engine)
    engine.close()
    return seen, found


def refused(rank, world, folder):
    """Runs in a worker: on another layout, without one, and of what is no such loader. Nothing has changed afterwards."""
    engine = engine_of(world)
    before, found = weights(engine), []
    for loader, error in ((made("duck", rank, world), CheckpointError), (iter([]), InputError)):
        with pytest.raises(error) as raised:
            engine.load_checkpoint(folder, loader=loader)
        found.append(str(raised.value))
    assert (
        all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
        and engine.global_steps == 0
    )
    engine.close()
    return found


KINDS = [
    "duck",
    pytest.param(
        "torchdata", marks=pytest.mark.skipif(not TORCHDATA, reason="torchdata is not installed")
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_an_epoch(pool, tmp_path, kind):
    whole_run = pool.run(2, in_one_go, kind, str(tmp_path))
    for (seen, found), (wanted, weights_then) in zip(
        pool.run(2, gone_on, kind, str(tmp_path)), whole_run, strict=True
    ):
        assert len(wanted) == STEPS and seen == wanted[SAVED:]
        assert all(torch.equal(found[name], tensor) for name, tensor in weights_then.items())


def test_on_another_layout_it_is_refused(pool, tmp_path):
    pool.run(2, in_one_go, "duck", str(tmp_path))
    ((other, stateless),) = pool.run(1, refused, str(tmp_path))
    assert (
        "the layout has changed (dp_shard 2 -> 1), so samples would be left out or repeated"
        in other
    )
    assert (
        "has no state_dict, so its position cannot be saved; use torchdata's StatefulDataLoader"
        in stateless
    )


def without(rank, world, folder):
    """Runs in a worker."""
    engine = engine_of(world)
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(folder, loader=Counting(rank, world))
    engine.close()
    return [str(raised.value)]


def test_a_checkpoint_without_a_loader(pool, tmp_path):
    for (said,) in pool.run(2, without, str(tmp_path)):
        assert "was saved without a loader; leave `loader` out" in said
