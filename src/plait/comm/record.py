"""Bytes that collectives send, for traffic counters.

Traffic counters (in `engine.single_rank` and in tests) are dispatch modes that call `call_of` for
every operator. To report data that moves without a collective of torch, `record` calls an operator
that has no effect. The call takes about 3 microseconds outside of a dispatch mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait._torch.groups import process_group_of
from plait._torch.operators import operator_name, tree_leaves


def _do_nothing(kind: str, full_bytes: int, dtype: torch.dtype, ranks: int) -> None:
    """Implement `plait::collective`, an operator that exists only for dispatch modes."""


_LIBRARY = torch.library.Library("plait", "FRAGMENT")
_LIBRARY.define("collective(str kind, int full_bytes, ScalarType dtype, int ranks) -> ()")
_LIBRARY.impl("collective", _do_nothing, "CompositeExplicitAutograd")


def record(kind: str, *, full_bytes: int, dtype: torch.dtype, ranks: int) -> None:
    """Report a collective that bypasses torch to the traffic counters of this rank.

    Args:
        kind: `all_gather`, `reduce_scatter` or `all_reduce`.
        full_bytes: Size of the full tensor.
        dtype: Dtype of the tensor.
        ranks: Number of ranks that take part.
    """
    torch.ops.plait.collective.default(kind, full_bytes, dtype, ranks)


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
"""Kind of each collective operator, and the index of the argument with the full tensor.

The index -1 means that the first argument is a shard, and the full tensor has one per rank.
"""
_SILENT_OPERATORS = {
    "c10d.barrier",
    "c10d.recv_",
    "c10d.monitored_barrier_",
    "_c10d_functional.wait_tensor",
    "_c10d_functional._wrap_tensor_autograd",
}
"""Operators of the communication libraries that send no data."""


@dataclass(frozen=True)
class Call:
    """Call of a collective, as traffic counters count it.

    Attributes:
        kind: Kind of the collective, for example `all_gather`. `control` is a small all-reduce with
            which ranks agree on a step.
        full_bytes: Size of the full tensor.
        dtype: Dtype of the tensor.
        ranks: Number of ranks of the group.
    """

    kind: str
    full_bytes: int
    dtype: torch.dtype
    ranks: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends if the collective runs as a ring."""
        if self.kind in ("send", "broadcast"):
            return float(self.full_bytes)
        # An all-reduce is a reduce-scatter and an all-gather.
        rounds = 2 if self.kind in ("all_reduce", "control") else 1
        return rounds * self.full_bytes * (self.ranks - 1) / self.ranks


def call_of(func: Any, args: tuple[Any, ...]) -> Call | None:
    """Return the call of a collective that an operator makes, or None.

    Args:
        func: Operator, as a dispatch mode receives it.
        args: Positional arguments of the operator.

    Returns:
        The call, or None if the operator is not a collective or sends no data.

    Raises:
        NotImplementedError: The collective is unknown, so its bytes cannot be counted.
    """
    if func.namespace == "plait":
        return Call(*args)
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = f"{func.namespace}.{operator_name(func)}"
    if name in _SILENT_OPERATORS:
        return None
    if name not in _OPERATORS:
        raise NotImplementedError(
            f"the traffic counter does not know the collective {name}; add it to _OPERATORS"
        )

    kind, index = _OPERATORS[name]
    ranks = process_group_of(args).size()
    tensors = [leaf for leaf in tree_leaves(args[max(index, 0)]) if isinstance(leaf, torch.Tensor)]
    full_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if index == -1:
        full_bytes *= ranks

    if kind == "all_reduce":
        # A step agrees on one or two scalars (weights, norms, losses) or on flags of one byte.
        # Gradients are larger and never bytes.
        is_flag = tensors[0].dtype == torch.uint8
        if is_flag or sum(tensor.numel() for tensor in tensors) <= 2:
            kind = "control"
    return Call(kind, full_bytes, tensors[0].dtype, ranks)
