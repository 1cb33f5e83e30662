"""Layouts of two and of four ranks, as sections of a configuration, for the tests of inference."""

from __future__ import annotations

from typing import Any

OFF: dict[str, Any] = {"sequence_parallel": False}
TWO: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "tp": {"parallel": {"tp": 2, **OFF}},
    "sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "pp": {"parallel": {"pp": 2}},
    "pp, interleaved": {
        "parallel": {"pp": 2, "pipeline": {"schedule": "interleaved-1f1b"}},
        "gradient_accumulation_steps": 2,
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "tp x pp": {"parallel": {"pp": 2, "tp": 2, **OFF}},
    "pp x ZeRO 3": {"parallel": {"pp": 2}, "zero_optimization": {"stage": 3}},
    "tp wider than key and value heads": {"parallel": {"tp": 4, **OFF}},
    "hybrid sharding": {
        "parallel": {"dp_shard": 2, "dp_replicate": 2},
        "zero_optimization": {"stage": 3},
    },
    "pp 4": {"parallel": {"pp": 4}},
}
