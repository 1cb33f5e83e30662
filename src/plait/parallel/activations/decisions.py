"""What the forward of a block decided, for its recomputation.

A forward may have to ask the device for a number that the program needs, such as how many tokens go to each expert. Its
recomputation would wait for the same number again. It takes what the forward noted instead, so both decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plait.parallel.activations.selective import keeping_nothing

Result = TypeVar("Result")
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""As torch's checkpoint takes it: makes what is around the forward of one call of a block, and around its recomputations."""


@dataclass(frozen=True)
class Deciding:
    """A note of `Parts`: blocks of the model call `decided_once`."""


def decided_once(decide: Callable[[], Result]) -> Result:
    """Return `decide()`, or in a recomputation what it returned in the forward that is recomputed.

    A block must make the same calls in both. Where nothing recomputes, this is `decide()`.
    """
    current = _CURRENT.get()
    if isinstance(current, _Reading):
        return next(current.noted)
    if current is None:
        return decide()
    # Selective recomputation would look for the results of operators that the recomputation does not call.
    with keeping_nothing():
        result = decide()
    current.noted.append(result)
    return result


def contexts(besides: ContextFn | None) -> ContextFn:
    """`besides`, with which decisions are noted and read."""

    def pair() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        noted: list[Any] = []
        forward, recomputation = besides() if besides is not None else (None, None)
        return _Inside(lambda: _Noting(noted), forward), _Inside(lambda: _Reading(iter(noted)), recomputation)

    return pair


@dataclass(frozen=True)
class _Noting:
    noted: list[Any]


@dataclass(frozen=True)
class _Reading:
    noted: Iterator[Any]


_CURRENT: ContextVar[_Noting | _Reading | None] = ContextVar("the block that runs", default=None)


@dataclass
class _Inside:
    """Entered again for every recomputation, which reads from the first decision on."""

    begin: Callable[[], _Noting | _Reading]
    besides: AbstractContextManager[Any] | None
    _exits: list[ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            if self.besides is not None:
                stack.enter_context(self.besides)
            stack.callback(_CURRENT.reset, _CURRENT.set(self.begin()))
            self._exits.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._exits.pop().__exit__(*error)
