"""Selective recompute: during a block's forward the results of chosen operators are kept, during
its recomputation they are returned.

Not torch's `create_selective_checkpoint_contexts`: that one returns a wrong value where something
writes into a kept result through another view (the in-place all-reduce after a row-split matrix
product does), and it lets dropout drift where a kept operator draws random numbers. Here a result
that is written into is dropped and recomputed, and the generator is put where the kept operator
left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from plait._torch.operators import (
    TorchDispatchMode,
    operator_named,
    schema_of,
    tree_leaves,
    tree_map,
)
from plait._torch.storage import storage_id
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
"""Names for several operators. `matmul` are the products with weights; products of activations
(`aten.bmm`), which a softmax follows, are not among them: their results are the large ones.
"""
EVERY_SECOND = "every_second_matmul"
"""The matrix products with weights that come first, third, fifth ... in a block: half of the
arithmetic for half of the memory.
"""
DEFAULT = ("attention", EVERY_SECOND)


_NOTHING_IS_KEPT = ContextVar("nothing is kept", default=False)


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """For a part of a block that is recomputed whatever is kept of the rest."""
    token = _NOTHING_IS_KEPT.set(True)
    try:
        yield
    finally:
        _NOTHING_IS_KEPT.reset(token)


@dataclass(frozen=True)
class Kept:
    """Which operators' results are kept."""

    always: frozenset[Any]
    """Operators (`OpOverloadPacket`)."""
    alternating: frozenset[Any]
    """Operators of which every second call is kept, counted together, the first included."""


def kept(names: Sequence[str]) -> Kept:
    """From a user's list: names of groups, `every_second_matmul`, or operators as `aten.mm`. Raises
    ConfigError for an unknown one.
    """
    always: set[Any] = set()
    alternating: set[Any] = set()
    for name in names:
        if name == EVERY_SECOND:
            alternating |= _operators(GROUPS["matmul"])
        elif name in GROUPS:
            always |= _operators(GROUPS[name])
        else:
            found = operator_named(name)
            if found is None:
                known = ", ".join((*GROUPS, EVERY_SECOND))
                raise ConfigError(
                    Problem(
                        "parallel.recompute.keep",
                        name,
                        "torch has no such operator",
                        f"use {known} or a name like aten.mm",
                    )
                )
            always.add(found)
    return Kept(frozenset(always), frozenset(alternating - always))


def _operators(names: Sequence[str]) -> set[Any]:
    """Those that this torch has."""
    return {found for name in names if (found := operator_named(name)) is not None}


@dataclass
class _Result:
    """What one kept call returned. `value` is None once something wrote into it."""

    value: Any
    random: torch.Tensor | None
    """The generator after the call, where the operator draws from one."""
    device: torch.device | None


@dataclass
class _Calls:
    """The kept calls of one forward of one block, in order; the same forward repeated makes the
    same calls.
    """

    kept: Kept
    results: list[_Result] = field(default_factory=list)

    def asks(self) -> Callable[[Any], bool]:
        """A fresh counter: whether the call of an operator is one that is kept."""
        count = 0

        def is_kept(operator: Any) -> bool:
            nonlocal count
            if _NOTHING_IS_KEPT.get():
                return False
            packet = operator.overloadpacket
            if packet in self.kept.alternating:
                count += 1
                return count % 2 == 1
            return packet in self.kept.always

        return is_kept


class _Keep(TorchDispatchMode):
    """Around the forward."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls
        self._is_kept = calls.asks()
        self._by_storage: dict[int, list[_Result]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _written(func, args, kwargs or {}):
            for result in self._by_storage.pop(storage_id(tensor.untyped_storage()), ()):
                result.value = None
        if self._is_kept(func):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            device = next(
                (leaf.device for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), None
            )
            result = _Result(_detached(out), _generator_state(device) if draws else None, device)
            self._calls.results.append(result)
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._by_storage.setdefault(storage_id(leaf.untyped_storage()), []).append(
                        result
                    )
        return out


class _Reuse(TorchDispatchMode):
    """Around the recomputation."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __enter__(self) -> Any:
        self._is_kept = self._calls.asks()
        self._next = iter(self._calls.results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_kept(func):
            return func(*args, **(kwargs or {}))
        result = next(self._next)
        if result.value is None:
            return func(*args, **(kwargs or {}))
        if result.random is not None:
            _set_generator_state(result.device, result.random)
        return _detached(result.value)


def contexts(what: Kept) -> Callable[[], tuple[Any, Any]]:
    """`context_fn` of torch's checkpoint."""

    def pair() -> tuple[Any, Any]:
        calls = _Calls(what)
        return _Keep(calls), _Reuse(calls)

    return pair


def _detached(value: Any) -> Any:
    # Autograd makes the tensor that the operator returned part of its graph; what is kept must not
    # hold that graph.
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call wrote into. Collectives do not say it in their schema."""
    if func.namespace in ("c10d", "_c10d_functional"):
        yield from (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return
    if not schema_of(func).is_mutable:
        return
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))


def _generator_state(device: torch.device | None) -> torch.Tensor:
    return _generator(device).get_state()


def _set_generator_state(device: torch.device | None, state: torch.Tensor) -> None:
    _generator(device).set_state(state)


def _generator(device: torch.device | None) -> torch.Generator:
    return (
        accelerator.generator(device)
        if device is not None and accelerator.is_one(device)
        else torch.default_generator
    )
