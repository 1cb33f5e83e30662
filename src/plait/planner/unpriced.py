"""Settings that change how long a step takes or what it needs, and that no plan prices: named with
a plan, and no reason to calibrate by.

A setting is priced, or changes neither time nor memory, if it stands in one of the two lists; every
other that is not at its default is unpriced, so that a new one cannot be forgotten.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects.keys import fields
from plait.config.schema.config import Config
from plait.planner.auto import PATHS

_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_optimization.offload_optimizer.device": ("cpu",),
    "parallel.recompute.mode": ("full", "selective", "none"),
    "optimizer.type": ("Adam", "AdamW"),
}
"""Modelled values, besides the default."""
PRICED = frozenset(PATHS.values()) - _VALUES.keys() | {
    "zero_optimization.offload_optimizer.ratio",
    "train_batch_size",
    "communication_data_type",
    "fp16.enabled",
    "bf16.enabled",
    "compile.enabled",
    "optimizer.states",
    "data.sequence_length",
    "data.vocab_size",
    "model.config",
    "model.path",
}
"""What a plan's times and bytes follow."""

WITHOUT_EFFECT = (
    "data_parallel_size",
    "num_layers",
    "gradient_clipping",
    "optimizer.params",
    "scheduler",
    "fp16",
    "bf16",
    "data",
    "run",
    "parallel.blocks",
    "parallel.unused_parameters",
)
"""Settings and sections that change neither time nor memory by more than a plan's own error."""

_OWNERS = {
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param": "zero_optimization.offload_param.device",
    "parallel.activation_offload": "parallel.activation_offload.fraction",
    "compile": "compile.enabled",
    "parallel.recompute": "parallel.recompute.mode",
}
"""Section to the setting without which nothing in it counts."""


def unpriced(config: Config) -> tuple[str, ...]:
    """The settings of a file that are so, as `key = value`."""
    default = Config.model_validate(
        {"model": {"path": "any"}, "optimizer": {}, "data": {}, "run": {}}
    )
    found = []
    for path in fields():
        if path in PRICED or any(
            path == name or path.startswith(f"{name}.") for name in WITHOUT_EFFECT
        ):
            continue
        value = config.value(path)
        usual = default.value(path)
        if value in (None, usual, *_VALUES.get(path, ())):
            continue
        owner = next(
            (o for section, o in _OWNERS.items() if path.startswith(f"{section}.") and path != o),
            None,
        )
        if owner is not None and config.value(owner) == default.value(owner):
            continue
        found.append(f"{path} = {value}")
    return tuple(found)
