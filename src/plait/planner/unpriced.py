"""Settings that affect time or memory but are not priced, which a plan lists.

Runs with such settings are not used for calibration. A setting is either priced, or has no effect
if it is in one of the two lists; all others that differ from their default are unpriced. A new
setting therefore cannot be forgotten.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects.keys import schema_fields
from plait.config.schema.config import Config
from plait.planner.auto import PATHS

_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_optimization.offload_optimizer.device": ("cpu",),
    "parallel.recompute.mode": ("full", "selective", "none"),
    "optimizer.type": ("Adam", "AdamW"),
}
"""Priced values besides the default."""
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
"""Settings that times and bytes of a plan depend on."""

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
"""Settings and sections whose effect is smaller than a plan's own error."""

_OWNERS = {
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param": "zero_optimization.offload_param.device",
    "parallel.activation_offload": "parallel.activation_offload.fraction",
    "compile": "compile.enabled",
    "parallel.recompute": "parallel.recompute.mode",
}
"""Setting that enables a section. Without it nothing in the section has an effect."""


def unpriced(config: Config) -> tuple[str, ...]:
    """Return the settings of a file that are not priced, as `key = value`."""
    default = Config.model_validate(
        {"model": {"path": "any"}, "optimizer": {}, "data": {}, "run": {}}
    )

    settings = []
    for path in schema_fields():
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
        settings.append(f"{path} = {value}")

    return tuple(settings)
