"""Reuse of decisions of a block's forward in its recomputation.

A forward may have to read a number from the device, such as how many tokens go to each expert. The
recomputation would wait for the device again, and could decide differently. It reads the decision
that the forward recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plait.parallel.activations.selective import keeping_nothing

Result = TypeVar("Result")
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""`context_fn` of `torch.utils.checkpoint`: returns the context managers around the forward of one
call of a block and around its recomputations.
"""


@dataclass(frozen=True)
class Deciding:
    """Note of `Parts` which says that blocks of the model call `decided_once`."""


def decided_once(decide: Callable[[], Result]) -> Result:
    """Return `decide()`, or in a recomputation the value that it returned in the original forward.

    A block must make the same calls in the same order in its forward and in its recomputation.
    Without recomputation this function only calls `decide`.
    """
    current = _CURRENT.get()
    if isinstance(current, _Reading):
        return next(current.decisions)
    if current is None:
        return decide()
    # Selective recomputation stores results of operators by their order, and the recomputation does
    # not call the operators of `decide`.
    with keeping_nothing():
        result = decide()
    current.decisions.append(result)
    return result


def contexts(inner: ContextFn | None) -> ContextFn:
    """Return `inner` extended by contexts that record the decisions of a forward and read them
    again.
    """

    def pair() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        decisions: list[Any] = []
        forward: AbstractContextManager[Any] = nullcontext()
        recomputation: AbstractContextManager[Any] = nullcontext()
        if inner is not None:
            forward, recomputation = inner()
        recording = _Inside(lambda: _Recording(decisions), forward)
        reading = _Inside(lambda: _Reading(iter(decisions)), recomputation)
        return recording, reading

    return pair


@dataclass(frozen=True)
class _Recording:
    decisions: list[Any]


@dataclass(frozen=True)
class _Reading:
    decisions: Iterator[Any]


_CURRENT: ContextVar[_Recording | _Reading | None] = ContextVar("the block that runs", default=None)


@dataclass
class _Inside:
    """Context manager that can be entered several times, once for each recomputation.

    Every recomputation reads the decisions from the first one on.
    """

    begin: Callable[[], _Recording | _Reading]
    inner: AbstractContextManager[Any]
    _exits: list[ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.inner)
            stack.callback(_CURRENT.reset, _CURRENT.set(self.begin()))
            self._exits.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._exits.pop().__exit__(*error)
