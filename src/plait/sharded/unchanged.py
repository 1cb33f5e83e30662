"""Warning about parameters that training does not change."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.cluster.host_copy import HostCopy
from plait.cluster.layout import SAMPLE_AXES
from plait.cluster.mesh import Mesh
from plait.errors import warn
from plait.names import listed_names
from plait.sharded.replicas import bits_of

STEPS = 10
"""Number of updates after which parameters are compared with their first values."""


class UnchangedParameters:
    """Compares all trainable parameters before the first update and after `STEPS` updates.

    It compares a sum over the bits of each parameter. Other steps cost nothing.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._names: list[str] = []
        self._before: torch.Tensor | None = None
        """Sum of each parameter before the first update: [parameters], int64."""
        self._changed: HostCopy | None = None
        """Flags of the comparison, on their way to the host: [parameters], 1 for changed."""
        self._updates = 0

    def before_update(self) -> None:
        """Record the parameters before the first update."""
        if self._updates == 0 and self._before is None:
            names = [
                name
                for name, parameter in self._model.named_parameters()
                if _can_be_compared(parameter)
            ]
            self._names = names
            self._before = self._digests()

    def after_update(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        """Count an update. Update `STEPS` compares the parameters, and the next call warns.

        Collective in update `STEPS`. The next call reads its result without waiting for the device.

        Args:
            optimizer: The optimizer, whose groups with a learning rate of 0 do not count.
            skipped: Whether the step was skipped.
        """
        if self._updates > STEPS:
            return
        if self._updates == STEPS:
            self._updates += 1
            self._warn(optimizer)
            return
        if skipped or not any(float(group["lr"]) > 0 for group in optimizer.param_groups):
            return
        self._updates += 1
        if self._updates == STEPS:
            self._compare()

    def _digests(self) -> torch.Tensor:
        parameters = dict(self._model.named_parameters())
        sums = [
            bits_of(local_tensor(parameters[name].detach()))
            for name in self._names
            if name in parameters
        ]
        # A pipeline stage may train nothing.
        if not sums:
            return torch.zeros(0, dtype=torch.int64, device=self._mesh.device)
        return torch.stack(sums)

    def _compare(self) -> None:
        assert self._before is not None
        digests = self._digests()
        if len(digests) != len(self._before):
            # Layers have been replaced since the first update.
            self._updates = STEPS + 1
            return
        changed = (digests != self._before).to(torch.uint8)
        self._before = None
        # A shard may be unchanged where others are not.
        for axes in (SAMPLE_AXES, ("tp",)):
            group = self._mesh.group(*axes)
            if group is not None and len(changed):
                dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=group)
        self._changed = HostCopy(changed)

    def _warn(self, optimizer: torch.optim.Optimizer) -> None:
        if self._changed is None or self._mesh.rank != 0:
            return
        flags = self._changed.values().tolist()
        parameters = dict(self._model.named_parameters())
        trained = {
            p for group in optimizer.param_groups if float(group["lr"]) > 0 for p in group["params"]
        }
        unchanged = [
            name
            for name, changed in zip(self._names, flags, strict=True)
            if not changed
            and name in parameters
            and parameters[name].requires_grad
            and parameters[name] in trained
        ]
        if unchanged:
            warn(
                f"{listed_names(unchanged, 1)} did not change in the first {STEPS} updates,"
                " although it requires a gradient: the loss does not depend on it, its gradient is"
                " zero, or the updates are below the precision of its dtype; freeze it"
                " (requires_grad_(False)) if it should not change"
            )


def _can_be_compared(parameter: nn.Parameter) -> bool:
    local = local_tensor(parameter.detach())
    # A parameter on disk has no memory between its uses.
    return parameter.requires_grad and (local.numel() == 0 or local.untyped_storage().nbytes() > 0)
