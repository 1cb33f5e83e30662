"""Buffers that a forward changes (running means, moving averages): every data-parallel rank has
rank 0's, as under DistributedDataParallel.

Data-parallel ranks see other samples, so their buffers drift apart. After every step the first
data-parallel rank's values are sent to the others, so the next forward, an evaluation and a
checkpoint find the same. Changed buffers are detected, not guessed: a tensor counts its writes, and
an assignment leaves another object. The ranks compare what they saw after the first step, and again
when one of them sees another persistent buffer change; a model whose buffers never change (rotary
frequencies, masks) sends nothing after that.

Buffers that are not persistent are taken only if they change in place in the first step: one made
anew may be a cache of this rank's lengths. In a pipeline the lowest stage that changed a buffer
outside of the blocks has the right values; later ones saw no inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from plait._torch.modules import is_persistent, own_buffers
from plait._torch.storage import version_of
from plait.cluster.fake_group import is_fake
from plait.cluster.layout import SAMPLE_AXES
from plait.cluster.mesh import Mesh
from plait.comm.largest import Largest
from plait.parallel.hooks import StepEnd, StepHook


@dataclass
class _Seen:
    module: nn.Module
    leaf: str
    persistent: bool
    tensor: torch.Tensor
    version: int

    def changed(self) -> bool:
        """Since it was looked at last."""
        now = own_buffers(self.module).get(self.leaf)
        if now is None:
            return False
        found = version_of(now) != self.version if now is self.tensor else self.persistent
        self.tensor, self.version = now, version_of(now)
        # torch's batch_norm writes these without counting it.
        return found or (self.leaf in ("running_mean", "running_var") and self.module.training)


class ChangingBuffers(StepHook):
    """`send` is called once a step, on all ranks."""

    def __init__(
        self, model: nn.Module, blocks: Collection[str], mesh: Mesh, batch_axes: Sequence[str]
    ) -> None:
        """`batch_axes`: those whose ranks see other data."""
        self.names: tuple[str, ...] = ()
        """Those that are sent after every step."""
        self.accumulating = False
        """In your own training loop: the step continues after this micro-batch."""
        self._in_forward: RemovableHandle | None = None
        self._mesh, self._blocks = mesh, tuple(blocks)
        real = mesh.layout.world_size > 1 and not is_fake()
        self._data, self._stages = (
            mesh.group(*axes) if real else None for axes in (batch_axes, ("pp",))
        )
        self._all = mesh.group("pp", *batch_axes) if real else None
        self._seen: dict[str, _Seen] = {}
        for owner_name, owner in model.named_modules() if self._all is not None else ():
            for leaf, tensor in own_buffers(owner).items():
                if tensor is not None:
                    persistent = is_persistent(owner, leaf)
                    name = f"{owner_name}.{leaf}" if owner_name else leaf
                    self._seen[name] = _Seen(owner, leaf, persistent, tensor, version_of(tensor))
        self._from_stage: dict[int, list[str]] = {}
        """Rank over pp to the buffers outside of blocks whose values are right there."""
        self._new: set[str] = set()
        """Seen to change here, and not sent yet."""
        self._asked: Largest | None = None
        """Whether any rank saw another buffer change, and what says that the answer is there."""
        self._watches = self._agreed = False
        """Whether on any rank another persistent buffer may begin to change; whether the first step
        is over.
        """

    def look(self) -> None:
        """What was written so far was the same on all ranks (a checkpoint)."""
        for seen in self._seen.values():
            seen.changed()

    def before_microbatch(self, last: bool) -> None:
        """See `accumulating`."""
        self.accumulating = not last

    def after_step(self, end: StepEnd) -> str:
        """The next forward finds the same on all ranks."""
        self.send()
        return ""

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """A checkpoint has written to buffers."""
        self.look()

    def release(self) -> None:
        """See `send_in_forward`."""
        if self._in_forward is not None:
            self._in_forward.remove()

    def send_in_forward(self, model: nn.Module) -> None:
        """For your own training loop, whose steps Plait does not see: in training, before the first
        forward of every step but the first.
        """
        due = [False]
        mine = weakref.ref(model)

        def before(module: nn.Module, _: Any) -> None:
            if module is not mine():
                return  # a copy of the model has this hook too
            if module.training and torch.is_grad_enabled():
                if due[0]:
                    self.send()
                due[0] = not self.accumulating

        self._in_forward = model.register_forward_pre_hook(before)

    def send(self) -> None:
        """The first data-parallel rank's values to the others. Collective."""
        if self._all is None:
            return
        self._new |= {name for name, seen in self._seen.items() if seen.changed()} - set(self.names)
        if not self._agreed or self._somebody_saw():
            self._agree()
        elif self._watches:
            self._ask()
        self._send()

    def _ask(self) -> None:
        """Overlaps with the next step, which reads the result."""
        self._asked = Largest(int(bool(self._new)), self._mesh.device, self._all)

    def _somebody_saw(self) -> bool:
        if self._asked is None:
            return False
        asked = self._asked
        self._asked = None
        return bool(asked.value())

    def _agree(self) -> None:
        """What any rank saw is sent from here on. Stages of a pipeline have buffers of their own in
        their blocks, and share the others.
        """
        self._agreed, every = True, sorted(self._seen)
        found = {*self.names, *self._new}
        if self._data is not None and every:
            flags = torch.tensor(
                [name in found for name in every], dtype=torch.uint8, device=self._mesh.device
            )
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._data)
            found = {name for name, flag in zip(every, flags.tolist(), strict=True) if flag}
        self._new, self.names = set(), tuple(sorted(found))
        self._watches = any(
            seen.persistent and name not in found for name, seen in self._seen.items()
        )
        if self._stages is None:
            return
        outside = [
            name
            for name in every
            if not any(name.startswith(f"{block}.") for block in self._blocks)
        ]
        told: list[Any] = [None] * self._stages.size()
        dist.all_gather_object(told, (self.names, outside, self._watches), group=self._stages)
        self._watches = any(watches for *_, watches in told)
        shared = set.intersection(*(set(theirs) for _, theirs, _ in told))
        first = {
            name: rank
            for rank in reversed(range(len(told)))
            for name in told[rank][0]
            if name in shared
        }
        self._from_stage = {
            rank: sorted(name for name in first if first[name] == rank)
            for rank in sorted(set(first.values()))
        }

    def _send(self) -> None:
        if self._data is not None and self.names:
            self._broadcast(self.names, self._data, 0)
        for source, names in self._from_stage.items():
            assert self._stages is not None
            self._broadcast(names, self._stages, source)

    @torch.no_grad()
    def _broadcast(self, names: Sequence[str], group: dist.ProcessGroup, source: int) -> None:
        """In one message, as bytes."""
        tensors = [self._seen[name].tensor for name in names]
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(flat, group_src=source, group=group)
        if group.rank() == source:
            return
        parts = flat.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for name, tensor, part in zip(names, tensors, parts, strict=True):
            # a part of bytes is not aligned
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
            self._seen[name].changed()


def bind_sync_batch_norm(model: nn.Module, mesh: Mesh) -> None:
    """SyncBatchNorm without a group of its own takes all processes; its batch is that of the
    data-parallel ranks.
    """
    if mesh.layout.world_size == mesh.layout.dp:
        return
    group = mesh.group(*SAMPLE_AXES) or mesh.sub("dp_shard").get_group()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            module.process_group = group
