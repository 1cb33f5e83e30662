"""Placeholders that replace blocks in a model's list of blocks on a pipeline stage.

A stage has placeholders for the blocks that it does not run, and for its last block, after which it
leaves the forward of the model.

Note [Placeholders]
    A model's code does not only call its blocks. It also reads attributes such as a layer's type,
    calls methods that change a setting, and uses submodules. The class of a placeholder is
    therefore a subclass of the block's class, and only calls of the placeholder differ. The
    placeholder of a block of this rank shares the block's attributes, so that a change of one
    changes the other. The placeholder of a block of another rank has the block's submodules
    without their tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_children, state_without_tensors
from plait.model.unavailable import UnavailableTensor


class StageEnd(Exception):
    """Control flow that leaves the model's forward after the last block of a stage.

    Attributes:
        output: Output of that block.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage ended")
        self.output = output


class Placeholder(nn.Module):
    """Module that stands in for a block. See Note [Placeholders]."""

    # Slots are not part of the `__dict__` that the placeholder may share with the block.
    __slots__ = ("plait_block", "plait_value")

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the block's forward."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `nn.Module.__call__` would run the hooks, and the recomputation, of the block.
        return self.plait_run(*args, **kwargs)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Forward of the placeholder.

        It is a property because a forward that was assigned to the block itself is one of the
        shared attributes; a property takes precedence over it.
        """
        return self.plait_run


class PlaceholderBlock(Placeholder):
    """Placeholder that returns `plait_value` instead of running a block of another stage."""

    __slots__ = ()
    plait_value: Any

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Return `plait_value`."""
        return self.plait_value


class AbsentBlock(PlaceholderBlock):
    """Placeholder of a block of another rank. Its submodules are not part of this rank's model."""

    __slots__ = ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Yield only this module."""
        if memo is None:
            memo = set()
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield nothing."""
        return iter(())


class StageExit(Placeholder):
    """Placeholder that runs the last block of a stage and then ends the forward."""

    __slots__ = ()
    plait_block: Callable[..., Any]

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block and raise StageEnd with its output."""
        raise StageEnd(self.plait_block(*args, **kwargs))


P = TypeVar("P", bound=Placeholder)


def placeholder_block(block: nn.Module) -> PlaceholderBlock:
    """Return a placeholder for a block of another stage of this rank."""
    placeholder = _create(PlaceholderBlock, block, block.__dict__)
    placeholder.plait_value = None
    return placeholder


def absent_block(block: nn.Module, message: Callable[[str], str]) -> AbsentBlock:
    """Return a placeholder for a block of another rank.

    Args:
        block: The block.
        message: Returns the text of the ModelError that the use of a parameter or buffer of that
            name raises.
    """
    placeholder = _create(AbsentBlock, block, _without_tensors(block, message, "", {}))
    placeholder.plait_value = None
    return placeholder


def stage_exit(block: nn.Module) -> StageExit:
    """Return a placeholder that ends the forward after the last block of a stage."""
    placeholder = _create(StageExit, block, block.__dict__)
    placeholder.plait_block = block.__call__
    return placeholder


def _create(kind: type[P], block: nn.Module, attributes: dict[str, Any]) -> P:
    name = f"{kind.__name__}{type(block).__name__}"
    placeholder: P = object.__new__(types.new_class(name, (kind, type(block))))
    object.__setattr__(placeholder, "__dict__", attributes)
    return placeholder


def _without_tensors(
    module: nn.Module,
    message: Callable[[str], str],
    prefix: str,
    copies: dict[nn.Module, nn.Module],
) -> dict[str, Any]:
    """Return the attributes of a module with unavailable parameters and buffers.

    Args:
        module: The module.
        message: Returns the error message for the name of a tensor.
        prefix: Name of the module within the block, with a dot at the end.
        copies: Submodules that were copied so far, so that shared ones stay shared.
    """
    attributes, children, tensors = state_without_tensors(module)
    attributes.pop("forward", None)
    for name, tensor in tensors.items():
        attributes[name] = None
        if isinstance(tensor, torch.Tensor):
            attributes[name] = UnavailableTensor(
                message(f"{prefix}{name}"), local_tensor(tensor.detach())
            )
    for name, child in own_children(module).items():
        if child is None:
            children[name] = None
            continue
        if child not in copies:
            copies[child] = object.__new__(type(child))
            child_attributes = _without_tensors(child, message, f"{prefix}{name}.", copies)
            object.__setattr__(copies[child], "__dict__", child_attributes)
        children[name] = copies[child]
    return attributes
