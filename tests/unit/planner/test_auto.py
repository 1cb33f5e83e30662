"""Values "auto" of a file are planned, and fixed values are kept."""

import pytest

from plait.config.resolving.resolve import examine_source, load, resolve
from plait.errors import InputError
from plait.planner import configuration
from plait.planner.configuration import auto_paths
from plait.planner.hardware import cluster
from plait.planner.models import find_model

TREE = {
    "train_batch_size": 64,
    "bf16": {"enabled": True},
    "model": dict(find_model("llama-3-8b", sequence=2048).section),
    "data": {"sequence_length": 2048},
    "run": {"steps": 5},
}


def complete(tree, *, gpu="h100", gpus=8):
    """Return the completed tree of a file, and its plan."""
    file = configuration.read_file(examine_source(tree)[1])
    return configuration.complete(file, cluster=cluster(gpu, gpus))


def test_auto_is_planned_and_fixed_values_are_kept():
    tree = {
        **TREE,
        "parallel": {
            "tp": "auto",
            "pp": 1,
            "sequence_parallel": "auto",
            "recompute": {"mode": "none"},
        },
        "zero_optimization": {"stage": "auto"},
        "train_micro_batch_size_per_gpu": 1,
    }
    open_paths = ("parallel.tp", "parallel.sequence_parallel", "zero_optimization.stage")
    assert auto_paths(tree) == open_paths
    completed, result = complete(tree, gpus=16)
    assert completed["run"] == {"steps": 5} and auto_paths(completed) == ()

    resolved = resolve(load(completed), world_size=16)
    assert (resolved.layout.pp, resolved.batch.micro_batch_size) == (1, 1)
    assert resolved.recompute.mode == "none"
    assert resolved.layout.tp == result.best[0].layout["tp"]


def test_missing_values_have_their_defaults():
    completed, result = complete({**TREE, "zero_optimization": {"stage": "auto"}})
    resolved = resolve(load(completed), world_size=8)
    assert (resolved.layout.tp, resolved.layout.pp, resolved.recompute.mode) == (1, 1, "none")
    assert result.best[0].layout["stage"] == resolved.data_parallel.stage


def test_a_model_that_fits_in_no_layout_is_refused():
    with pytest.raises(InputError, match="no layout fits on 8 x NVIDIA V100.* of 31.7 GiB"):
        complete({**TREE, "bf16": {"enabled": False}}, gpu="v100")
