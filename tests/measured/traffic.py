"""Bytes on the wire, counted where they leave: every collective that torch dispatches on this rank, by kind.

A ring moves 2 (n-1)/n of a tensor for an all-reduce and (n-1)/n for the others; that is what is counted, whatever algorithm the backend
takes. Works on any backend, the fake one included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from plait._torch.operators import TorchDispatchMode
from plait.comm.record import Call, call_of


@dataclass
class Traffic:
    """What a block of code sent: `with count_traffic() as traffic: ...`."""

    calls: list[Call] = field(default_factory=list)

    def bytes(self):
        """Kind to bytes sent by this rank. All-to-all is counted as the reduce-scatter that it carries out."""
        sums: Counter[str] = Counter()
        for call in self.calls:
            sums["reduce_scatter" if call.kind == "all_to_all" else call.kind] += round(
                call.wire_bytes
            )
        return dict(sums)

    def dtypes(self, kind):
        """The dtypes that collectives of a kind were called with."""
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
        """Note collectives, run everything as it is. DTensor first turns its operators into plain ones."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        call = call_of(func, args)
        if call is not None:
            self.traffic.calls.append(call)
        return func(*args, **(kwargs or {}))
