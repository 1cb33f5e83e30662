"""Files of `accelerate launch` are often given for DeepSpeed files: they are refused with what to write instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plait.config.reading.source import Document
from plait.errors import Problem

_KEYS = ("compute_environment", "distributed_type", "fsdp_config", "parallelism_config")
_SAME = ("gradient_accumulation_steps", "gradient_clipping")


def is_accelerate(tree: Mapping[str, Any]) -> bool:
    """Whether a file has keys that only `accelerate config` writes."""
    return any(key in tree for key in _KEYS)


def instead_of_accelerate(document: Document) -> Problem:
    """The problem with the file; its remedy is the DeepSpeed file that it names, or one that says the same."""
    rule = "is a file of `accelerate launch`, whose keys are others than DeepSpeed's"
    plugin = document.tree.get("deepspeed_config")
    plugin = plugin if isinstance(plugin, dict) else {}
    if "deepspeed_config_file" in plugin:
        return Problem(document.name, None, rule, f"give the file that it names: {plugin['deepspeed_config_file']}")
    same: dict[str, Any] = {"zero_optimization": {"stage": plugin.get("zero_stage", 3)}}
    same |= {key: plugin[key] for key in _SAME if key in plugin}
    precision = document.tree.get("mixed_precision")
    if precision in ("fp16", "bf16"):
        same[precision] = {"enabled": True}
    return Problem(document.name, None, rule, f"write {json.dumps(same)}")
