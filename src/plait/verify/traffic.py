"""Bytes on the wire, counted where they leave: every collective that torch dispatches on this rank, by kind.

A ring moves 2 (n-1)/n of a tensor for an all-reduce and (n-1)/n for the others; that is what is counted, whatever algorithm the backend
takes. Works on any backend, the fake one included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plait._torch import TorchDispatchMode, group_of, tree_leaves

# Operator to (kind, index of the argument that is the full tensor). `-1`: the second argument times the group's size.
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
    """One collective: its kind, the bytes of the full tensor, dtype, ranks, and the bytes that this rank sends."""

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


@dataclass
class Traffic:
    """What a block of code sent: `with count_traffic() as traffic: ...`."""

    calls: list[Call] = field(default_factory=list)

    def bytes(self) -> dict[str, int]:
        """Kind to bytes sent by this rank. All-to-all is counted as the reduce-scatter that it carries out."""
        sums: Counter[str] = Counter()
        for call in self.calls:
            sums["reduce_scatter" if call.kind == "all_to_all" else call.kind] += round(call.wire_bytes)
        return dict(sums)

    def dtypes(self, kind: str) -> set[torch.dtype]:
        """The dtypes that collectives of a kind were called with."""
        kinds = ("reduce_scatter", "all_to_all") if kind == "reduce_scatter" else (kind,)
        return {call.dtype for call in self.calls if call.kind in kinds}


class count_traffic(TorchDispatchMode):
    """Context manager that yields a Traffic and records every collective of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __enter__(self) -> Traffic:
        super().__enter__()
        return self.traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Note collectives, run everything as it is. DTensor first turns its operators into plain ones."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "plait":  # what moved without torch's collectives, see plait.comm.record
            self.traffic.calls.append(Call(*args))
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._note(f"{func.namespace}.{func._opname}", args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _SILENT:
            return
        if name not in _OPERATORS:
            raise NotImplementedError(f"{name} is a collective that the traffic counter does not know; add it to its table")
        kind, index = _OPERATORS[name]
        ranks = group_of(args)
        tensors = [leaf for leaf in tree_leaves(args[max(index, 0)]) if isinstance(leaf, torch.Tensor)]
        full = sum(t.numel() * t.element_size() for t in tensors) * (ranks if index == -1 else 1)
        # What a step agrees on: one or two scalars (weights, norms, losses) or flags. Gradients are larger, and never bytes.
        if kind == "all_reduce" and (tensors[0].dtype == torch.uint8 or sum(t.numel() for t in tensors) <= 2):
            kind = "control"
        self.traffic.calls.append(Call(kind, full, tensors[0].dtype, ranks))
