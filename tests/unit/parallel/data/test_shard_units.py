"""Models that cannot be cut into units are refused by name, on every release of torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn

from plait._torch.groups import FakeStore
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.errors import ModelError
from plait.parallel.parts import Parts
from plait.parallel.techniques.shard_units import shard_units


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """Rank 0 of a fake world of 2."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_parameter_of_two_blocks() -> None:
    """torch before 2.13 would shard the parameter twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(
        ModelError, match=r"0\.weight and 1\.weight share one parameter .* \(0 and 1\)"
    ):
        shard_units(
            Parts(model, ("0", "1")), build_mesh(Layout(dp_shard=2)), free_after_forward=True
        )


def test_a_parameter_of_a_block_and_the_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with pytest.raises(ModelError, match=r"\(0 and the rest of the model\)"):
        shard_units(
            Parts(model, ("0", "1")), build_mesh(Layout(dp_shard=2)), free_after_forward=True
        )
