"""A whole run of 64 processes on one machine: rendezvous, a training step in four-dimensional parallelism, a checkpoint, the exit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plait
from plait.checkpoint.folder import candidates
from plait.checkpoint.load import Reader
from plait.cluster.layout import Layout
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import reference_trace
from tests.integration.many_processes import CLIPPING, DEGREES, RANKS, batches, build, configuration
from tests.parity import cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.proof
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run that ended with exit code 0 on every rank."""
    made = tmp_path_factory.mktemp("many")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.many_processes", str(made)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, (
        f"{done.stderr[:4000]}\n...\n{done.stderr[-500:]}"
    )  # the first rank to fail says why
    print(done.stdout)
    return made


@pytest.fixture(scope="module")
def alone():
    """One process on the whole batch, in plain torch."""
    model = build()
    with keeping_float64(model):
        return reference_trace(
            model,
            [batches()],
            loss_fn=plait.causal_lm_loss,
            optimizer=cases.adamw,
            clipping=CLIPPING,
        )


def told(folder):
    """What every rank said, by rank."""
    return [json.loads((folder / f"rank-{index}.json").read_text()) for index in range(RANKS)]


def test_every_rank_computes_the_step_of_one_process(folder, alone):
    """Loss and gradient norm are the same on all of them."""
    ranks = told(folder)
    layout = Layout(**DEGREES)
    assert [{axis: each[axis] for axis in DEGREES} for each in ranks] == [
        {axis: layout.coordinates(index)[axis] for axis in DEGREES} for index in range(RANKS)
    ]
    assert {each["steps"] for each in ranks} == {1}
    for each in ranks:
        assert each["loss"] == pytest.approx(alone.losses[0], rel=TOLERANCE)
        assert each["norm"] == pytest.approx(alone.grad_norms[0], rel=TOLERANCE)
    assert alone.grad_norms[0] > CLIPPING  # or clipping would not be tried


def test_the_checkpoint_is_complete_and_loads_in_one_process(folder, alone):
    """It holds the parameters after the update, the optimizer's states with them, and a file of every rank that had something to write."""
    saved = folder / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["LATEST", "step-00000001"]
    found = candidates(saved)[0]
    assert len(list(found.path.glob("*.safetensors"))) == RANKS
    Reader(found).verify("full")
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    engine = plait.initialize(model, configuration(), loss_fn=plait.causal_lm_loss)
    try:
        loaded = engine.load_checkpoint(saved)
        assert loaded is not None and loaded[1] == {"ranks": RANKS}
        assert engine.global_steps == 1
        states = engine.optimizer.state
        for name, parameter in engine.model.named_parameters():
            expected = alone.parameters[name]
            assert (
                parameter.detach() - expected
            ).abs().max() <= TOLERANCE * expected.abs().max(), name
            first_moment = 0.1 * alone.gradients[0][name]  # (1 - beta1) x gradient after one step
            assert (
                states[parameter]["exp_avg"] - first_moment
            ).abs().max() <= TOLERANCE * first_moment.abs().max(), name
    finally:
        engine.close()
