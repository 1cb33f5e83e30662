"""Recompute and offload in a file: what follows from what, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError
from tests.unit.config.cases import resolved

FULL = {"recompute": {"mode": "full"}}


def test_a_budget_is_a_mode() -> None:
    made = resolved({"parallel": {"recompute": {"budget_gib": 1.5}}, "data": {"sequence_length": 64}})
    assert (made.recompute.mode, made.recompute.budget_bytes, made.recompute.sequence_length) == ("budget", 3 * 2**29, 64)
    assert made.sources["parallel.recompute.mode"] == "derived: parallel.recompute.budget_gib is given"
    assert made.sources["parallel.recompute.sequence_length"] == "derived: data.sequence_length"


def test_cpu_checkpointing_is_offload_of_inputs() -> None:
    made = resolved({"activation_checkpointing": {"cpu_checkpointing": True}, "parallel": FULL})
    assert (made.activation_offload.fraction, made.activation_offload.device) == (1.0, "cpu")
    assert made.sources["parallel.activation_offload.fraction"] == "file: activation_checkpointing.cpu_checkpointing"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"parallel": {"recompute": {"mode": "budget"}}}, "no budget is given"),
        ({"parallel": {"recompute": {"mode": "full", "budget_gib": 1}}}, "the mode is full"),
        ({"parallel": {"recompute": {"budget_gib": 1}}}, "neither it nor data.sequence_length is given"),
        ({"activation_checkpointing": {"partition_activations": True}}, "no checkpointed input to shard"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "no checkpointed input to move"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}, "parallel": {**FULL, "activation_offload": {"fraction": 0.5}}},
            "the file says 0.5 on cpu",
        ),
        ({"parallel": {"activation_offload": {"fraction": 0.5, "device": "disk"}}}, "no folder is given"),
        ({"parallel": {"activation_offload": {"fraction": 1.5}}}, "1.5"),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, "in no common buffer"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "stage 0 keeps whole optimizer states"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "no folder is given"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}}}, "stage 0 keeps whole optimizer states"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "a", "buffer_count": 3}}},
            "buffer_count",
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0}}}, "offload_optimizer.ratio"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio leaves part of them on the device",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_optimizer.device is none at stage 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device is cpu at stage 2",
        ),
        ({"pipeline": {"activation_checkpoint_interval": 2}}, "not in groups"),
        ({"optimizer": {"type": "SGD", "states": "int8"}}, "written for Adam and AdamW, and this is SGD"),
        ({"optimizer": {"states": "int4"}}, "int4"),
        ({"optimizer": {"states": "float8", "params": {"amsgrad": True}}}, "`amsgrad` is a parameter of torch's kernels"),
        ({"optimizer": {"states": "int8"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "device is cpu"),
        (
            {"optimizer": {"states": "bf16"}, "zero_optimization": {"stage": 2}, "parallel": {"optimizer_in_backward": True}},
            "optimizer_in_backward is true",
        ),
    ],
)
def test_contradictions(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(tree)


def test_a_budget_needs_a_batch_size() -> None:
    from plait.config.resolve import load, resolve

    config = load({"parallel": {"recompute": {"budget_gib": 1, "sequence_length": 8}}})
    with pytest.raises(ConfigError, match="the file gives no batch size"):
        resolve(config, world_size=1, micro_batch_size=1)
