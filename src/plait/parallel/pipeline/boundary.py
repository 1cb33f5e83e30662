"""What passes from a stage to the next: how it is made of tensors, and what their shapes follow
from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait._torch.operators import tree_leaves, tree_map
from plait.errors import ModelError
from plait.parallel.containers import tensors_in
from plait.parallel.pipeline.stage_cache import StageCaches

Signature = tuple[Any, ...]
MASK = "attention_mask"


@dataclass(frozen=True)
class Slot:
    """Which of the tensors stands here."""

    index: int


@dataclass(frozen=True)
class Boundary:
    """What passes from a stage to the next."""

    structure: Any
    """A block's output, with a Slot in the place of every tensor."""
    tensors: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    """Shape, dtype, and whether a gradient is returned."""
    length: int
    """Length of the sequences where tensor parallelism splits them."""

    @property
    def differentiable(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the returned gradients."""
        return [(shape, dtype) for shape, dtype, needs in self.tensors if needs]

    def allows(self, other: Boundary) -> bool:
        """Whether the next stage, which knows this one, takes the other for what it is."""

        def plain(structure: Any) -> list[Any]:
            return [
                leaf
                for leaf in tree_leaves(structure)
                if isinstance(leaf, Slot | int | float | str | None)
            ]

        return (self.tensors, self.length) == (other.tensors, other.length) and plain(
            self.structure
        ) == plain(other.structure)

    def summary(self) -> str:
        """Shapes and dtypes, for a message."""
        return (
            ", ".join(
                f"{str(dtype).removeprefix('torch.')} {list(shape)}"
                for shape, dtype, _ in self.tensors
            )
            or "no tensor"
        )


class EarlierStageFailed(ModelError):
    """A stage has nothing to compute with, because one before it failed, which tells its error."""


def signature(piece: Any) -> Signature:
    """What the shapes between stages follow from. Those of single tokens do not follow from the
    mask over all tokens before them.
    """
    if has_cache(piece):
        piece = {
            key: entry
            for key, entry in piece.items()
            if key != MASK and not isinstance(entry, StageCaches)
        }
    tensors = [tensor for leaf in tree_leaves(piece) for tensor in tensors_in(leaf)]
    return (torch.is_grad_enabled(), *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def has_cache(piece: Any) -> bool:
    """Whether a micro-batch comes with what stages keep of earlier tokens."""
    return isinstance(piece, Mapping) and any(
        isinstance(entry, StageCaches) for entry in piece.values()
    )


def assembled(boundary: Boundary, tensors: Sequence[torch.Tensor]) -> Any:
    """A block's output, of its tensors."""
    return tree_map(
        lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, boundary.structure
    )


def slot(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    """What stands for a part of a block's output; a tensor is added to `tensors`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensors.append(leaf)
    return Slot(len(tensors) - 1)
