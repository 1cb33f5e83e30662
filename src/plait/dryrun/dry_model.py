"""One micro-batch through a stage of a model, without data: forward, loss and backward on fake
tensors, which have shapes and no memory.

Everything that the real run does to a block is done here too (tensor parallelism, recompute, the
dtype of computation), but for what moves parameters around; collectives return at once. So the
figures are those of the model's own code and of torch's own operators on that kind of device, not
of a formula. Nothing is communicated, allocated or changed. A model without a pipeline is one
stage.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait._torch.modules import own_buffers
from plait._torch.operators import (
    FakeTensorMode,
    KernelWithoutMemory,
    refusing_triton_kernels,
    tree_leaves,
    tree_map,
)
from plait.dryrun.recorder import BACKWARD, DryRecorder, watch, when_gradient_comes
from plait.errors import ModelError
from plait.losses.loss import Loss
from plait.model.outer_units import outer_units
from plait.model.positions import rows_are_sequences
from plait.parallel.accounting.activations import StageMode
from plait.parallel.accounting.timeline_points import BESIDE, HEAD, LOSS, StageMoments
from plait.parallel.micro_batches import Forward
from plait.parallel.pipeline.pipeline_parallel import PipelineParts
from plait.parallel.pipeline.split_backward import backward_inputs, backward_weights
from plait.parallel.pipeline.stage import Stage, StagedModel
from plait.parallel.technique import Parts
from plait.parallel.tensor.styles import Region
from plait.shards import shard_size


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a language model: `input_ids` and `labels` [samples, length], all targets,
    on meta.
    """
    ids = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class StageTrace:
    """What a forward and a backward of one stage were found to take."""

    figures: StageMode
    """In the mode that its blocks are in, without what only a comparison of modes or a store says
    (`returning`, `stored`).
    """
    received: int
    """The boundary activations of the stage before."""
    differentiable: bool
    """Whether a gradient goes back to a stage before."""
    moments: StageMoments
    """What is alive from one point of time to the next."""


class DryModel:
    """A fake copy of a model with techniques applied, to be run stage by stage."""

    def __init__(
        self,
        model: nn.Module,
        apply: Callable[[nn.Module], tuple[Parts, StagedModel | None]],
        *,
        device: torch.device,
        batch: Any,
        compute_dtype: torch.dtype | None,
        loss_fn: Loss,
        forward: Callable[[nn.Module], Forward],
    ) -> None:
        """`apply` is given the copy, under a fake tensor mode; `forward` makes the function that
        calls it. `model` stays as it is.
        """
        self._named = model
        self._device = device
        self.loss_fn = loss_fn
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            fake = _fake_copy(model, device, compute_dtype)
            self.parts, self.staged = apply(fake)
            self._factor = torch.ones((), dtype=torch.float64, device=device)
            self.piece = tree_map(
                lambda x: torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x,
                batch,
            )
        self.forward = forward(fake)
        region = self.parts.noted(Region)
        if region is not None:
            region.serve(loss_fn)

    def trace(
        self,
        index: int = 0,
        received: Any = None,
        *,
        length: int = 0,
        splits: bool = False,
        first_unit: int = 0,
    ) -> tuple[StageTrace, Any]:
        """Run stage `index` on the boundary activations of the one before (tensors on meta; None on
        the first), for sequences of `length` where shapes depend on it. Also returns the stage's
        own boundary activations, on meta. `splits`: the backward is split. Blocks are numbered from
        `first_unit` in the trace's timeline points. Raises ModelError where the model's code looks
        at values.
        """
        with self.mode, _explained(self._named), rows_are_sequences():
            arrived = tree_map(
                lambda x: _like(x, self._device) if isinstance(x, torch.Tensor) else x, received
            )
            return self._trace(
                None if self.staged is None else self.staged.stages[index],
                arrived,
                length,
                splits,
                first_unit,
            )

    def _trace(
        self, stage: Stage | None, received: Any, length: int, splits: bool, first_unit: int
    ) -> tuple[StageTrace, Any]:
        model = self.parts.model
        last = stage is None or stage.last
        names = self.parts.blocks if stage is None else stage.blocks
        units = {name: first_unit + index for index, name in enumerate(names)}
        batch = [leaf for leaf in tree_leaves(self.piece) if isinstance(leaf, torch.Tensor)]
        recorder = DryRecorder(
            known=[*model.parameters(), *model.buffers(), *batch, self._factor],
            drops_gradients=not splits,
        )
        inputs = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
        recorder.hold(inputs)
        received_bytes = recorder.total
        inputs = [leaf for leaf in inputs if leaf.requires_grad]
        head = outer_units(self._named, names).head if stage is None else None
        remove = watch(model, units, recorder, last=last, head=head)
        deferred: Counter[int] = Counter()
        try:
            with recorder:
                recorder.mark("forward", BESIDE)
                outputs, handed = self._forward(stage, received, length, recorder)
                forward = recorder.take()
                kept = Counter(recorder.bytes)
                recorder.unit = BACKWARD
                recorder.mark("backward", LOSS if last else HEAD)
                gradients = None if last else [torch.empty_like(tensor) for tensor in outputs]
                if splits:
                    second = backward_inputs(outputs, gradients, inputs)
                    del gradients
                    for tensor in inputs:
                        tensor.grad = None
                    deferred = Counter({unit: recorder.of_block(unit) for unit in units.values()})
                    outside = recorder.total - deferred.total()
                    first = recorder.take()
                    recorder.mark("weights", BESIDE)
                    backward_weights(second)
                    moments = StageMoments(forward, inputs=first, weights=recorder.take())
                else:
                    if outputs:
                        torch.autograd.backward(outputs, gradients)
                    moments = StageMoments(forward, backward=recorder.take())
        finally:
            remove()
            for parameter in model.parameters():
                parameter.grad = None
        trace = StageTrace(
            figures=StageMode(
                kept=tuple(kept[unit] for unit in units.values()),
                outside=kept[BESIDE],
                head=kept[HEAD],
                returning=(),
                flops=recorder.flops,
                traffic=dict(recorder.traffic),
                peak=recorder.peak,
                deferred=tuple(deferred[unit] for unit in units.values()) if splits else (),
                deferred_outside=outside if splits else 0,
            ),
            received=received_bytes,
            differentiable=bool(inputs),
            moments=moments,
        )
        return trace, handed

    def _forward(
        self, stage: Stage | None, received: Any, length: int, recorder: DryRecorder
    ) -> tuple[list[torch.Tensor], Any]:
        """The tensors that the backward starts from, and the boundary activations."""
        if stage is None:
            output = self.forward(self.parts.model, self.piece)
        else:
            assert self.staged is not None
            output = self.staged.run(
                stage, lambda model: self.forward(model, self.piece), received, length=length
            )
            if not stage.last:
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                handed = tree_map(
                    lambda x: _like(x, torch.device("meta")) if isinstance(x, torch.Tensor) else x,
                    output,
                )
                return [tensor for tensor in tensors if tensor.requires_grad], handed
        recorder.mark("forward", LOSS)
        when_gradient_comes(output, lambda: recorder.mark("backward", HEAD))
        total = self.loss_fn(output, self.piece)[0]
        return [total * self._factor.to(total.dtype)], None  # as the engine scales it


def handed_on(model: nn.Module, parts: Parts, piece: dict[str, torch.Tensor]) -> Any:
    """The boundary activations of a stage: hidden states [samples, length, hidden], alone or in a
    tuple as the blocks return them; with sequence parallelism a rank's part of the length. Raises
    ModelError for a model that does not define their width, and for blocks that return tensors
    besides.
    """
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    name = type(model).__name__
    if width is None:
        raise ModelError(
            f"{name} has no config.hidden_size, so what passes between its stages is not known"
            " beforehand"
        )
    samples, length = piece["input_ids"].shape
    region = parts.noted(Region)
    own = length
    if region is not None:
        region.length = length
        if region.sequence_parallel:
            own = shard_size(length, region.group.size())
    dtype = parts.shard.compute_dtype or next(model.parameters()).dtype

    def hidden(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() != 3 or leaf.shape[-1] != width or not leaf.is_floating_point():
            besides = f"a tensor of shape {tuple(leaf.shape)} beside hidden states {width} wide"
            raise ModelError(
                f"{name}: its blocks return {besides}, so what passes between its stages is not"
                " known beforehand"
            )
        return torch.empty(samples, own, width, dtype=dtype, device="meta", requires_grad=True)

    pipeline = parts.noted(PipelineParts)
    seen = pipeline.cut.returned if pipeline is not None else None
    return tree_map(hidden, torch.empty(1, 1, width, device="meta") if seen is None else seen)


class CountingStore:
    """A store for saved tensors that only counts, by block."""

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()

    def begin(self) -> None:
        """As any store."""

    def open(self, index: int) -> _CountingGroup:
        """Counts for block `index`."""
        return _CountingGroup(self, index)

    def prefetcher(self) -> Callable[[], None]:
        """Nothing is prefetched."""
        return lambda: None

    def drain(self) -> None:
        """Nothing is being written."""

    def close(self) -> None:
        """Nothing is held."""


class _CountingGroup:
    def __init__(self, store: CountingStore, index: int) -> None:
        self._store = store
        self._index = index

    def put(self, flat: torch.Tensor) -> tuple[int, torch.device]:
        self._store.bytes[self._index] += flat.numel()
        return flat.numel(), flat.device

    def get(self, handle: tuple[int, torch.device]) -> torch.Tensor:
        size, device = handle
        return torch.empty(size, dtype=torch.uint8, device=device)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(
        tensor.requires_grad
    )


def _fake_copy(
    model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None
) -> nn.Module:
    """A copy with fake tensors, under a FakeTensorMode; parameters in the dtype of computation, as
    `fully_shard` casts them.
    """
    memo: dict[int, Any] = {}

    def fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device
        )

    for parameter in model.parameters():
        dtype = compute_dtype if parameter.is_floating_point() else None
        memo[id(parameter)] = nn.Parameter(
            fake(parameter, dtype), requires_grad=parameter.requires_grad
        )
    for module in model.modules():
        for value in (*own_buffers(module).values(), *module.__dict__.values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake(value)
    return copy.deepcopy(model, memo)


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """A model whose code reads values is refused with a message."""
    try:
        with refusing_triton_kernels():
            yield
    except KernelWithoutMemory as error:
        raise ModelError(
            f"{type(model).__name__} cannot be run without data: {error}, so the memory that it"
            " needs is not known beforehand; predict with the model before it gets this kernel"
        ) from error
    except Exception as error:
        if "DataDependent" not in type(error).__name__ and "data_ptr" not in str(error):
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be run without data: its code looks at values"
            f" ({type(error).__name__}), so what it keeps is not known beforehand; choose"
            " parallel.recompute.mode yourself in place of a budget"
        ) from error
