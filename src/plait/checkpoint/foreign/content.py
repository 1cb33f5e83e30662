"""What was found in another library's checkpoint, and writing it as one of Plait's; a tensor at a
time is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plait import exact
from plait.checkpoint.places import Place
from plait.checkpoint.save import Snapshot, write
from plait.checkpoint.windows import TensorRecord
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.errors import CheckpointError


@dataclass(frozen=True)
class Later:
    """A tensor that is put together when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Later:
        """Return an entry for a tensor that exists already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def __call__(self) -> torch.Tensor:
        made = self.make().detach().reshape(self.shape).to(self.dtype).contiguous()
        return (
            made.clone()
            if made.untyped_storage().nbytes() != made.numel() * made.element_size()
            else made
        )


@dataclass
class Foreign:
    """One checkpoint."""

    kind: str
    tensors: dict[str, Later] = field(default_factory=dict)
    """`model.<name>` and `optimizer.state.<name>.<key>`."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """`params` (names) and the values of each."""
    optimizer: str = "torch.optim.AdamW"
    steps: int = 0
    skipped: int = 0
    client_state: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """What is not taken over."""


class _Lazy(Mapping[str, torch.Tensor]):
    def __init__(self, found: Mapping[str, Later]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._found[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def of_parts(parts: Sequence[torch.Tensor], start: int, length: int) -> torch.Tensor:
    """`length` elements from `start` of tensors that are joined one after the other. Raises
    CheckpointError where they are too short.
    """
    found = []
    wanted = length
    for part in parts:
        if start < part.numel() and length:
            piece = part.reshape(-1)[start : start + length]
            found.append(piece)
            length -= piece.numel()
        start = max(0, start - part.numel())
    if length:
        raise CheckpointError(
            f"a tensor of {wanted:,} elements lacks {length:,} of them; the checkpoint is"
            " incomplete"
        )
    return torch.cat(found) if found else torch.empty(0)


def save(found: Foreign, folder: Place, tag: str) -> Place:
    """Write it. Raises CheckpointError."""
    records = {
        name: TensorRecord(dtype=str(later.dtype).removeprefix("torch."), shape=later.shape)
        for name, later in found.tensors.items()
    }
    groups = []
    for group in found.groups:
        values = exact.encode(
            {name: value for name, value in group.items() if name not in ("params", "param_names")},
            "a parameter group",
        )
        first = {**values, "lr": values["initial_lr"]} if "initial_lr" in values else values
        groups.append(
            {
                "params": group["params"],
                "now": values,
                "configured": {k: v for k, v in first.items() if k != "initial_lr"},
            }
        )
    metadata = {
        "global_steps": found.steps,
        "skipped_steps": found.skipped,
        "optimizer": {"type": found.optimizer, "groups": groups, "values": {}, "extra": {}},
        "scheduler": None,
        "loss_scaler": None,
        "zero_stage": 0,
        "client_state": exact.encode(found.client_state, "client_state"),
    }
    return write(
        Snapshot(
            folder, tag, build_mesh(Layout()), _Lazy(found.tensors), records, records, {}, metadata
        )
    )
