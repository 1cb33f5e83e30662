"""The debug mode of collectives: before one begins, its ranks compare what each of them is about to
do.

Ranks that issue collectives in another order, or with other shapes, would hang, or get wrong
numbers where shapes agree. Here each rank puts operation, shapes, dtypes and the place in the code
into the store of the default group, and reads those of the others. Two calls from different lines
are different collectives, even of one shape. It costs some messages a collective, and Python for
every operator.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from plait._torch.groups import default_store, process_group_of, timeout_of
from plait._torch.operators import TorchDispatchMode, operator_name, tree_leaves
from plait.comm.board import Wait, described
from plait.comm.stacks import is_library
from plait.comm.watch import WATCH, users_line
from plait.errors import CommunicationError

_MESSAGES = (
    "send",
    "recv_",
    "recv_any_source_",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "monitored_barrier_",
)
_KEPT = 2
"""Descriptions in the store, of each group and rank."""


class ComparedCollectives(TorchDispatchMode):
    """While it is entered, the collectives of this thread are compared. Of all ranks, or of
    none.
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
        """Compare collectives, run everything as it is. DTensor first turns its operators into
        plain ones.
        """
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and operator_name(func) not in _MESSAGES:
            self._compare(operator_name(func), args)
        return func(*args, **(kwargs or {}))

    def _compare(self, operation: str, args: tuple[Any, ...]) -> None:
        group = process_group_of(args)
        if group.size() == 1:
            return
        name = group.group_name
        self._counts[name] += 1
        number = self._counts[name]
        ranks = dist.get_process_group_ranks(group)
        rank = group.rank()
        frame = sys._getframe(2)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        shapes = " and ".join(described(tensor.shape, tensor.dtype) for tensor in tensors[:4])
        mine = {
            "what": f"{operation.strip('_')} of {shapes}",
            "line": users_line(frame),
            "from": _places(frame),
        }
        self._store.set(f"plait-check/{name}/{number}/{rank}", json.dumps(mine))
        if number > _KEPT:
            self._store.delete_key(f"plait-check/{name}/{number - _KEPT}/{rank}")
        wait = Wait(
            operation.strip("_"), _axis(group), time.monotonic(), number, shapes, None, tuple(ranks)
        )
        with WATCH.waiting(wait):
            # The first compares itself with all, the others with the first: then both sides of a
            # difference end with it.
            for other in range(group.size()) if rank == 0 else (0,):
                if other != rank:
                    self._same(name, number, mine, other, ranks, rank, wait)

    def _same(
        self,
        name: str,
        number: int,
        mine: dict[str, str],
        other: int,
        ranks: list[int],
        rank: int,
        wait: Wait,
    ) -> None:
        key = f"plait-check/{name}/{number}/{other}"
        world = dist.group.WORLD
        assert world is not None
        try:
            self._store.wait([key], timedelta(seconds=timeout_of(world)))
        except dist.DistStoreError as error:
            raise CommunicationError(
                f"{mine['what']} over {wait.axis}, number {number}, at {mine['line']}: rank"
                f" {ranks[other]} has not begun it. {WATCH.found}"
            ) from error
        theirs = json.loads(self._store.get(key))
        if theirs != mine:
            shown = [
                f"rank {ranks[at]} is at {said['line']} with {said['what']}"
                for at, said in sorted([(rank, mine), (other, theirs)])
            ]
            raise CommunicationError(
                f"collective {number} over {wait.axis} is not the same on all ranks: {shown[0]},"
                f" {shown[1]}"
            )


def _axis(group: dist.ProcessGroup) -> str:
    return "all ranks" if group is dist.group.WORLD else group.group_desc.removeprefix("mesh_")


def _places(frame: Any) -> str:
    """The lines that led here, of the user's code and Plait's."""
    found = []
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(found)
