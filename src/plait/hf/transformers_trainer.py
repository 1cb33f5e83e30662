"""Properties of the installed Transformers Trainer: its release, and what scripts override.

The Trainer of Plait runs on Transformers 5.17 and newer. All decisions that depend on the release
are in this module. It tests which attributes exist. Where an attribute is missing, Plait behaves as
the releases without that attribute do.

`reads` finds the names that a script's own method uses. They show how the script scales the loss,
and whether its method calls the method of the Trainer.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from importlib.metadata import version
from itertools import pairwise
from types import CodeType
from typing import Any

import transformers.trainer
from packaging.version import Version

from plait.attributes import override_attributes
from plait.errors import InputError

OLDEST_TRAINER = "5.17.0"
"""Oldest release of Transformers whose Trainer was run on Plait."""
RECOMPUTE_FIELDS = ("activation_checkpointing", "gradient_checkpointing")
"""Fields of `TrainingArguments` that enable recomputation.

The first exists since Transformers 5.23.
"""


def has_supported_trainer() -> bool:
    """Return True if the installed Trainer has been tested with Plait."""
    return Version(version("transformers")).release >= Version(OLDEST_TRAINER).release


def require_supported_trainer() -> None:
    """Refuse a Trainer that is too old.

    Raises:
        InputError: Transformers is older than `OLDEST_TRAINER`.
    """
    if not has_supported_trainer():
        raise InputError(
            f"plait.hf.Trainer: Transformers {version('transformers')} is installed, but Plait"
            f" overrides methods of the Trainer that exist in {OLDEST_TRAINER} and newer; run pip"
            f" install 'transformers>={OLDEST_TRAINER}', or train with plait.initialize"
        )


def recompute_fields(args: Any) -> tuple[str, ...]:
    """Return the fields in `RECOMPUTE_FIELDS` that these arguments have, current name first."""
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


def layout_free_groups() -> AbstractContextManager[None]:
    """Return a context in which the groups of a Trainer's optimizer do not depend on the layout.

    Transformers since 5.20 makes separate groups for the parameters of every device mesh, because
    one fused call cannot take parameters of several meshes. `step_by_placement` divides the groups
    only while a step runs.
    """
    module = transformers.trainer
    if not hasattr(module, "has_mixed_dtensor"):
        return nullcontext()
    return override_attributes(module, has_mixed_dtensor=lambda tensors: False)


def declared_scaling(trainer: Any) -> bool | None:
    """Return `loss_is_scaled_for_ga` of a Trainer.

    The result is None if the attribute is not set, or if this release of Transformers does not read
    it.
    """
    has_field = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
    return trainer.loss_is_scaled_for_ga if has_field else None


def loss_is_scaled(trainer: Any, items: Any) -> bool:
    """Return True if `compute_loss`, not `training_step`, divides by `num_items_in_batch`.

    Transformers before 5.19 does not read `loss_is_scaled_for_ga`. It then decides as later
    releases do if this attribute is None.
    """
    declared = declared_scaling(trainer)
    if declared is not None:
        return bool(declared)
    return (
        trainer.model_accepts_loss_kwargs and items is not None
    ) or trainer.compute_loss_func is not None


_LIBRARIES = ("transformers", "trl", "plait")
_SIZES = ("num_processes", "world_size", "get_world_size")


def own_method(kind: type, name: str) -> Callable[..., Any] | None:
    """Return a method that a script's class defines, or None if a library's class defines it."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    if owner.__module__.partition(".")[0] in _LIBRARIES:
        return None
    return inspect.unwrap(vars(owner)[name])


def reads(method: Callable[..., Any], name: str) -> bool:
    """Return whether a method's code has a variable, an attribute or a keyword argument `name`."""
    code = getattr(method, "__code__", None)
    # Compiled methods have no code to inspect, and get the benefit of the doubt.
    return code is None or name in _names(code)


def _names(code: CodeType) -> set[Any]:
    names: set[Any] = set()
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, CodeType):
            names |= _names(value)
        # Names of keyword arguments, or of two variables.
        elif isinstance(value, tuple):
            names.update(entry for entry in value if isinstance(entry, str))
        # MAKE_CELL names every parameter that an inner function captures, also unread ones.
        elif isinstance(value, str) and instruction.opname != "MAKE_CELL":
            names.add(value)
    return names


def warnings_about_loss(trainer: Any, *, ranks: int, accumulation: int) -> list[str]:
    """Return warnings about a script's own `compute_loss` whose scale depends on the layout.

    Transformers assumes that the loss was divided by `num_items_in_batch`, the number of targets in
    all micro-batches of a step on all processes. Its own `compute_loss` multiplies by the number of
    processes, because gradients are averaged over them.

    Args:
        trainer: A Trainer.
        ranks: Number of data-parallel ranks.
        accumulation: Micro-batches per step.
    """
    method = own_method(type(trainer), "compute_loss")
    if method is None:
        return []
    name = f"{type(trainer).__name__}.compute_loss"
    # A method that reads its own name calls that of Transformers.
    if reads(method, "compute_loss"):
        functions = [method, *_helpers(type(trainer), method)]
        if ranks == 1 or not any(map(_divides_by_targets, functions)):
            return []
        if any(reads(function, size) for function in functions for size in _SIZES):
            return []
        return [
            f"{name} divides a term by num_items_in_batch, the targets of all processes, and adds "
            "it to the loss of Transformers' compute_loss, which is multiplied by their number: "
            "multiply the term by self.accelerator.num_processes. Otherwise it is "
            f"{ranks} times smaller than in one process"
        ]
    if reads(method, "num_items_in_batch") or _takes_any_keyword(method):
        if ranks == 1 or any(reads(method, size) for size in _SIZES):
            return []
        return [
            f"{name} reads num_items_in_batch, the targets of all processes, and gradients are "
            f"means over {ranks} data-parallel ranks: as in Transformers, a loss that is divided "
            "by it has to be multiplied by self.accelerator.num_processes. Otherwise it is "
            f"{ranks} times smaller than in one process"
        ]
    if (
        declared_scaling(trainer) is not None
        or not trainer.model_accepts_loss_kwargs
        or accumulation == 1
    ):
        return []
    return [
        f"{name} does not read num_items_in_batch: as in Transformers, Plait assumes that its loss "
        f"is divided by it, and adds up the losses of {accumulation} micro-batches; if it returns "
        f"a mean, set loss_is_scaled_for_ga = False in {type(trainer).__name__}"
    ]


def _helpers(kind: type, method: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the script's functions to which a method refers: methods of its class, and globals."""
    for name in _names(method.__code__) if hasattr(method, "__code__") else ():
        if name == "compute_loss":
            continue
        if any(name in vars(base) for base in kind.__mro__):
            helper = own_method(kind, name)
        else:
            helper = method.__globals__.get(name)
        if helper is not None and hasattr(helper, "__code__"):
            yield helper


def _divides_by_targets(function: Callable[..., Any]) -> bool:
    """Return whether the code of a function divides by a variable `num_items_in_batch`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    for divisor, operation in pairwise(dis.get_instructions(code)):
        names = divisor.argval if isinstance(divisor.argval, tuple) else (divisor.argval,)
        is_division = operation.opname == "BINARY_OP" and operation.argrepr in ("/", "/=")
        if is_division and names[-1] == "num_items_in_batch":
            return True
    return False


def _takes_any_keyword(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
