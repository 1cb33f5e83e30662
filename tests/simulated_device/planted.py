"""A module of the package changed in a running process: what `tools/planted_waits` plants, without the seconds that another start costs.

Functions are changed in place, by their code, so that all who imported them by name call the changed ones. Code at the top of a module,
and what a decorator made of a function without keeping it (`functools.cache` keeps it), cannot be changed so and is refused.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType

import plait

PACKAGE = Path(plait.__file__).parent
REACHED = "_reached_by_a_test"
"""What changed code may call with a name; `reached` has the names then."""

reached: set[str] = set()


@contextmanager
def changed(sources):
    """Modules of the package, by their file's path in it, have these sources inside."""
    with ExitStack() as put_back:
        for file, source in sources.items():
            put_back.enter_context(_changed(file, source))
        yield


@contextmanager
def _changed(file, source):
    path = PACKAGE / file
    module = importlib.import_module(".".join(["plait", *Path(file).with_suffix("").parts]))
    setattr(module, REACHED, reached.add)
    before = _functions(compile(path.read_text(encoding="utf-8"), str(path), "exec"))
    after = _functions(compile(source, str(path), "exec"))
    if list(before) != list(after):
        raise ValueError(
            f"{file}: the changed source has other functions: {set(before) ^ set(after)}"
        )
    due = {
        (before[key].co_qualname, before[key].co_firstlineno): after[key]
        for key in before
        if not _alike(before[key], after[key])
    }
    put: list[tuple[FunctionType, CodeType]] = []
    for function in _of(module):
        code = due.pop((function.__code__.co_qualname, function.__code__.co_firstlineno), None)
        if code is not None:
            put.append((function, function.__code__))
            function.__code__ = code
    try:
        if due:
            raise ValueError(f"{file}: not found in the running process: {sorted(due)}")
        yield
    finally:
        for function, code in put:
            function.__code__ = code
        delattr(module, REACHED)


def _functions(module):
    """Of a module and its classes, by name and number among equal names; those within functions belong to these."""
    found: dict[tuple[str, int], CodeType] = {}

    def look(code):
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                if constant.co_flags & 0x0002:  # CO_NEWLOCALS: a function, not the body of a class
                    number = sum(name == constant.co_qualname for name, _ in found)
                    found[constant.co_qualname, number] = constant
                else:
                    look(constant)

    look(module)
    return found


def _alike(one, other):
    """Whether they do the same; lines may differ."""
    if (
        one.co_code != other.co_code
        or one.co_names != other.co_names
        or len(one.co_consts) != len(other.co_consts)
    ):
        return False
    return all(
        _alike(mine, theirs)
        if isinstance(mine, CodeType) and isinstance(theirs, CodeType)
        else mine == theirs
        for mine, theirs in zip(one.co_consts, other.co_consts, strict=True)
    )


def _of(module):
    """Functions written in it."""
    seen: set[int] = set()

    def look(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if value.__code__.co_filename == module.__file__:
                yield value
            if hasattr(value, "__wrapped__"):
                yield from look(value.__wrapped__)
        elif isinstance(value, staticmethod | classmethod):
            yield from look(value.__func__)
        elif isinstance(value, property):
            for part in (value.fget, value.fset, value.fdel):
                yield from look(part)
        elif isinstance(value, cached_property):
            yield from look(value.func)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner in list(vars(value).values()):
                yield from look(inner)
        elif hasattr(value, "__wrapped__") and not isinstance(value, type):
            yield from look(value.__wrapped__)

    for value in list(vars(sys.modules[module.__name__]).values()):
        yield from look(value)
