"""Weights are bitwise the same on every layout: after initialisation on `meta`, after loading a folder, and from real models that
differ."""

import pytest
import torch

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.covers import proof_after
from tests.parity import cases
from tests.parity.data_parallel import LAYOUTS, materialised, settings

Weights = dict[str, torch.Tensor]


def tensors(model):
    """All parameters and buffers, whole."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: full_tensor_on_cpu(tensor) for name, tensor in named}


def initialised(rank, world, kind, tied, config, weights):
    """Runs in a worker."""
    return tensors(plait.initialize(cases.build(kind, tied=tied), config, weights=weights).model)


def broadcasted(rank, world, config):
    """A real model that every rank drew differently. Runs in a worker."""
    model = cases.build("plain", tied=False, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return tensors(plait.initialize(model, config).model)


def same(found, wanted):
    """Bitwise."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


ALL = proof_after(
    1,
    [[(1, 3, 1), (2, 0, 1), (3, 2, 1), (4, 3, 2)], LAYOUTS],
    name=lambda some: f"{len(some)} layouts",
)


@pytest.mark.parametrize("layouts", ALL)
@pytest.mark.parametrize(
    ("kind", "tied"),
    proof_after(0, [("llama", False), ("llama", True), ("gpt2", True), ("plain", False)]),
)
def test_initialisation_does_not_depend_on_the_layout(pool, kind, tied, layouts):
    """Every stage on 1, 2, 3 and 4 ranks holds what one process draws."""
    wanted = tensors(materialised(kind, tied=tied))
    assert all(torch.isfinite(tensor).all() for tensor in wanted.values())
    for world, stage, replicas in layouts:
        for found in pool.run(
            world, initialised, kind, tied, settings(world, stage, replicas, 1), None
        ):
            same(found, wanted)


@pytest.mark.parametrize("layouts", ALL)
@pytest.mark.parametrize(("kind", "tied"), proof_after(1, [("llama", True), ("gpt2", False)]))
def test_a_folder_loads_the_same_on_every_layout(pool, tmp_path, kind, tied, layouts):
    """A model saved by Transformers, rotary buffers included."""
    source = materialised(kind, tied=tied)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    source.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for world, stage, replicas in layouts:
        for found in pool.run(
            world, initialised, kind, tied, settings(world, stage, replicas, 1), str(tmp_path)
        ):
            same(found, tensors(source))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_real_model_takes_the_first_ranks_weights(pool, stage):
    """`fully_shard` alone would give a patchwork."""
    wanted = tensors(cases.build("plain", tied=False, device="cpu"))
    for found in pool.run(3, broadcasted, settings(3, stage, 1, 1)):
        same(found, wanted)
