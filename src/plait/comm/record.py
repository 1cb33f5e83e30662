"""The bytes that a dispatched operator sends, and an operator that records data which moves without
one of torch's collectives.

Counters of bytes (`engine.single_rank`, and those of tests) call `call_of` for every operator. The
recording operator does nothing; without a TorchDispatchMode it costs about 3 microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait._torch.groups import process_group_of
from plait._torch.operators import operator_name, tree_leaves

_LIBRARY = torch.library.Library("plait", "FRAGMENT")
_LIBRARY.define("collective(str kind, int full_bytes, ScalarType dtype, int ranks) -> ()")
_LIBRARY.impl(
    "collective", lambda kind, full_bytes, dtype, ranks: None, "CompositeExplicitAutograd"
)


def record(kind: str, *, full_bytes: int, dtype: torch.dtype, ranks: int) -> None:
    """Record that this rank took part in a collective of `kind` (`all_gather`, `reduce_scatter`,
    `all_reduce`) over `ranks` ranks, whose full tensor has `full_bytes`.
    """
    torch.ops.plait.collective.default(kind, full_bytes, dtype, ranks)


# Operator to (kind, index of the argument that is the full tensor). `-1`: the second argument times
# the group's size.
_OPERATORS: dict[str, tuple[str, int]] = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.alltoall_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.send": ("send", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
}
_SILENT = {
    "c10d.barrier",
    "c10d.recv_",
    "c10d.monitored_barrier_",
    "_c10d_functional.wait_tensor",
    "_c10d_functional._wrap_tensor_autograd",
}


@dataclass(frozen=True)
class Call:
    """One collective: its kind, the bytes of the full tensor, dtype, ranks, and the bytes that this
    rank sends.
    """

    kind: str
    full_bytes: int
    dtype: torch.dtype
    ranks: int

    @property
    def wire_bytes(self) -> float:
        """Bytes sent by this rank in a ring."""
        if self.kind in ("send", "broadcast"):
            return float(self.full_bytes)
        passes = 2 if self.kind in ("all_reduce", "control") else 1
        return passes * self.full_bytes * (self.ranks - 1) / self.ranks


def call_of(func: Any, args: tuple[Any, ...]) -> Call | None:
    """What an operator sends; None for one that is no collective, or only waits. Raises
    NotImplementedError for an unknown collective.
    """
    if func.namespace == "plait":
        return Call(*args)
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = f"{func.namespace}.{operator_name(func)}"
    if name in _SILENT:
        return None
    if name not in _OPERATORS:
        raise NotImplementedError(
            f"{name} is a collective that the traffic counter does not know; add it to its table"
        )
    kind, index = _OPERATORS[name]
    ranks = process_group_of(args).size()
    tensors = [leaf for leaf in tree_leaves(args[max(index, 0)]) if isinstance(leaf, torch.Tensor)]
    full = sum(t.numel() * t.element_size() for t in tensors) * (ranks if index == -1 else 1)
    # What a step agrees on: one or two scalars (weights, norms, losses) or flags. Gradients are
    # larger, and never bytes.
    if kind == "all_reduce" and (
        tensors[0].dtype == torch.uint8 or sum(t.numel() for t in tensors) <= 2
    ):
        kind = "control"
    return Call(kind, full, tensors[0].dtype, ranks)
