"""What stands in the list of blocks for a block that a pipeline stage does not run, or that ends
it.

A model's own code reads more of its blocks than their output: a layer's type, a method that changes
a setting, the module inside of one. So a placeholder is of a subclass of the block's class and
answers as the block does; only calling it is something else. One for a block of this rank shares
the block's attributes, so what the code changes on one is changed on the other. One for a block of
another rank has the block's modules without their tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_children, state_without_tensors
from plait.model.unavailable import Unavailable


class StageEnd(Exception):
    """Leaves the model's forward after a stage's last block."""

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage ended")
        self.output = output


class Placeholder(nn.Module):
    """In the place of a block."""

    # beside the attributes that it may share with the block
    __slots__ = ("plait_block", "plait_value")

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """What a call does."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plait_run(*args, **kwargs)  # no hooks, no recomputation: they are the block's

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """A property, because a forward that was set on the block itself is among the shared
        attributes.
        """
        return self.plait_run


class PlaceholderBlock(Placeholder):
    """A block of another stage: returns `plait_value`."""

    __slots__ = ()
    plait_value: Any

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """The value that was set."""
        return self.plait_value


class Absent(PlaceholderBlock):
    """A block of another rank; what is inside of it is not part of the model here."""

    __slots__ = ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Itself."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """None."""
        return iter(())


class StageExit(Placeholder):
    """The last block of a stage that is not the last: runs it and ends the forward."""

    __slots__ = ()
    plait_block: Callable[..., Any]

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StageEnd."""
        raise StageEnd(self.plait_block(*args, **kwargs))


P = TypeVar("P", bound=Placeholder)


def placeholder_block(block: nn.Module) -> PlaceholderBlock:
    """For a block of another stage of this rank."""
    made = _in_place_of(PlaceholderBlock, block, block.__dict__)
    made.plait_value = None
    return made


def absent(block: nn.Module, why: Callable[[str], str]) -> Absent:
    """For a block of another rank. Using its parameter or buffer `name` raises ModelError with
    `why(name)`.
    """
    made = _in_place_of(Absent, block, _without_tensors(block, why, "", {}))
    made.plait_value = None
    return made


def stage_exit(block: nn.Module) -> StageExit:
    """For the last block of a stage."""
    made = _in_place_of(StageExit, block, block.__dict__)
    made.plait_block = block.__call__
    return made


def _in_place_of(kind: type[P], block: nn.Module, attributes: dict[str, Any]) -> P:
    made: P = object.__new__(
        types.new_class(f"{kind.__name__}{type(block).__name__}", (kind, type(block)))
    )
    object.__setattr__(made, "__dict__", attributes)
    return made


def _without_tensors(
    module: nn.Module, why: Callable[[str], str], prefix: str, made: dict[nn.Module, nn.Module]
) -> dict[str, Any]:
    """The attributes of a module, and of those inside of it, without parameters and buffers."""
    found, children, tensors = state_without_tensors(module)
    found.pop("forward", None)
    for name, tensor in tensors.items():
        found[name] = (
            Unavailable(why(f"{prefix}{name}"), local_tensor(tensor.detach()))
            if isinstance(tensor, torch.Tensor)
            else None
        )
    for name, child in own_children(module).items():
        if child is not None and child not in made:
            made[child] = object.__new__(type(child))
            object.__setattr__(
                made[child], "__dict__", _without_tensors(child, why, f"{prefix}{name}.", made)
            )
        children[name] = None if child is None else made[child]
    return found
