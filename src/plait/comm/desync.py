"""Debug mode of collectives: ranks compare a collective before it starts.

Ranks that issue collectives in another order or with other shapes would hang, or compute wrong
numbers if the shapes agree. In this mode each rank puts the operation, the shapes, the dtypes and
the place in the code into the store of the default group, and reads those of other ranks. Two calls
from different lines are different collectives even if the shapes agree. The mode costs some
messages per collective, and Python code for every operator.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from plait._torch.groups import default_store, process_group_of, timeout_of
from plait._torch.operators import TorchDispatchMode, operator_name, tree_leaves
from plait.comm.board import Wait, describe_tensor
from plait.comm.stacks import is_library
from plait.comm.watch import WATCH, users_line
from plait.errors import CommunicationError

_UNCOMPARED = (
    "send",
    "recv_",
    "recv_any_source_",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "monitored_barrier_",
)
"""Operators that not all ranks of the group call, or that do not communicate."""
_MOST_SHAPES = 4
"""Number of tensors of a call that are described."""
_STORED_CALLS = 2
"""Number of descriptions per group and rank that stay in the store."""


@dataclass(frozen=True)
class _ComparedCall:
    """A collective that is about to start on this rank.

    Attributes:
        group: Name of the process group.
        number: Number of the collective in its group.
        ranks: Global ranks of the group.
        rank: This process's rank in the group.
        description: Operation, shapes, line of user code, and callers. Equal on all ranks.
        wait: Entry of the board while ranks are compared.
    """

    group: str
    number: int
    ranks: list[int]
    rank: int
    description: dict[str, str]
    wait: Wait

    def key(self, rank: int, *, number: int | None = None) -> str:
        """Return the key of a rank's description in the store."""
        return f"plait-check/{self.group}/{number or self.number}/{rank}"


class ComparedCollectives(TorchDispatchMode):
    """Dispatch mode in which the collectives of this thread are compared.

    All ranks must enter it, or none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._store = default_store()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compare a collective and run the operator unchanged."""
        # DTensor turns its operators into plain ones, which are dispatched here again.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = operator_name(func)
        if func.namespace in ("c10d", "_c10d_functional") and name not in _UNCOMPARED:
            self._compare(name, args)
        return func(*args, **(kwargs or {}))

    def _compare(self, operation: str, args: tuple[Any, ...]) -> None:
        group = process_group_of(args)
        if group.size() == 1:
            return
        name = group.group_name
        self._counts[name] += 1
        number = self._counts[name]
        ranks = dist.get_process_group_ranks(group)
        operation = operation.strip("_")
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        shapes = " and ".join(
            describe_tensor(tensor.shape, tensor.dtype) for tensor in tensors[:_MOST_SHAPES]
        )
        caller = sys._getframe(2)
        call = _ComparedCall(
            name,
            number,
            ranks,
            group.rank(),
            description={
                "call": f"{operation} of {shapes}",
                "line": users_line(caller),
                "callers": _callers(caller),
            },
            wait=Wait(
                operation, _axis(group), time.monotonic(), number, shapes, None, tuple(ranks)
            ),
        )

        self._store.set(call.key(call.rank), json.dumps(call.description))
        if number > _STORED_CALLS:
            self._store.delete_key(call.key(call.rank, number=number - _STORED_CALLS))
        # The first rank compares itself with all others, and the others with the first. Both sides
        # of a difference then raise an error.
        others = range(1, group.size()) if call.rank == 0 else (0,)
        with WATCH.waiting(call.wait):
            for other in others:
                self._check_same(call, other)

    def _check_same(self, call: _ComparedCall, other: int) -> None:
        """Raise CommunicationError unless rank `other` of the group makes the same call."""
        key = call.key(other)
        this_rank = call.description
        world = dist.group.WORLD
        assert world is not None
        try:
            self._store.wait([key], timedelta(seconds=timeout_of(world)))
        except dist.DistStoreError as error:
            raise CommunicationError(
                f"{this_rank['call']} over {call.wait.axis}, number {call.number}, at"
                f" {this_rank['line']}: rank {call.ranks[other]} has not begun it."
                f" {WATCH.hang_cause}"
            ) from error

        theirs = json.loads(self._store.get(key))
        if theirs != this_rank:
            first, second = (
                f"rank {call.ranks[rank]} is at {description['line']} with {description['call']}"
                for rank, description in sorted([(call.rank, this_rank), (other, theirs)])
            )
            raise CommunicationError(
                f"collective {call.number} over {call.wait.axis} is not the same on all ranks:"
                f" {first}, {second}"
            )


def _axis(group: dist.ProcessGroup) -> str:
    if group is dist.group.WORLD:
        return "all ranks"
    return group.group_desc.removeprefix("mesh_")


def _callers(frame: Any) -> str:
    """Return the functions and lines of user and Plait code on the stack."""
    places = []
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(places)
