"""What every stage of a pipeline keeps of a micro-batch, found by running them one after the other on fake tensors.

All stages are run on every rank, which needs no communication: each rank knows what the others will decide, so what cannot be met is
refused by all of them. As `dryrun`, with the stages cut as they are in the run and backwards in halves where the schedule has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from plait._torch import FakeTensorMode, tree_leaves, tree_map
from plait.cluster.mesh import Mesh
from plait.engine.batch import Forward
from plait.engine.dryrun import (
    AFTER,
    BACKWARD,
    OUTSIDE,
    DryRun,
    Nowhere,
    explained,
    fake_copy,
    largest_over_tp,
    rows_are_sequences,
    watch_blocks,
)
from plait.engine.loss import Loss
from plait.parallel.activations import BlockMode
from plait.parallel.in_flight import RankActivations, StageFacts, StageMode
from plait.parallel.pipeline import PipelineParts
from plait.parallel.recompute import Recompute
from plait.parallel.schedule import Kind, Schedule
from plait.parallel.split_backward import backward_inputs, backward_weights
from plait.parallel.stage import Stage, StagedModel, stage_model
from plait.parallel.staged_zero import StagedZero
from plait.parallel.technique import Parts
from plait.parallel.tensor import TensorParallel

MODES: tuple[BlockMode, ...] = ("none", "selective", "full")


def rank_activations(
    model: nn.Module,
    *,
    pipeline: PipelineParts,
    mesh: Mesh,
    batch: Any,
    tensor_parallel: TensorParallel,
    recompute: Recompute,
    offloads: Callable[[int], int],
    compute_dtype: torch.dtype | None,
    loss_fn: Loss,
    forward: Forward,
    modes: tuple[BlockMode, ...] = MODES,
) -> tuple[RankActivations, ...]:
    """The figures of every rank of the pipeline, for one micro-batch like `batch`; those of the fullest rank of the tp axis, so that its
    ranks decide alike. `model` is whole, as yet unsharded, and stays as it is. `offloads` says how many blocks of a rank's use a store.
    Collective over the tp axis. Raises ModelError where the model's code looks at values."""
    schedule, cut = pipeline.schedule, pipeline.cut
    own = [
        [name for stage in schedule.stages_of(rank) for name in cut.blocks[cut.bounds[stage] : cut.bounds[stage + 1]]]
        for rank in range(schedule.pp)
    ]
    stored = {name for names in own for name in names[: offloads(len(names))]}

    def measure(mode: BlockMode, stored: Collection[str]) -> list[_Measured]:
        blocks = (*(name for name in cut.blocks if name in stored), *(name for name in cut.blocks if name not in stored))
        technique = recompute.model_copy(update={"mode": mode, "every": 1, "assignment": (mode,) * len(blocks)})
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = fake_copy(model, mesh.device, compute_dtype)
            store = Nowhere() if stored else None
            parts = Parts(model=fake, blocks=cut.blocks, activation_store=store, offloaded_blocks=len(stored))
            parts = tensor_parallel.apply(parts, mesh)
            staged = stage_model(fake, cut, range(cut.stages), region=parts.tensor_region, device=mesh.device)
            parts = technique.apply(parts.with_(blocks=blocks), mesh)
            if parts.tensor_region is not None:
                parts.tensor_region.gather_logits = not (parts.loss_parallel and getattr(loss_fn, "split_logits", False))
            piece = tree_map(lambda x: torch.empty_like(x, device=mesh.device) if isinstance(x, torch.Tensor) else x, batch)
            run = _Run(staged, schedule, piece, forward, loss_fn)
            with explained(model), rows_are_sequences():
                found = run.stages()
        if store is None:
            return found
        place = {name: index for index, name in enumerate(blocks)}
        return [
            replace(one, stored=tuple(store.bytes.get(place[name], 0) for name in cut.blocks[low:high]))
            for one, (low, high) in zip(found, pairwise(cut.bounds), strict=True)
        ]

    plain = measure("none", ())
    by_mode = {mode: plain if mode == "none" and not stored else measure(mode, stored) for mode in modes}
    facts = [_facts(plain[stage], {mode: found[stage] for mode, found in by_mode.items()}) for stage in range(cut.stages)]
    facts = [_alike_over_tp(stage, mesh) for stage in facts]
    return tuple(RankActivations(schedule, rank, tuple(facts[stage] for stage in schedule.stages_of(rank))) for rank in range(schedule.pp))


@dataclass(frozen=True)
class _Measured:
    """A stage in one mode."""

    kept: tuple[int, ...]
    beside: int
    put_off: tuple[int, ...]
    put_off_beside: int
    flops: int
    entrance: int
    differentiable: bool
    stored: tuple[int, ...] = ()


def _facts(plain: _Measured, modes: dict[BlockMode, _Measured]) -> StageFacts:
    """`plain` is the stage without recompute and without a store: what a block's backward has on the device."""
    found: dict[BlockMode, StageMode] = {}
    for mode, one in modes.items():
        before = (0, *one.stored[:-1]) if one.stored else (0,) * len(one.kept)  # on its way too
        returning = tuple(whole - kept + more for whole, kept, more in zip(plain.kept, one.kept, before, strict=True))
        found[mode] = StageMode(one.kept, one.beside, returning, one.flops, one.stored, one.put_off, one.put_off_beside)
    return StageFacts(found, plain.entrance, plain.differentiable)


class _Run:
    """All stages on one rank, without its schedule."""

    def __init__(self, staged: StagedModel, schedule: Schedule, piece: Any, forward: Forward, loss_fn: Loss) -> None:
        self.staged, self.schedule, self.piece, self.forward, self.loss_fn = staged, schedule, piece, forward, loss_fn
        self.weights = StagedZero(staged, schedule, zero=0, reducer=None).weights
        self.kinds = {(action.stage, action.kind) for row in schedule.ranks for action in row}

    def stages(self) -> list[_Measured]:
        """In the order of the model."""
        found, received, length = [], None, 0
        for index in range(self.schedule.stages):
            one, received = self._stage(self.staged.stages[index], received, length)
            found.append(one)
            length = self.staged.region.length if self.staged.region is not None else 0
        return found

    def _stage(self, stage: Stage, received: Any, length: int) -> tuple[_Measured, Any]:
        model = self.staged.model
        known = [*model.parameters(), *model.buffers(), *(leaf for leaf in tree_leaves(self.piece) if isinstance(leaf, torch.Tensor))]
        factor = torch.ones((), dtype=torch.float64)
        live = DryRun(known=[*known, factor])
        arrived = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
        live.unit = OUTSIDE
        live.hold(arrived)
        entrance = live.total
        inputs = [leaf for leaf in arrived if leaf.requires_grad]
        remove = _watch(model, stage.blocks, live)
        splits = (stage.index, Kind.INPUT) in self.kinds
        try:
            with live:
                output = self.staged.run(stage, lambda model: self.forward(model, self.piece), received, length=length)
                if stage.last:
                    total = self.loss_fn(output, self.piece)[0]
                    outputs = [total * factor.to(total.dtype)]  # as the engine does
                    handed: Any = None
                    del total
                else:
                    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
                    handed = tree_map(lambda leaf: _Handed.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)
                del output
                kept = dict(live.bytes)
                live.unit = BACKWARD
                gradients = None if stage.last else [torch.empty_like(tensor) for tensor in outputs]
                put_off: dict[int, int] = {}
                if splits:
                    second = backward_inputs(outputs, gradients, inputs, self.weights(stage.index))
                    del gradients
                    for tensor in inputs:
                        tensor.grad = None
                    put_off = dict(live.bytes)
                    backward_weights(second)
                elif outputs:
                    torch.autograd.backward(outputs, gradients)
        finally:
            remove()
            for parameter in model.parameters():
                parameter.grad = None
        count = len(stage.blocks)
        return (
            _Measured(
                kept=tuple(kept.get(index, 0) for index in range(count)),
                beside=kept.get(OUTSIDE, 0) + kept.get(AFTER, 0),
                put_off=tuple(put_off.get(index, 0) for index in range(count)) if splits else (),
                put_off_beside=sum(size for unit, size in put_off.items() if unit < 0),
                flops=live.flops,
                entrance=entrance,
                differentiable=bool(inputs),
            ),
            tree_map(lambda leaf: leaf.arrived() if isinstance(leaf, _Handed) else leaf, handed),
        )


@dataclass(frozen=True)
class _Handed:
    """A tensor that a stage hands on."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Handed:
        """Without its memory."""
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)

    def arrived(self) -> torch.Tensor:
        """As the next stage gets it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).requires_grad_(self.requires_grad)


def _watch(model: nn.Module, blocks: tuple[str, ...], live: DryRun) -> Callable[[], None]:
    """Tell `live` which block runs, forward and backward; gradients of parameters do not count."""
    unwatch = watch_blocks(model, blocks, live)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(lambda p: live.forget([p.grad])) for parameter in trainable]

    def leave(index: int) -> Callable[..., None]:
        def when_gradient_comes(_module: nn.Module, _args: object, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: setattr(live, "unit", index))

        return when_gradient_comes

    for index, name in enumerate(blocks):
        handles.append(model.get_submodule(name).register_forward_hook(leave(index)))

    def remove() -> None:
        unwatch()
        for handle in handles:
            handle.remove()

    return remove


def _alike_over_tp(stage: StageFacts, mesh: Mesh) -> StageFacts:
    found: dict[BlockMode, StageMode] = {}
    for mode, one in stage.modes.items():
        single = (one.beside, one.flops, one.put_off_beside)
        kept, returning, stored, put_off, rest = largest_over_tp(mesh, one.kept, one.returning, one.stored, one.put_off, single)
        beside, flops, put_off_beside = rest
        found[mode] = StageMode(kept, beside, returning, flops, stored, put_off, put_off_beside)
    return replace(stage, modes=found)
