"""A fake world: one process that believes to be a rank of many. Collectives return at once and move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait._torch.dtensor import forget_meshes


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """Call with a world size and a rank, by default 0."""

    def start(world_size: int, rank: int = 0) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()  # of the world before, where this process may have had another rank
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
