"""Gradients that stand in for those that a caller cannot see.

A sharded model shows one of two sets of parameters: shards, which an optimizer updates, or gathered
parameters, in which autograd accumulates. Between two micro-batches the gradients of a step are in
only one of them, and `zero_grad` may be called on the other. A `StandIn` observes one gradient of a
unit in both, and assigns zeros where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.tensors import local_tensor
from plait._torch.units import drop_unreduced, is_unreduced, unsharded_gradients
from plait._torch.watched_tensor import WatchedTensor, Write

Change = Literal["none", "dropped", "zeroed", "written"]


@dataclass
class _Observed:
    """A parameter, its gradient before it was observed, and since."""

    parameter: torch.Tensor
    original: torch.Tensor | None
    gradient: torch.Tensor
    writes: list[Write]
    """Writes to the gradient so far. They are recorded if it stands in for another."""

    def change(self) -> Change:
        if self.parameter.grad is not self.gradient:
            return "dropped"
        if not self.writes:
            return "none"
        return "zeroed" if self.writes[-1] == "zeros" else "written"

    def restore(self) -> None:
        if self.parameter.grad is self.gradient:
            self.parameter.grad = self.original


class StandIn:
    """Observer of the gradients of one parameter group of a unit.

    Args:
        group: torch's parameter group (`FSDPParamGroup`).
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        # The smallest parameter needs the least memory.
        self._candidates = sorted(group.fsdp_params, key=lambda p: p.sharded_size.numel())
        self._record: Any = None
        """torch's record (`FSDPParam`) of the observed parameter, or None."""
        self._observed: list[_Observed] = []
        self._zeros: dict[torch.Tensor, tuple[torch.Tensor, list[Write]]] = {}
        """Gradients of zeros and the writes to them, allocated once per parameter."""

    @property
    def shards(self) -> list[nn.Parameter]:
        """Sharded parameters of the group."""
        return [p.sharded_param for p in self.group.fsdp_params]

    @property
    def is_placed(self) -> bool:
        """Whether a gradient of the group is observed."""
        return self._record is not None

    def place(self) -> None:
        """Observe a gradient of the step so far, if the group has one, until `remove`."""
        unreduced = is_unreduced(self.group)
        is_partial = self.group._partial_reduce_output is not None
        for p in self._candidates:
            shard = p.sharded_param
            if unreduced and shard.requires_grad and (is_partial or unsharded_gradients(p)):
                self._observe(shard)
            elif not unreduced and shard.grad is not None:
                # Writes to a reduced gradient are the caller's own business.
                self._observed.append(_Observed(shard, shard.grad, shard.grad, []))
            else:
                continue
            self._record = p
            self.place_gathered()
            return

    def place_gathered(self) -> None:
        """Observe the gathered parameter too, if the model shows it now."""
        if self.group.is_unsharded and len(self._observed) == 1:
            self._observe(self._record._unsharded_param)

    def _observe(self, parameter: torch.Tensor) -> None:
        original = parameter.grad
        if original is not None:
            writes: list[Write] = []
            # The same storage.
            stand_in = _watched(original, local_tensor(original), writes)
        else:
            if parameter not in self._zeros:
                writes = []
                zeros = torch.zeros_like(local_tensor(parameter.detach()))
                self._zeros[parameter] = (_watched(parameter.detach(), zeros, writes), writes)
            stand_in, writes = self._zeros[parameter]
        stand_in.is_stand_in = original is None  # type: ignore[attr-defined]
        parameter.grad = stand_in
        self._observed.append(_Observed(parameter, original, stand_in, writes))

    def change(self) -> Change:
        """Return what a caller has done to the gradient since `place`."""
        changes = [observed.change() for observed in self._observed]
        for change in ("dropped", "zeroed", "written"):
            if change in changes:
                return change
        return "none"

    def remove(self) -> None:
        """Restore the gradients from before `place`, except those that a caller has replaced."""
        for observed in self._observed:
            observed.restore()
        self.forget()

    def forget(self) -> None:
        """Stop observing."""
        if any(observed.writes for observed in self._observed):
            # The stand-in may not have zeros any more.
            self._zeros.clear()
        self._observed = []
        self._record = None

    def drop(self) -> None:
        """Do to all gradients of the group what a caller has done to the observed ones."""
        change: Change = "none"
        if len(self._observed) > 1:
            change = self._observed[1].change()
        self.remove()
        drop_unreduced(self.group)

        # The caller has changed the shards already, unless the model has shown gathered parameters.
        for shard in self.shards:
            if change == "dropped":
                shard.grad = None
            elif change == "zeroed" and shard.grad is not None:
                shard.grad.zero_()


def _watched(like: torch.Tensor, local: torch.Tensor, writes: list[Write]) -> torch.Tensor:
    """Return a tensor of the same kind (plain or DTensor) as `like` that records writes."""
    watched = WatchedTensor.watch(local, writes)
    if not isinstance(like, DTensor):
        return watched
    return DTensor.from_local(
        watched,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
