"""Bytes on the wire by kind of collective, counted as torch dispatches them on this rank.

The count is that of a ring, whatever algorithm the backend uses: 2 (n-1)/n of a tensor for an
all-reduce and (n-1)/n for the others. It works on any backend, including the fake one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from plait._torch.operators import TorchDispatchMode
from plait.comm.record import Call, call_of


@dataclass
class Traffic:
    """Collectives of a block of code: `with count_traffic() as traffic: ...`."""

    calls: list[Call] = field(default_factory=list)

    def bytes(self):
        """Return the bytes that this rank sent, by kind.

        An all-to-all counts as the reduce-scatter that it implements.
        """
        sums: Counter[str] = Counter()
        for call in self.calls:
            kind = "reduce_scatter" if call.kind == "all_to_all" else call.kind
            sums[kind] += round(call.wire_bytes)
        return dict(sums)

    def dtypes(self, kind):
        """Return the dtypes of the tensors that collectives of a kind moved."""
        kinds = ("reduce_scatter", "all_to_all") if kind == "reduce_scatter" else (kind,)
        return {call.dtype for call in self.calls if call.kind in kinds}


class count_traffic(TorchDispatchMode):
    """Context manager that yields a Traffic and records every collective of this thread."""

    def __init__(self):
        super().__init__()
        self.traffic = Traffic()

    def __enter__(self):
        super().__enter__()
        return self.traffic

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensor dispatches its operators again on plain tensors, which are counted then.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        call = call_of(func, args)
        if call is not None:
            self.traffic.calls.append(call)
        return func(*args, **(kwargs or {}))
