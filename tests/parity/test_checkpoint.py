"""A run that goes on from a checkpoint on another layout equals an uninterrupted run."""

import pytest

import plait
from plait.engine.engine import Engine
from plait.engine.weights import load_weights_of
from plait.errors import CheckpointError
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.full_tensors import assert_equal, full_weights
from tests.parity.mean_losses import close

MICRO_BATCHES = 6
"""Number of micro-batches of a step over all ranks, the same ones on every layout."""


def config(world, stage):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 3}}
    return settings(world, stage, 1, MICRO_BATCHES // world, scheduler=schedule)


def run(rank, world, stage, folder, first, last):
    """Train steps `first` to `last`, from the latest checkpoint if there is one, and save.

    Runs on every rank.
    """
    engine = cases.engine(cases.build("plain", tied=True), config(world, stage))
    loaded = engine.load_checkpoint(folder)
    assert (loaded is not None) == (first > 0)
    if loaded is not None:
        assert engine.global_steps == first
        assert loaded[1] == {"position": first}

    count = MICRO_BATCHES // world
    losses = []
    for step in cases.ragged_steps(MICRO_BATCHES, steps=4, keys=())[first:last]:
        batches = step[rank * count : (rank + 1) * count]
        losses.append(float(engine.train_batch(batches).loss))
    engine.save_checkpoint(folder, client_state={"position": last})
    return {"losses": losses, "weights": full_weights(engine.model), "lr": engine.get_lr()}


def test_resume_on_an_uneven_layout(pool, tmp_path):
    """Three ranks divide no parameter evenly. test_checkpoint_layouts.py has the other layouts."""
    expected = pool.run(1, run, 0, str(tmp_path / "uninterrupted"), 0, 4)[0]
    pool.run(2, run, 3, str(tmp_path / "run"), 0, 2)
    resumed = pool.run(3, run, 1, str(tmp_path / "run"), 2, 4)[0]
    assert resumed["losses"] == pytest.approx(expected["losses"][2:], rel=1e-12)
    assert resumed["lr"] == pytest.approx(expected["lr"], rel=1e-12)
    close(resumed["weights"], expected["weights"])


def load_into_another_model(rank, world, folder):
    """Runs on every rank."""
    for fields, name in (
        ({"width": 16}, "embed.weight"),
        ({"layers": 2}, "blocks.2."),
        ({"layers": 4}, "blocks.3."),
    ):
        model = cases.PlainModel(tied=True, **fields).double()
        engine = plait.initialize(model, config(world, 0))
        before = full_weights(engine.model)
        for load in (Engine.load_checkpoint, load_weights_of):
            with pytest.raises(CheckpointError, match=rf"(?s)is of another model.*{name}"):
                load(engine, folder, tag=None)
            assert_equal(full_weights(engine.model), before)


def test_a_checkpoint_of_another_model_is_refused(pool, tmp_path):
    pool.run(1, run, 0, str(tmp_path), 0, 1)
    pool.run(1, load_into_another_model, str(tmp_path))


def save_between_micro_batches(rank, world, folder):
    """Save and load in the middle of a step of DeepSpeed's three calls. Runs on every rank."""
    engine = cases.engine(cases.build("plain", tied=True), settings(world, 1, 1, 2))
    batches = cases.ragged_steps(2 * world, steps=1, keys=())[0][2 * rank : 2 * rank + 2]

    def backward(index):
        engine.backward(engine(batches[index]["input_ids"]).logits.square().mean())

    engine.save_checkpoint(folder)
    before = full_weights(engine.model)
    backward(0)
    # The gradients of the first micro-batch would be lost.
    with pytest.raises(plait.PlaitError, match="1 micro-batches of this step"):
        engine.save_checkpoint(folder)
    engine.step()
    backward(1)
    engine.step()
    after = full_weights(engine.model)

    # A load in the middle of a step drops its gradients and begins the step again.
    backward(1)
    engine.load_checkpoint(folder)
    assert_equal(full_weights(engine.model), before)
    for index in range(2):
        backward(index)
        engine.step()
    assert_equal(full_weights(engine.model), after)


def test_a_save_between_micro_batches_is_refused(pool, tmp_path):
    pool.run(2, save_between_micro_batches, str(tmp_path))
