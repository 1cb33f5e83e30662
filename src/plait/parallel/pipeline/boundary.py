"""Description of the activations that pass from one pipeline stage to the next.

It says which tensors a block's output contains and what their shapes follow from.
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
from plait.units import dtype_name

Signature = tuple[Any, ...]
"""Grad mode, and shapes and dtypes of a micro-batch, which decide the shapes between stages."""

MASK = "attention_mask"
"""Name of the attention mask in a micro-batch."""


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder for a tensor in the structure of a block's output.

    Attributes:
        index: Position of the tensor among all tensors of the output.
    """

    index: int


@dataclass(frozen=True)
class Boundary:
    """Activations that a stage sends to the next one.

    Attributes:
        structure: A block's output, with a TensorSlot for every tensor.
        tensors: Shape and dtype of each tensor, and whether its gradient is sent back.
        length: Length of the sequences if tensor parallelism splits them, else 0.
    """

    structure: Any
    tensors: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    length: int

    @property
    def differentiable(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the gradients that are sent back."""
        return [(shape, dtype) for shape, dtype, needs_gradient in self.tensors if needs_gradient]

    def allows(self, other: Boundary) -> bool:
        """Return True if a stage that knows this boundary can receive the other one."""
        if (self.tensors, self.length) != (other.tensors, other.length):
            return False
        return _comparable_leaves(self.structure) == _comparable_leaves(other.structure)

    def summary(self) -> str:
        """Return shapes and dtypes for an error message."""
        texts = [f"{dtype_name(dtype)} {list(shape)}" for shape, dtype, _ in self.tensors]
        return ", ".join(texts) or "no tensor"


def _comparable_leaves(structure: Any) -> list[Any]:
    """Return the leaves whose equality has a meaning; other objects may not define it."""
    return [
        leaf
        for leaf in tree_leaves(structure)
        if isinstance(leaf, TensorSlot | int | float | str | None)
    ]


class EarlierStageFailed(ModelError):
    """Error of a stage whose input is missing because an earlier stage failed.

    The rank of the earlier stage raises the actual error.
    """


def signature(batch: Any) -> Signature:
    """Return the properties of a micro-batch that decide the shapes between stages."""
    if has_cache(batch):
        # The mask covers all earlier tokens. The shapes of single tokens do not follow from it.
        batch = {
            key: entry
            for key, entry in batch.items()
            if key != MASK and not isinstance(entry, StageCaches)
        }
    tensors = [tensor for leaf in tree_leaves(batch) for tensor in tensors_in(leaf)]
    return (torch.is_grad_enabled(), *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def has_cache(batch: Any) -> bool:
    """Return True if a micro-batch contains the KV caches of the stages."""
    if not isinstance(batch, Mapping):
        return False
    return any(isinstance(entry, StageCaches) for entry in batch.values())


def flatten_output(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the structure of a block's output, with a TensorSlot per tensor, and its tensors."""
    tensors: list[torch.Tensor] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return TensorSlot(len(tensors) - 1)

    return tree_map(replace, output), tensors


def unflatten_output(boundary: Boundary, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild a block's output from its tensors."""

    def replace(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, TensorSlot) else leaf

    return tree_map(replace, boundary.structure)
