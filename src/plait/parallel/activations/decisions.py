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

from plait.parallel.activations.selective import recompute_everything

Result = TypeVar("Result")

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""`context_fn` of `torch.utils.checkpoint`.

It returns the context managers around the forward of one call of a block and around its
recomputations.
"""


def decide_once(decide: Callable[[], Result]) -> Result:
    """Return `decide()`, or in a recomputation the value that it returned in the original forward.

    A block must make the same calls in the same order in its forward and in its recomputation.
    Without recomputation this function only calls `decide`.
    """
    current = _CURRENT.get()
    if isinstance(current, _Replay):
        return next(current.decisions)
    if current is None:
        return decide()
    # Selective recomputation stores results of operators by their order, and the recomputation does
    # not call the operators of `decide`.
    with recompute_everything():
        result = decide()
    current.decisions.append(result)
    return result


def contexts(inner: ContextFn | None) -> ContextFn:
    """Return a `context_fn` that records the decisions of a forward and replays them.

    Args:
        inner: Another `context_fn`, whose contexts are entered too.
    """

    def make_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        decisions: list[Any] = []
        forward: AbstractContextManager[Any] = nullcontext()
        recomputation: AbstractContextManager[Any] = nullcontext()
        if inner is not None:
            forward, recomputation = inner()
        recording = _DecisionContext(lambda: _Recording(decisions), forward)
        replay = _DecisionContext(lambda: _Replay(iter(decisions)), recomputation)
        return recording, replay

    return make_contexts


@dataclass(frozen=True)
class _Recording:
    """State of a forward: its decisions so far."""

    decisions: list[Any]


@dataclass(frozen=True)
class _Replay:
    """State of a recomputation: the decisions that it has not read yet."""

    decisions: Iterator[Any]


_CURRENT: ContextVar[_Recording | _Replay | None] = ContextVar("the block that runs", default=None)


@dataclass
class _DecisionContext:
    """Context manager that can be entered several times, once for each recomputation.

    Every recomputation reads the decisions from the first one on.
    """

    begin: Callable[[], _Recording | _Replay]
    inner: AbstractContextManager[Any]
    _exits: list[ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.inner)
            stack.callback(_CURRENT.reset, _CURRENT.set(self.begin()))
            self._exits.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._exits.pop().__exit__(*error)
