"""Weights are bitwise the same on every layout.

They are initialised on `meta`, loaded from a folder, or taken from models that differ by rank.
"""

import pytest
import torch

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.covers import proof_after
from tests.parity import cases
from tests.parity.data_parallel import LAYOUTS, materialised, settings
from tests.parity.full_tensors import assert_equal


def full_state(model):
    """Return all parameters and buffers, unsharded. Collective."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: full_tensor_on_cpu(tensor) for name, tensor in named}


def initial_state(rank, world, kind, tied, config, weights=None):
    """Runs on every rank."""
    model = cases.build(kind, tied=tied)
    return full_state(plait.initialize(model, config, weights=weights).model)


SOME_OR_ALL_LAYOUTS = proof_after(
    1,
    [[(1, 3, 1), (2, 0, 1), (3, 2, 1), (4, 3, 2)], LAYOUTS],
    name=lambda layouts: f"{len(layouts)} layouts",
)


@pytest.mark.parametrize("layouts", SOME_OR_ALL_LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "tied"),
    proof_after(0, [("llama", False), ("llama", True), ("gpt2", True), ("plain", False)]),
)
def test_initialisation_does_not_depend_on_the_layout(pool, kind, tied, layouts):
    expected = full_state(materialised(kind, tied=tied))
    assert all(torch.isfinite(tensor).all() for tensor in expected.values())
    for world, stage, replicas in layouts:
        config = settings(world, stage, replicas, 1)
        for state in pool.run(world, initial_state, kind, tied, config):
            assert_equal(state, expected)


@pytest.mark.parametrize("layouts", SOME_OR_ALL_LAYOUTS)
@pytest.mark.parametrize(("kind", "tied"), proof_after(1, [("llama", True), ("gpt2", False)]))
def test_a_folder_loads_the_same_on_every_layout(pool, tmp_path, kind, tied, layouts):
    """Transformers saved the model. Rotary frequencies are buffers that the folder lacks."""
    model = materialised(kind, tied=tied)
    with torch.no_grad():
        # Weights that no initialisation draws.
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for world, stage, replicas in layouts:
        config = settings(world, stage, replicas, 1)
        for state in pool.run(world, initial_state, kind, tied, config, str(tmp_path)):
            assert_equal(state, full_state(model))


def state_of_unequal_models(rank, world, config):
    """Initialize with another model on every rank. Runs on every rank."""
    model = cases.build("plain", tied=False, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return full_state(plait.initialize(model, config).model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_real_model_takes_the_first_ranks_weights(pool, stage):
    """`fully_shard` alone would combine shards of different models."""
    expected = full_state(cases.build("plain", tied=False, device="cpu"))
    for state in pool.run(3, state_of_unequal_models, settings(3, stage, 1, 1)):
        assert_equal(state, expected)
