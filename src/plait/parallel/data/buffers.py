"""Synchronisation of buffers that a forward changes, such as running means and moving averages.

All data-parallel ranks have the values of rank 0, as under DistributedDataParallel.

Note [Changing buffers]
    Data-parallel ranks see different samples, so their buffers drift apart. After every step the
    values of the first data-parallel rank are broadcast, so that the next forward, an evaluation
    and a checkpoint read the same values on all ranks.

    Changed buffers are detected by the version counter of a tensor, and by the identity of the
    tensor for an assignment. Ranks may see different changes. They therefore exchange the names
    after the first step, and again when one of them sees another persistent buffer change. A model
    whose buffers never change (rotary frequencies, masks) sends nothing after that.

    Buffers that are not persistent are included only if they change in place in the first step. A
    new tensor may be a cache whose size depends on this rank's sequences.

    In a pipeline several stages may hold a buffer outside the blocks. The lowest stage that
    changed the buffer has the right values, because later stages saw no inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from plait._torch.modules import direct_buffers, is_persistent, is_unversioned
from plait._torch.tensors import version_of
from plait.cluster.layout import SAMPLE_AXES
from plait.cluster.mesh import Mesh
from plait.cluster.process_groups import is_fake
from plait.cluster.small_messages import all_gather_objects, max_over_ranks
from plait.comm.collectives import AsyncMaximum
from plait.model.sequence import is_inside
from plait.parallel.hooks import StepEnd, StepHook, UncopiedHook


class ChangingBuffers(StepHook):
    """Hook that broadcasts changed buffers after every step. See Note [Changing buffers]."""

    def __init__(
        self, model: nn.Module, blocks: Collection[str], mesh: Mesh, batch_axes: Sequence[str]
    ) -> None:
        """Watch the buffers of a model.

        Args:
            model: The model on this rank.
            blocks: Names of its blocks.
            mesh: The mesh of all ranks.
            batch_axes: Axes whose ranks see different data.
        """
        self.names: tuple[str, ...] = ()
        """Buffers that are sent after every step."""
        self.accumulating = False
        """True if the step continues after this micro-batch, in the user's training loop."""
        self._forward_hook: RemovableHandle | None = None
        self._mesh = mesh
        self._blocks = tuple(blocks)
        self._data_group: dist.ProcessGroup | None = None
        self._stage_group: dist.ProcessGroup | None = None
        self._group: dist.ProcessGroup | None = None
        if mesh.layout.world_size > 1 and not is_fake():
            self._data_group = mesh.group(*batch_axes)
            self._stage_group = mesh.group("pp")
            self._group = mesh.group("pp", *batch_axes)

        self._buffers: dict[str, _WatchedBuffer] = {}
        if self._group is not None:
            self._watch(model)
        self._names_of_stage: dict[int, list[str]] = {}
        """Buffers outside the blocks, by the rank over pp whose values are right."""
        self._unsent: set[str] = set()
        """Buffers that have changed on this rank, but are not in `names`."""
        self._any_unsent: AsyncMaximum | None = None
        """Exchange of whether any rank has unsent buffers, or None if none is in flight."""
        self._may_change_later = False
        """True if another persistent buffer may begin to change on any rank."""
        self._has_agreed = False
        """True if the first step is over."""

    def _watch(self, model: nn.Module) -> None:
        for owner_name, owner in model.named_modules():
            for leaf, tensor in direct_buffers(owner).items():
                if tensor is None:
                    continue
                name = f"{owner_name}.{leaf}".removeprefix(".")
                self._buffers[name] = _WatchedBuffer(
                    owner, leaf, is_persistent(owner, leaf), tensor, version_of(tensor)
                )

    def before_microbatch(self, last: bool) -> None:
        """Record whether the step continues after this micro-batch."""
        self.accumulating = not last

    def after_step(self, end: StepEnd) -> str:
        """Send the changed buffers, so that the next forward reads equal values on all ranks."""
        self.send()
        return ""

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Forget all changes so far, because a loaded checkpoint has equal values on all ranks."""
        for buffer in self._buffers.values():
            buffer.changed()

    def release(self) -> None:
        """Remove the hook of `send_in_forward`."""
        if self._forward_hook is not None:
            self._forward_hook.remove()

    def send_in_forward(self, model: nn.Module) -> None:
        """Broadcast buffers before the first training forward of every step but the first.

        This is for the user's own training loop, in which Plait does not see the end of a step.
        """
        is_due = False

        def send_if_due(module: nn.Module, _: Any) -> None:
            nonlocal is_due
            if module.training and torch.is_grad_enabled():
                if is_due:
                    self.send()
                is_due = not self.accumulating

        self._forward_hook = model.register_forward_pre_hook(UncopiedHook(send_if_due))

    def send(self) -> None:
        """Broadcast the changed buffers of the first data-parallel rank. Collective."""
        if self._group is None:
            return
        changed = {name for name, buffer in self._buffers.items() if buffer.changed()}
        self._unsent |= changed - set(self.names)
        if not self._has_agreed or self._has_any_unsent():
            self._agree()
        elif self._may_change_later:
            # The next step reads the result, so the exchange overlaps with it.
            self._any_unsent = AsyncMaximum(int(bool(self._unsent)), self._mesh.device, self._group)

        if self._data_group is not None and self.names:
            self._broadcast(self.names, self._data_group, 0)
        for source, names in self._names_of_stage.items():
            assert self._stage_group is not None
            self._broadcast(names, self._stage_group, source)

    def _has_any_unsent(self) -> bool:
        """Return True if any rank had unsent changes in the exchange of the previous step."""
        if self._any_unsent is None:
            return False
        exchange = self._any_unsent
        self._any_unsent = None
        return bool(exchange.value())

    def _agree(self) -> None:
        """Exchange the names of changed buffers. Each of these is sent from then on."""
        self._has_agreed = True
        all_names = sorted(self._buffers)
        changed = {*self.names, *self._unsent}
        if self._data_group is not None and all_names:
            flags = max_over_ranks(
                [int(name in changed) for name in all_names],
                self._data_group,
                device=self._mesh.device,
            )
            changed = {name for name, flag in zip(all_names, flags, strict=True) if flag}
        self._unsent = set()
        self.names = tuple(sorted(changed))
        self._may_change_later = any(
            buffer.persistent and name not in changed for name, buffer in self._buffers.items()
        )
        if self._stage_group is not None:
            self._agree_over_stages(self._stage_group)

    def _agree_over_stages(self, group: dist.ProcessGroup) -> None:
        """Select the stage with the valid values of every buffer that all stages share."""
        outside = [name for name in sorted(self._buffers) if not is_inside(name, self._blocks)]
        answers = all_gather_objects((self.names, outside, self._may_change_later), group)

        # All stages must agree, because each of them takes part in the next exchange.
        self._may_change_later = any(may_change_later for *_, may_change_later in answers)
        shared = set.intersection(*(set(names) for _, names, _ in answers))
        first: dict[str, int] = {}
        for rank, (changed, _, _) in enumerate(answers):
            for name in changed:
                if name in shared:
                    first.setdefault(name, rank)
        self._names_of_stage = {rank: [] for rank in sorted(set(first.values()))}
        for name in sorted(first):
            self._names_of_stage[first[name]].append(name)

    @torch.no_grad()
    def _broadcast(self, names: Sequence[str], group: dist.ProcessGroup, source: int) -> None:
        """Broadcast buffers of any dtypes in one byte message."""
        tensors = [self._buffers[name].tensor for name in names]
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(flat, group_src=source, group=group)
        if group.rank() == source:
            return

        parts = flat.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for name, tensor, part in zip(names, tensors, parts, strict=True):
            # A part starts at any byte, and a view in another dtype needs alignment.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
            # The write of the broadcast itself is not a change.
            self._buffers[name].changed()


@dataclass
class _WatchedBuffer:
    """Buffer of a module, with its state when it was last compared."""

    module: nn.Module
    leaf: str
    persistent: bool
    tensor: torch.Tensor
    version: int

    def changed(self) -> bool:
        """Return True if the buffer has changed since the last call."""
        current = direct_buffers(self.module).get(self.leaf)
        if current is None:
            return False
        if current is self.tensor:
            has_changed = version_of(current) != self.version
        else:
            has_changed = self.persistent
        self.tensor = current
        self.version = version_of(current)
        return has_changed or is_unversioned(self.module, self.leaf)


def bind_sync_batch_norm(model: nn.Module, mesh: Mesh) -> None:
    """Restrict each SyncBatchNorm without a group to the data-parallel ranks.

    Without a group, its statistics are over all processes, but only data-parallel ranks have
    different parts of the batch.
    """
    if mesh.layout.world_size == mesh.layout.dp:
        return
    group = mesh.group(*SAMPLE_AXES) or mesh.sub("dp_shard").get_group()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            module.process_group = group
