import pytest

from plait.config.resolving.resolve import examine_source, load, resolve
from plait.errors import ConfigError, InputError
from plait.planner import configuration
from plait.planner.configuration import auto_paths
from plait.planner.hardware import cluster
from plait.planner.models import find_model

MODEL = dict(find_model("llama-3-8b", sequence=2048).section)
TREE = {"train_batch_size": 64, "bf16": {"enabled": True}, "model": MODEL, "data": {"sequence_length": 2048}, "run": {"steps": 5}}  # fmt: skip


def complete(tree, *, cluster):
    return configuration.complete(configuration.read_file(examine_source(tree)[1]), cluster=cluster)


def completed(gpus=16, **changes):
    config, found = complete({**TREE, **changes}, cluster=cluster("h100", gpus))
    return config, found, resolve(load(config), world_size=gpus)


def test_every_auto_is_answered_and_what_is_fixed_is_kept():
    parallel = {"tp": "auto", "pp": 1, "sequence_parallel": "auto", "recompute": {"mode": "none"}}
    changes = {
        "parallel": parallel,
        "zero_optimization": {"stage": "auto"},
        "train_micro_batch_size_per_gpu": 1,
    }
    assert auto_paths({**TREE, **changes}) == (
        "parallel.tp",
        "parallel.sequence_parallel",
        "zero_optimization.stage",
    )
    config, found, resolved = completed(**changes)
    assert (
        resolved.layout.pp == 1
        and resolved.batch.micro_batch_size == 1
        and resolved.recompute.mode == "none"
    )
    assert resolved.layout.tp == found.best[0].layout["tp"]
    assert config["run"] == {"steps": 5} and auto_paths(config) == ()


def test_what_is_left_out_has_its_default():
    _, found, resolved = completed(zero_optimization={"stage": "auto"})
    assert (resolved.layout.tp, resolved.layout.pp, resolved.recompute.mode) == (1, 1, "none")
    assert found.best[0].layout["stage"] == resolved.data_parallel.stage


def test_what_cannot_be_planned_says_why():
    with pytest.raises(ConfigError, match="train_batch_size"):
        complete({**TREE, "train_batch_size": "auto"}, cluster=cluster("h100", 8))
    with pytest.raises(ConfigError, match=r"model\.config or model\.path"):
        complete({"train_batch_size": 8}, cluster=cluster("h100", 8))
    with pytest.raises(ConfigError, match="not a mode that can be fixed for a plan"):
        complete(
            {**TREE, "parallel": {"recompute": {"mode": "budget"}}}, cluster=cluster("h100", 8)
        )
    with pytest.raises(InputError, match="no layout fits on 8 x NVIDIA V100.* of 31.7 GiB"):
        complete({**TREE, "bf16": {"enabled": False}}, cluster=cluster("v100", 8))
