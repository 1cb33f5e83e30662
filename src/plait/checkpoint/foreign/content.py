"""Contents of another library's checkpoint, and its conversion to a Plait checkpoint.

Tensors are assembled one at a time, when they are written.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
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
from plait.sizes import dtype_name


@dataclass(frozen=True)
class LazyTensor:
    """Tensor that is assembled when it is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    assemble: Callable[[], torch.Tensor]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> LazyTensor:
        """Return a `LazyTensor` for an existing tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def __call__(self) -> torch.Tensor:
        tensor = self.assemble().detach().reshape(self.shape).to(self.dtype).contiguous()
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
            return tensor
        # A view would keep all of its storage in memory.
        return tensor.clone()


@dataclass
class ForeignCheckpoint:
    """Contents of one checkpoint of another library."""

    kind: str
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    """Tensors by `model.<name>` and `optimizer.state.<name>.<key>`."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Parameter groups: the names of their parameters in `params`, and their values."""
    optimizer: str = "torch.optim.AdamW"
    steps: int = 0
    skipped: int = 0
    client_state: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Descriptions of contents that are not imported."""


class _AssembledTensors(UserDict[str, Any]):
    """Dictionary of `LazyTensor` that assembles a tensor at each access."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.data[name]()
        return tensor


def slice_of_parts(parts: Sequence[torch.Tensor], start: int, length: int) -> torch.Tensor:
    """Return a slice of the concatenation of flattened tensors without concatenating all of them.

    Args:
        parts: Tensors of any shapes.
        start: Index of the first element in the concatenation.
        length: Number of elements.

    Raises:
        CheckpointError: The tensors have too few elements.
    """
    slices = []
    missing = length
    for part in parts:
        if start < part.numel() and missing:
            elements = part.reshape(-1)[start : start + missing]
            slices.append(elements)
            missing -= elements.numel()
        start = max(0, start - part.numel())
    if missing:
        raise CheckpointError(
            f"a tensor of {length:,} elements lacks {missing:,} of them; the checkpoint is"
            " incomplete: copy it again"
        )
    return torch.cat(slices) if slices else torch.empty(0)


def save(checkpoint: ForeignCheckpoint, folder: Place, tag: str) -> Place:
    """Write the contents as a Plait checkpoint and return its folder. Raises CheckpointError."""
    records = {
        name: TensorRecord(dtype=dtype_name(tensor.dtype), shape=tensor.shape)
        for name, tensor in checkpoint.tensors.items()
    }
    metadata = {
        "global_steps": checkpoint.steps,
        "skipped_steps": checkpoint.skipped,
        "optimizer": {
            "type": checkpoint.optimizer,
            "groups": [_encode_group(group) for group in checkpoint.groups],
            "values": {},
            "extra": {},
        },
        "scheduler": None,
        "loss_scaler": None,
        "zero_stage": 0,
        "client_state": exact.encode(checkpoint.client_state, "client_state"),
    }
    return write(
        Snapshot(
            folder,
            tag,
            mesh=build_mesh(Layout()),
            tensors=_AssembledTensors(checkpoint.tensors),
            written=records,
            records=records,
            values={},
            metadata=metadata,
        )
    )


def _encode_group(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    current = exact.encode(values, "a parameter group")
    configured = dict(current)
    if "initial_lr" in configured:
        # Schedulers of torch store the configured rate there.
        configured["lr"] = configured.pop("initial_lr")
    return {"params": group["params"], "now": current, "configured": configured}
