"""Callbacks of `run.callbacks`: user functions that receive the events of a run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from plait.errors import ConfigError, Problem
from plait.events import Event
from plait.importing import NamedImportError, import_named

if TYPE_CHECKING:
    from plait.engine.engine import Engine

Callback = Callable[[Event, "Engine"], object]
"""Function that every process calls with each event and the engine.

The result True ends the run after the next step, on all processes, with a checkpoint.
"""


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Import the callbacks, and create an instance of each that is a class.

    Args:
        names: Values of the form `package.module:name`.

    Raises:
        ConfigError: A name cannot be imported, or the imported object cannot be called with (event,
            engine).
    """
    definitions = [_import_callback(name) for name in names]
    return [item() if isinstance(item, type) else item for item in definitions]


def check_callbacks(names: Sequence[str]) -> None:
    """Import the callbacks without calling them.

    Raises:
        ConfigError: A name cannot be imported, a class needs arguments, or the callback cannot be
            called with (event, engine).
    """
    for name in names:
        _import_callback(name)


def _import_callback(name: str) -> Any:
    """Return a function, or a class whose instances are callbacks."""
    # Modules of the current folder come first, as for `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module, attribute = import_named(
            name, form="it is not package.module:name", example="my_callbacks:log"
        )
    except NamedImportError as error:
        raise _error(name, error.rule, error.remedy) from None

    definition = getattr(module, attribute, None)
    if definition is None:
        raise _error(
            name,
            f"{module.__name__} has no {attribute!r}",
            "name a function of (event, engine), or a class with such a __call__",
        )

    if not inspect.isclass(definition):
        _check_call(
            definition, 2, name, "it is called with (event, engine)", "accept these two arguments"
        )
        return definition

    _check_call(
        definition, 0, name, "the class is created without arguments", "give its arguments defaults"
    )
    # `definition.__call__` would be that of the metaclass.
    defining_classes = (base for base in definition.__mro__ if "__call__" in vars(base))
    base = next(defining_classes, None)
    _check_call(
        vars(base)["__call__"] if base is not None else None,
        3,
        name,
        "an instance is called with (event, engine)",
        "give the class a __call__ that accepts these",
    )
    return definition


def _check_call(function: Any, argument_count: int, name: str, rule: str, remedy: str) -> None:
    if not callable(function):
        raise _error(name, rule, remedy)
    try:
        inspect.signature(function).bind(*[None] * argument_count)
    except TypeError as error:
        raise _error(name, f"{rule} ({error})", remedy) from None
    except ValueError:
        # Functions that are not written in Python may have no signature.
        pass


def _error(name: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem("run.callbacks", name, rule, remedy))
