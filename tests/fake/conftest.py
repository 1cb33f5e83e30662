"""A fake world: one process that acts as one rank of many.

Collectives return at once and move nothing.
"""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait._torch.tensors import forget_meshes


def write_outputs(monkeypatch):
    """Write this rank's part to the outputs of fake collectives, as torch does since 2.13.

    Older releases leave them uninitialised. A step whose gradient is not finite by chance is
    skipped.
    """
    reduce_scatter = dist.reduce_scatter_tensor
    all_to_all = dist.all_to_all_single

    def reduce_scatter_tensor(output, input, *args, **kwargs):
        output.copy_(input.view(-1)[: output.numel()].view(output.shape))
        return reduce_scatter(output, input, *args, **kwargs)

    def all_to_all_single(output, input, *args, **kwargs):
        output.zero_()
        return all_to_all(output, input, *args, **kwargs)

    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter_tensor)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


@pytest.fixture
def fake_world(monkeypatch):
    """Function that starts a world of a given size on a rank, by default 0."""

    def start(world_size, rank=0):
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()  # in the previous world this process may have had another rank
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    if not hasattr(dist, "reduce_scatter_single"):
        write_outputs(monkeypatch)
    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
