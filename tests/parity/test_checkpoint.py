"""A run that is saved on one layout and goes on on another computes what an uninterrupted run does."""

import pytest
import torch

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.mean_losses import close

GLOBAL = 6
"""Micro-batches of a step over the whole world: every layout below deals out the same ones."""


def config(world, stage, replicas):
    """The same global batch on every layout."""
    return settings(
        world,
        stage,
        replicas,
        GLOBAL // world,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 3}},
    )


def run(rank, world, conf, folder, first, last, save):
    """Steps `first` to `last`, from the latest checkpoint if there is one. Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=True), conf, loss_fn=plait.causal_lm_loss)
    loaded = engine.load_checkpoint(folder)
    assert (loaded is not None) == (first > 0)
    if loaded is not None:
        assert engine.global_steps == first
        assert loaded[1] == {"position": first}
    count = GLOBAL // world
    steps = cases.ragged_steps(GLOBAL, steps=4, keys=())[first:last]
    losses = [
        float(engine.train_batch(step[rank * count : (rank + 1) * count]).loss) for step in steps
    ]
    if save:
        engine.save_checkpoint(folder, client_state={"position": last})
    return {
        "losses": losses,
        "weights": {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()},
        "lr": engine.get_lr(),
    }


def test_resume_on_an_uneven_layout(pool, tmp_path):
    """Losses, parameters, learning rate and the client's state go on as if nothing had happened; test_checkpoint_layouts.py has others."""
    straight = pool.run(1, run, config(1, 0, 1), str(tmp_path / "none"), 0, 4, False)[0]
    pool.run(2, run, config(2, 3, 1), str(tmp_path / "run"), 0, 2, True)
    resumed = pool.run(3, run, config(3, 1, 1), str(tmp_path / "run"), 2, 4, False)[0]
    assert resumed["losses"] == pytest.approx(straight["losses"][2:], rel=1e-12)
    assert resumed["lr"] == pytest.approx(straight["lr"], rel=1e-12)
    close(resumed["weights"], straight["weights"])


def test_a_checkpoint_of_another_model_is_refused(pool, tmp_path):
    """By name and shape, before anything is loaded."""
    pool.run(1, run, config(1, 0, 1), str(tmp_path), 0, 1, True)
    said = pool.run(1, load_other, config(1, 0, 1), str(tmp_path))[0]
    assert "is of another model" in said and "embed.weight" in said


def load_other(rank, world, conf, folder):
    """Runs in a worker."""
    model = cases.PlainModel(tied=True, width=16).double()
    try:
        plait.initialize(model, conf).load_checkpoint(folder)
    except plait.PlaitError as error:
        return str(error)
    return "loaded"


def between_micro_batches(rank, world, folder):
    """What a save says in the middle of a step of the three calls; a load there begins the step anew. Runs in a worker."""
    engine = cases.engine(cases.build("plain", tied=True), settings(world, 1, 1, 2))
    pieces = cases.ragged_steps(2 * world, steps=1, keys=())[0][2 * rank : 2 * rank + 2]

    def micro_batch(index):
        engine.backward(engine(pieces[index]["input_ids"]).logits.square().mean())

    def weights():
        return [full_tensor_on_cpu(parameter) for parameter in engine.model.parameters()]

    engine.save_checkpoint(folder)
    before = weights()
    micro_batch(0)
    with pytest.raises(plait.PlaitError) as caught:
        engine.save_checkpoint(folder)
    engine.step()
    micro_batch(1)
    engine.step()
    after = weights()
    micro_batch(1)
    engine.load_checkpoint(folder)
    assert all(torch.equal(one, other) for one, other in zip(weights(), before, strict=True))
    for index in range(2):
        micro_batch(index)
        engine.step()
    assert all(torch.equal(one, other) for one, other in zip(weights(), after, strict=True))
    return str(caught.value)


def test_a_save_between_micro_batches_is_refused(pool, tmp_path):
    """Its gradients would be lost in silence."""
    assert all(
        "1 micro-batches of this step" in said
        for said in pool.run(2, between_micro_batches, str(tmp_path))
    )
