"""Results of a block's forward that its recomputation reuses.

Selective recomputation keeps the results of chosen operators during the forward. The recomputation
returns them instead of calling the operators. torch's `create_selective_checkpoint_contexts` is not
used: it returns a wrong value if something writes into a kept result through another view (as the
in-place all-reduce after a row-split matrix product does), and it gives later dropout another mask
if a kept operator draws random numbers. Here a result that is written into is dropped and
recomputed, and the generator is set to the state in which the kept operator left it.

Decisions are reused as well (`decide_once`). A forward may have to read a number from the device,
such as how many tokens go to each expert. The recomputation would wait for the device again, and
could decide differently. It reads the decision that the forward recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from plait._torch.operators import (
    TorchDispatchMode,
    operator_named,
    schema_of,
    tree_leaves,
    tree_map,
)
from plait._torch.tensors import memory_key
from plait.cluster import accelerator
from plait.errors import ConfigError, Problem

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
    ),
    "matmul": ("aten.mm", "aten.addmm", "aten.linear"),
}
"""Names that stand for several operators.

`matmul` stands for products with weights. It does not include products of activations (`aten.bmm`),
because their results, such as attention scores, are much larger.
"""


EVERY_SECOND = "every_second_matmul"
"""Name of the matrix products with weights that come first, third, fifth ... in a block.

Keeping them saves half of the arithmetic for half of the memory.
"""


DEFAULT_KEEP = ("attention", EVERY_SECOND)
"""Operators whose results are kept by default."""


_KEEPS_NOTHING = ContextVar("nothing is kept", default=False)


Result = TypeVar("Result")


ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""`context_fn` of `torch.utils.checkpoint`.

It returns the context managers around the forward of one call of a block and around its
recomputations.
"""


_DECISIONS: ContextVar[list[Any] | Iterator[Any] | None] = ContextVar("decisions", default=None)
"""Decisions of the block that is running.

In a forward it is the list of its decisions so far, in a recomputation an iterator over those that
it has not read yet.
"""


@dataclass(frozen=True)
class KeptOperators:
    """Operators (`OpOverloadPacket`) whose results are kept.

    Attributes:
        always: Operators of which every call is kept.
        alternating: Operators of which every second call is kept, starting with the first. The
            calls of all these operators are counted together.
    """

    always: frozenset[Any]
    alternating: frozenset[Any]


def kept_operators(names: Sequence[str]) -> KeptOperators:
    """Return the operators of a user's list.

    Args:
        names: Names of groups, `every_second_matmul`, or operators such as `aten.mm`.

    Raises:
        ConfigError: torch has no such operator.
    """
    always: set[Any] = set()
    alternating: set[Any] = set()
    for name in names:
        if name == EVERY_SECOND:
            alternating |= _operators(GROUPS["matmul"])
        elif name in GROUPS:
            always |= _operators(GROUPS[name])
        else:
            operator = operator_named(name)
            if operator is None:
                known = ", ".join((*GROUPS, EVERY_SECOND))
                raise ConfigError(
                    Problem(
                        "parallel.recompute.keep",
                        name,
                        "torch has no such operator",
                        f"use {known} or a name like aten.mm",
                    )
                )
            always.add(operator)
    return KeptOperators(frozenset(always), frozenset(alternating - always))


def _operators(names: Sequence[str]) -> set[Any]:
    """Return the operators of a group that exist in this torch release."""
    return {operator_named(name) for name in names} - {None}


def selective_contexts(operators: KeptOperators) -> Callable[[], tuple[Any, Any]]:
    """Return a `context_fn` for torch's checkpoint that keeps the results of operators."""

    def make_contexts() -> tuple[Any, Any]:
        calls = _KeptCalls(operators)
        return _KeepResults(calls), _ReuseResults(calls)

    return make_contexts


@dataclass
class _KeptCalls:
    """Kept calls of one forward of a block, in order. A recomputation makes the same calls."""

    operators: KeptOperators
    results: list[_CallResult] = field(default_factory=list)

    def counter(self) -> Callable[[Any], bool]:
        """Return a function that is called with each operator and tells if the call is kept."""
        count = 0

        def is_kept(operator: Any) -> bool:
            nonlocal count
            if _KEEPS_NOTHING.get():
                return False
            packet = operator.overloadpacket
            if packet in self.operators.alternating:
                count += 1
                return count % 2 == 1
            return packet in self.operators.always

        return is_kept


@dataclass
class _CallResult:
    """Result of a kept call.

    Attributes:
        value: Returned value, or None after something wrote into it.
        generator_state: State of the generator after the call, if the operator draws from one.
        device: Device of the result.
    """

    value: Any
    generator_state: torch.Tensor | None = None
    device: torch.device | None = None


class _KeepResults(TorchDispatchMode):
    """Dispatch mode for the forward. It keeps the results of chosen calls."""

    def __init__(self, calls: _KeptCalls) -> None:
        super().__init__()
        self._calls = calls
        self._is_kept = calls.counter()
        self._by_storage: dict[int, list[_CallResult]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A result that something writes into later must not be returned by the recomputation.
        for tensor in _written_tensors(func, args, kwargs or {}):
            for result in self._by_storage.pop(memory_key(tensor), ()):
                result.value = None
        if not self._is_kept(func):
            return out

        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        result = _CallResult(_detach(out))
        if tensors:
            result.device = tensors[0].device
        if torch.Tag.nondeterministic_seeded in func.tags:
            result.generator_state = _generator(result.device).get_state()
        self._calls.results.append(result)
        for tensor in tensors:
            self._by_storage.setdefault(memory_key(tensor), []).append(result)
        return out


class _ReuseResults(TorchDispatchMode):
    """Dispatch mode for the recomputation. It returns kept results instead of computing them."""

    def __init__(self, calls: _KeptCalls) -> None:
        super().__init__()
        self._calls = calls

    def __enter__(self) -> Any:
        # A block may be recomputed more than once.
        self._is_kept = self._calls.counter()
        self._results = iter(self._calls.results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_kept(func):
            return func(*args, **(kwargs or {}))
        result = next(self._results)
        if result.value is None:
            return func(*args, **(kwargs or {}))
        # Later operators that are recomputed draw the same numbers as in the forward.
        if result.generator_state is not None:
            _generator(result.device).set_state(result.generator_state)
        return _detach(result.value)


def _detach(value: Any) -> Any:
    """Return the same values without their autograd graph, which would stay alive with them."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call wrote to."""
    # The schemas of collectives do not say which tensors they write.
    if func.namespace in ("c10d", "_c10d_functional"):
        yield from (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return
    if not schema_of(func).is_mutable:
        return
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _generator(device: torch.device | None) -> torch.Generator:
    if device is not None and accelerator.is_accelerator(device):
        return accelerator.generator(device)
    return torch.default_generator


@contextmanager
def recompute_everything() -> Iterator[None]:
    """Recompute all operators inside the context, even those in the kept list."""
    token = _KEEPS_NOTHING.set(True)
    try:
        yield
    finally:
        _KEEPS_NOTHING.reset(token)


def recording_contexts(inner: ContextFn | None) -> ContextFn:
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
        return (
            _DecisionContext(lambda: decisions, forward),
            _DecisionContext(lambda: iter(decisions), recomputation),
        )

    return make_contexts


@dataclass
class _DecisionContext:
    """Context manager that can be entered several times, once for each recomputation.

    Every recomputation reads all decisions again, starting with the first.
    """

    begin: Callable[[], list[Any] | Iterator[Any]]
    inner: AbstractContextManager[Any]
    _exits: list[ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.inner)
            stack.callback(_DECISIONS.reset, _DECISIONS.set(self.begin()))
            self._exits.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._exits.pop().__exit__(*error)


def decide_once(decide: Callable[[], Result]) -> Result:
    """Return `decide()`. A recomputation returns the value of the original forward instead.

    A block must make the same calls in the same order in its forward and in its recomputation.
    Without recomputation this function only calls `decide`.
    """
    decisions = _DECISIONS.get()
    if decisions is None:
        return decide()
    if not isinstance(decisions, list):
        return next(decisions)
    # Selective recomputation stores results of operators by their order, and the recomputation does
    # not call the operators of `decide`.
    with recompute_everything():
        result = decide()
    decisions.append(result)
    return result
