"""The user's own functions of `run.callbacks`: they hear the events of a run, on every process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from plait.errors import ConfigError, Problem
from plait.events import Event
from plait.importing import NotImportable, module_of

if TYPE_CHECKING:
    from plait.engine.engine import Engine

Callback = Callable[[Event, "Engine"], object]
"""Called with an event and the engine. True ends the run after the next step, on all processes,
with a checkpoint.
"""


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """The functions of `package.module:name`, and an instance of each class. Raises ConfigError."""
    loaded: list[Callback] = []
    for name in names:
        found = _found(name)
        loaded.append(found() if isinstance(found, type) else found)
    return loaded


def check_callbacks(names: Sequence[str]) -> None:
    """Import them, and call nothing. Raises ConfigError for what cannot be found, made without
    arguments or called with (event, engine).
    """
    for name in names:
        _found(name)


def _found(name: str) -> Any:
    """A function, or a class whose instances are called. Modules of the current folder come first,
    as for `python -m`.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module, attribute = module_of(
            name, form="it is not package.module:name", example="my_callbacks:log"
        )
    except NotImportable as error:
        raise _problem(name, error.rule, error.remedy) from None
    found = getattr(module, attribute, None)
    if found is None:
        raise _problem(
            name,
            f"{module.__name__} has no {attribute!r}",
            "name a function of (event, engine), or a class whose instances are called so",
        )
    if inspect.isclass(found):
        _takes(found, 0, name, "the class is made without arguments", "give its arguments defaults")
        call = next(
            (vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None
        )
        _takes(
            call,
            3,
            name,
            "an instance is called with (event, engine)",
            "give the class a __call__ that takes these",
        )
    else:
        _takes(found, 2, name, "it is called with (event, engine)", "take these two arguments")
    return found


def _takes(function: Any, count: int, name: str, rule: str, remedy: str) -> None:
    if not callable(function):
        raise _problem(name, rule, remedy)
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise _problem(name, f"{rule} ({error})", remedy) from None
    except ValueError:  # it is not of Python and has no signature
        pass


def _problem(name: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem("run.callbacks", name, rule, remedy))
