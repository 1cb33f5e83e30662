"""Methods of the Trainer that a script's own class overrides: what they read tells what their losses mean."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from plait.hf.transformers_versions import declared_scaling

_LIBRARIES = ("transformers", "trl", "plait")
_SIZES = ("num_processes", "world_size", "get_world_size")


def own_method(kind: type, name: str) -> Callable[..., Any] | None:
    """Return the method of this name of a script's class; None where a library's is called."""
    owner = next(one for one in kind.__mro__ if name in vars(one))
    if owner.__module__.partition(".")[0] in _LIBRARIES:
        return None
    found: Callable[..., Any] = inspect.unwrap(vars(owner)[name])
    return found


def reads(method: Callable[..., Any], name: str) -> bool:
    """Return whether the code of a method names a variable, an attribute or a keyword argument."""
    code = getattr(method, "__code__", None)
    return code is None or name in _names(code)  # what cannot be looked at is taken to be right


def _names(code: CodeType) -> set[Any]:
    found: set[Any] = set()
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, CodeType):
            found |= _names(value)
        elif isinstance(value, tuple):  # names of keyword arguments, or of two variables
            found.update(one for one in value if isinstance(one, str))
        elif isinstance(value, str) and instruction.opname != "MAKE_CELL":  # which every captured parameter has
            found.add(value)
    return found


def cautions_about_loss(trainer: Any, *, ranks: int, accumulation: int) -> list[str]:
    """Return what to tell about a `compute_loss` of the script's own whose scale follows the layout.

    Transformers takes the loss as divided by `num_items_in_batch`, the targets of a step over all
    micro-batches and processes, and its own `compute_loss` multiplies by the processes, over which
    gradients are averaged.
    """
    method = own_method(type(trainer), "compute_loss")
    if method is None or reads(method, "compute_loss"):  # it calls Transformers' own
        return []
    name = f"{type(trainer).__name__}.compute_loss"
    if reads(method, "num_items_in_batch") or _takes_any_keyword(method):
        if ranks == 1 or any(reads(method, size) for size in _SIZES):
            return []
        return [
            f"{name} reads num_items_in_batch, the targets of all processes, and gradients are means over {ranks} data-parallel ranks: "
            "as in Transformers, a loss that is divided by it has to be multiplied by self.accelerator.num_processes, else it is "
            f"{ranks} times smaller than in one process"
        ]
    if declared_scaling(trainer) is not None or not trainer.model_accepts_loss_kwargs or accumulation == 1:
        return []
    return [
        f"{name} does not read num_items_in_batch: as in Transformers, its loss is taken for one that is divided by it, so that the means "
        f"of {accumulation} micro-batches add up; write loss_is_scaled_for_ga = False into {type(trainer).__name__} if it returns a mean"
    ]


def _takes_any_keyword(method: Callable[..., Any]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(method).parameters.values())
