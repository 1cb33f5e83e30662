"""Differences of the Trainer between releases of Transformers.

The Trainer of Plait runs on Transformers 5.17 and newer. Everything that depends on the release is
decided here. The decision depends on the attributes that exist, and falls back to the behaviour of
Transformers itself in that release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import transformers.trainer
from packaging.version import Version

from plait.errors import InputError

OLDEST_TRAINER = "5.17.0"
"""Oldest release of Transformers whose Trainer was run on Plait."""
RECOMPUTE_FIELDS = ("activation_checkpointing", "gradient_checkpointing")
"""Fields of `TrainingArguments` that enable recomputation.

The first exists since Transformers 5.23.
"""


def has_supported_trainer() -> bool:
    """Return True if the installed Trainer is one that Plait was run with."""
    return Version(version("transformers")).release >= Version(OLDEST_TRAINER).release


def require_supported_trainer() -> None:
    """Refuse a Trainer that is too old.

    Raises:
        InputError: Transformers is older than `OLDEST_TRAINER`.
    """
    if not has_supported_trainer():
        raise InputError(
            f"plait.hf.Trainer: Transformers {version('transformers')} is installed, and Plait"
            f" overrides methods of the Trainer as {OLDEST_TRAINER} and newer have them; run pip"
            f" install 'transformers>={OLDEST_TRAINER}', or train with plait.initialize"
        )


def recompute_fields(args: Any) -> tuple[str, ...]:
    """Return those of `RECOMPUTE_FIELDS` that these arguments have, the current name first."""
    existing = {field.name for field in fields(args)}
    return tuple(name for name in RECOMPUTE_FIELDS if name in existing)


def recompute_arguments(args: Any) -> Mapping[str, Any] | None:
    """Return the keyword arguments of recomputation, or None if it is not enabled."""
    names = recompute_fields(args)
    if not any(getattr(args, name) for name in names):
        return None
    for name in names:
        arguments = getattr(args, f"{name}_kwargs")
        if arguments:
            return arguments
    return {}


@contextmanager
def layout_free_groups() -> Iterator[None]:
    """Make a Trainer create an optimizer whose groups do not depend on the layout.

    Transformers since 5.20 makes separate groups for the parameters of every device mesh, because
    one fused call cannot take several. `optim.placement_groups` solves that within a step.
    """
    module: Any = transformers.trainer
    original = getattr(module, "has_mixed_dtensor", None)
    if original is None:
        yield
        return
    module.has_mixed_dtensor = lambda tensors: False
    try:
        yield
    finally:
        module.has_mixed_dtensor = original


def declared_scaling(trainer: Any) -> bool | None:
    """Return `loss_is_scaled_for_ga` of a Trainer.

    The result is None if it is not set, or if this release of Transformers does not read it.
    """
    has_field = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
    return trainer.loss_is_scaled_for_ga if has_field else None


def loss_is_scaled(trainer: Any, items: Any) -> bool:
    """Return True if `compute_loss` divides by the items of a step. If not, `training_step` does.

    Transformers before 5.19 does not read `loss_is_scaled_for_ga`, and decides as later releases do
    if it is None.
    """
    declared = declared_scaling(trainer)
    if declared is not None:
        return bool(declared)
    return (
        trainer.model_accepts_loss_kwargs and items is not None
    ) or trainer.compute_loss_func is not None
