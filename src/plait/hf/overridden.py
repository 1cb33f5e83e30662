"""Inspection of the Trainer's methods that a script's own class overrides.

The names that such a method reads show how its loss is scaled, and whether it calls the method of
the Trainer.
"""

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
    """Return a method that a script's class defines. None if the class of a library defines it."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    if owner.__module__.partition(".")[0] in _LIBRARIES:
        return None
    method: Callable[..., Any] = inspect.unwrap(vars(owner)[name])
    return method


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


def cautions_about_loss(trainer: Any, *, ranks: int, accumulation: int) -> list[str]:
    """Return warnings about a script's own `compute_loss` whose scale depends on the layout.

    Transformers assumes that the loss was divided by `num_items_in_batch`, the targets of a step
    over all micro-batches and processes. Its own `compute_loss` multiplies by the number of
    processes, because gradients are averaged over them.

    Args:
        trainer: A Trainer.
        ranks: Number of data-parallel ranks.
        accumulation: Micro-batches per step.
    """
    method = own_method(type(trainer), "compute_loss")
    # A method that reads its own name calls that of Transformers.
    if method is None or reads(method, "compute_loss"):
        return []
    name = f"{type(trainer).__name__}.compute_loss"
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


def _takes_any_keyword(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
