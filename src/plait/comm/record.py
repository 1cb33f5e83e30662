"""A mark in torch's stream of operators for data that moves without one of torch's collectives, so that whoever counts bytes sees it.

The operator does nothing. A TorchDispatchMode (`verify.traffic`) finds it beside the collectives, in order; without one it costs about
3 microseconds.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("plait", "FRAGMENT")
_LIBRARY.define("collective(str kind, int full_bytes, ScalarType dtype, int ranks) -> ()")
_LIBRARY.impl("collective", lambda kind, full_bytes, dtype, ranks: None, "CompositeExplicitAutograd")


def record(kind: str, *, full_bytes: int, dtype: torch.dtype, ranks: int) -> None:
    """Say that this rank took part in a collective of `kind` (`all_gather`, `reduce_scatter`, `all_reduce`) over `ranks` ranks, whose whole
    tensor has `full_bytes`."""
    torch.ops.plait.collective.default(kind, full_bytes, dtype, ranks)
