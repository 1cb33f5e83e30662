"""A run of 64 processes on one machine: rendezvous, a step in four-dimensional parallelism, a
checkpoint and the exit."""

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
"""Relative error of float64 values, whose sums have another order on 64 ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a run whose ranks all ended with exit code 0."""
    path = tmp_path_factory.mktemp("many")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.many_processes", str(path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    # The first rank that fails prints the cause.
    assert done.returncode == 0, f"{done.stderr[:4000]}\n...\n{done.stderr[-500:]}"
    print(done.stdout)
    return path


@pytest.fixture(scope="module")
def reference():
    """Trace of one process with the complete batch, in plain torch."""
    model = build()
    with keeping_float64(model):
        return reference_trace(
            model,
            [batches()],
            loss_fn=plait.causal_lm_loss,
            optimizer=cases.adamw,
            clipping=CLIPPING,
        )


def assert_close(actual, expected, name):
    error = (actual.detach() - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max(), name


def test_every_rank_computes_the_step_of_one_process(folder, reference):
    layout = Layout(**DEGREES)
    for index in range(RANKS):
        report = json.loads((folder / f"rank-{index}.json").read_text())
        coordinates = layout.coordinates(index)
        assert all(report[axis] == coordinates[axis] for axis in DEGREES)
        assert report["steps"] == 1
        assert report["loss"] == pytest.approx(reference.losses[0], rel=TOLERANCE)
        assert report["norm"] == pytest.approx(reference.grad_norms[0], rel=TOLERANCE)
    assert reference.grad_norms[0] > CLIPPING, "gradients are clipped"


def test_checkpoint_is_complete_and_loads_in_one_process(folder, reference):
    saved = folder / "checkpoints"
    assert sorted(os.listdir(saved)) == ["LATEST", "step-00000001"]
    checkpoint = candidates(saved)[0]
    assert len(list(checkpoint.path.glob("*.safetensors"))) == RANKS
    Reader(checkpoint).verify("full")

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
            assert_close(parameter, reference.parameters[name], name)
            # After one step the first moment is (1 - beta1) times the gradient.
            first_moment = 0.1 * reference.gradients[0][name]
            assert_close(states[parameter]["exp_avg"], first_moment, name)
    finally:
        engine.close()
