"""Forward, loss and backward of one micro-batch through a model stage on fake tensors.

All techniques that change blocks are applied as in a real run (tensor parallelism, recomputation,
the compute dtype). Techniques that shard or move parameters are not applied. Collectives return at
once. The results are measured by running the model's code and torch's operators for the device, and
not computed by formulas. Nothing is communicated or allocated, and the model does not change. A
model without a pipeline is one stage.

`rank_activations` measures the activation memory of every pipeline rank for a micro-batch, in every
mode of recomputation. Every process runs all stages on fake tensors, one after another. Each
process thus knows the results of all ranks without communication. If one rank cannot meet a memory
budget, all ranks reject the budget. Without a pipeline there is one rank with one stage.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.groups import FakeStore
from plait._torch.modules import direct_buffers
from plait._torch.operators import (
    FakeTensorMode,
    KernelWithoutMemory,
    refusing_triton_kernels,
    tree_map,
)
from plait.cluster.layout import shard_size
from plait.cluster.mesh import Mesh
from plait.cluster.process_groups import FAKE
from plait.cluster.small_messages import max_over_ranks
from plait.config.resolving.resolve import Resolved
from plait.dryrun.recorder import BACKWARD, DryRecorder, on_first_gradient, watch
from plait.errors import InputError, ModelError
from plait.losses import chunked_loss
from plait.losses.chunked_loss import ChunkedCausalLMLoss
from plait.losses.loss import Loss, causal_lm_loss
from plait.model.experts import disable_balance_loss, find_experts
from plait.model.outer_layers import outer_units
from plait.model.positions import skip_packed_row_search
from plait.model.without_values import tensors_of
from plait.parallel.accounting.activations import (
    ONE_STAGE,
    BlockMode,
    RankActivations,
    StageFacts,
    StageMode,
)
from plait.parallel.accounting.peak import HEAD, LOSS, OUTSIDE, StageIntervals
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.parts import Parts, Plans
from plait.parallel.pipeline.split_backward import backward_inputs, backward_weights
from plait.parallel.pipeline.stage import Stage, StagedModel, stage_model
from plait.parallel.schedules.schedule import Kind
from plait.parallel.techniques.context_parallel import ContextParallel, local_batch
from plait.parallel.techniques.offload import ActivationOffload
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.parallel.techniques.tiled_mlp import TiledMLP
from plait.sizes import dtype_name, dtype_of


@contextmanager
def process_group_of_rank(resolved: Resolved, rank: int, *, purpose: str) -> Iterator[None]:
    """Create a fake process group for one rank, and destroy it when the context exits.

    Args:
        resolved: Configuration, whose layout determines the number of ranks.
        rank: Rank of this process.
        purpose: What the group is created for, as the subject of the error message.

    Raises:
        InputError: The process has a process group already.
    """
    if dist.is_initialized():
        raise InputError(
            f"{purpose} creates a fake process group, but this process already has a process group;"
            " run it in another process"
        )
    dist.init_process_group(
        FAKE, store=FakeStore(), rank=rank, world_size=resolved.layout.world_size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def loss_of(resolved: Resolved) -> Loss:
    """Return the loss of a causal language model for a dry run, in chunks if configured."""
    if resolved.loss_chunk_tokens:
        return ChunkedCausalLMLoss(chunk_tokens=resolved.loss_chunk_tokens)
    return causal_lm_loss


def forward_of(resolved: Resolved, model: nn.Module) -> Forward:
    """Return the function that calls the model in a dry run and returns what `loss_of` requires."""
    if resolved.loss_chunk_tokens:
        return chunked_loss.deferred(default_forward, model)
    return default_forward


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors in the state of an optimizer."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch with `input_ids` and `labels` [samples, length] on the meta device."""
    ids = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class StageTrace:
    """Memory, FLOPs and traffic of a forward and a backward of one pipeline stage."""

    figures: StageMode
    """Figures in the current recomputation mode of the blocks.

    `restored` and `stored` are empty, because they follow from a comparison of modes or from a
    store.
    """
    received: int
    """Bytes of the boundary activations of the previous stage."""
    differentiable: bool
    """True if the backward sends a gradient to the previous stage."""
    moments: StageIntervals
    """Live memory while each unit runs, in the order of the computation."""


class DryModel:
    """Fake copy of a model with techniques applied, which runs stage by stage."""

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
        """Copy a model. The model itself is not changed.

        Args:
            model: Unsharded model.
            apply: Applies techniques to the copy, in a FakeTensorMode. Returns the `Parts` of the
                copy, and its stages if it has a pipeline.
            device: Device of the fake tensors.
            batch: Micro-batch on any device.
            compute_dtype: Dtype of the parameters in forward and backward. None keeps the dtypes
                of the model.
            loss_fn: Loss.
            forward: Returns the function that calls the copy.
        """
        self._named = model
        self._device = device
        self.loss_fn = loss_fn
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

        with self.mode:
            fake = _fake_copy(model, device, compute_dtype)
            self.parts, self.staged = apply(fake)
            self._factor = torch.ones((), dtype=torch.float64, device=device)
            self.batch = _map_tensors(lambda x: torch.empty_like(x, device=device), batch)

        self.forward = forward(fake)
        region = self.parts.region
        if region is not None:
            region.split_logits_for(loss_fn)

    def trace(
        self,
        index: int = 0,
        received: Any = None,
        *,
        length: int = 0,
        splits: bool = False,
        first_unit: int = 0,
    ) -> tuple[StageTrace, Any]:
        """Run a forward and a backward of a stage.

        Args:
            index: Index of the stage.
            received: Boundary activations of the previous stage on the meta device; None for the
                first stage.
            length: Sequence length if the shapes of the stage depend on it, otherwise 0.
            splits: Whether the backward is split into input and weight gradients.
            first_unit: Unit index of the stage's first block (`recorder.Recorder`).

        Returns:
            The measurements, and the boundary activations of the stage on the meta device.

        Raises:
            ModelError: The model's code reads values of tensors.
        """

        with self.mode, _explained(self._named), skip_packed_row_search():
            fake_received = _map_tensors(lambda x: _like(x, self._device), received)
            stage = None if self.staged is None else self.staged.stages[index]
            return self._trace(stage, fake_received, length, splits, first_unit)

    def _trace(
        self, stage: Stage | None, received: Any, length: int, splits: bool, first_unit: int
    ) -> tuple[StageTrace, Any]:
        model = self.parts.model
        is_last = stage is None or stage.last
        names = self.parts.blocks if stage is None else stage.blocks
        units = {name: first_unit + index for index, name in enumerate(names)}
        batch = tensors_of(self.batch)
        recorder = DryRecorder(
            known=[*model.parameters(), *model.buffers(), *batch, self._factor],
            drops_gradients=not splits,
        )
        inputs = tensors_of(received)
        # The rank keeps what it received until the backward of the stage, although it was allocated
        # before the forward.
        recorder.hold(inputs)
        received_bytes = recorder.total
        inputs = [leaf for leaf in inputs if leaf.requires_grad]
        head = outer_units(self._named, names).head if stage is None else None
        remove = watch(model, units, recorder, last=is_last, head=head)
        deferred: Counter[int] = Counter()
        deferred_outside = 0

        try:
            with recorder:
                recorder.mark("forward", OUTSIDE)
                outputs, handed = self._forward(stage, received, length, recorder)
                forward = recorder.take()
                # What is alive between forward and backward is what the stage saves of a
                # micro-batch.
                saved = Counter(recorder.bytes)
                recorder.unit = BACKWARD
                recorder.mark("backward", LOSS if is_last else HEAD)
                gradients = None
                if not is_last:
                    gradients = [torch.empty_like(tensor) for tensor in outputs]
                if splits:
                    weight_backward = backward_inputs(outputs, gradients, inputs)
                    # Only what the backward of the weights still needs may stay alive.
                    del gradients
                    for tensor in inputs:
                        tensor.grad = None
                    deferred = Counter({unit: recorder.of_block(unit) for unit in units.values()})
                    deferred_outside = recorder.total - deferred.total()
                    input_moments = recorder.take()
                    recorder.mark("weights", OUTSIDE)
                    backward_weights(weight_backward)
                    moments = StageIntervals(forward, inputs=input_moments, weights=recorder.take())
                else:
                    if outputs:
                        torch.autograd.backward(outputs, gradients)
                    moments = StageIntervals(forward, backward=recorder.take())
        finally:
            remove()
            for parameter in model.parameters():
                parameter.grad = None

        trace = StageTrace(
            figures=StageMode(
                saved=tuple(saved[unit] for unit in units.values()),
                outside=saved[OUTSIDE],
                head=saved[HEAD],
                restored=(),
                flops=recorder.flops,
                traffic=dict(recorder.traffic),
                peak=recorder.peak,
                deferred=tuple(deferred[unit] for unit in units.values() if splits),
                deferred_outside=deferred_outside,
            ),
            received=received_bytes,
            differentiable=bool(inputs),
            moments=moments,
        )
        return trace, handed

    def _forward(
        self, stage: Stage | None, received: Any, length: int, recorder: DryRecorder
    ) -> tuple[list[torch.Tensor], Any]:
        """Return (tensors from which the backward starts, boundary activations)."""
        if stage is None:
            output = self.forward(self.parts.model, self.batch)
        else:
            assert self.staged is not None
            output = self.staged.run(
                stage, lambda model: self.forward(model, self.batch), received, length=length
            )
            if not stage.last:
                tensors = tensors_of(output)
                handed = _map_tensors(lambda x: _like(x, torch.device("meta")), output)
                return [tensor for tensor in tensors if tensor.requires_grad], handed

        recorder.mark("forward", LOSS)
        on_first_gradient(output, lambda: recorder.mark("backward", HEAD))
        total = self.loss_fn(output, self.batch)[0]
        # The engine scales the loss, so this multiplication is part of a step.
        return [total * self._factor.to(total.dtype)], None


def boundary_activations(model: nn.Module, parts: Parts, batch: dict[str, torch.Tensor]) -> Any:
    """Return the boundary activations of a stage on the meta device.

    Boundary activations are the tensors that a stage sends to the next one. They are hidden states
    [samples, length, hidden], as a tensor or in a tuple, whichever the blocks return. With sequence
    parallelism `length` is the length of this rank's shard.

    Raises:
        ModelError: The model has no `config.hidden_size`, or its blocks return other tensors than
            hidden states.
    """
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    name = type(model).__name__
    if width is None:
        raise ModelError(
            f"{name} has no config.hidden_size, so the shapes of the activations between its stages"
            " are not known before a run; set config.hidden_size of the model"
        )

    samples, length = batch["input_ids"].shape
    region = parts.region
    local_length = length
    if region is not None:
        region.length = length
        if region.sequence_parallel:
            local_length = shard_size(length, region.group.size())
    dtype = parts.shard.compute_dtype or next(model.parameters()).dtype

    def hidden(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() != 3 or leaf.shape[-1] != width or not leaf.is_floating_point():
            raise ModelError(
                f"{name}: its blocks return a tensor of shape {tuple(leaf.shape)}, not only"
                f" hidden states {width} wide, so the shapes of the activations between its stages"
                " are not known before a run; use blocks that return hidden states only"
            )

        return torch.empty(
            samples, local_length, width, dtype=dtype, device="meta", requires_grad=True
        )

    pipeline = parts.plans.pipeline
    output = pipeline.cut.returned if pipeline is not None else None
    if output is None:
        output = torch.empty(1, 1, width, device="meta")
    return tree_map(hidden, output)


class CountingStore:
    """Activation store that counts the bytes of the tensors per block without storing them."""

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()

    def begin(self) -> None:
        """Do nothing."""

    def open(self, index: int) -> _CountingGroup:
        """Return a group that adds the bytes of its tensors to block `index`."""
        return _CountingGroup(self, index)

    def prefetcher(self) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None

    def drain(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


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


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, tree)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(
        tensor.requires_grad
    )


def _fake_copy(
    model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None
) -> nn.Module:
    """Return a copy of a model with fake tensors. Requires an active FakeTensorMode.

    Floating-point parameters get the compute dtype, to which `fully_shard` would cast them.
    """
    # `deepcopy` takes the replacements from `memo`. Thus no real storage is copied, and tied
    # parameters stay tied.
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
        for value in (*direct_buffers(module).values(), *module.__dict__.values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake(value)
    return copy.deepcopy(model, memo)


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Raise ModelError instead of the errors of a model that reads values of fake tensors."""
    try:
        with refusing_triton_kernels():
            yield
    except KernelWithoutMemory as error:
        raise ModelError(
            f"{type(model).__name__} cannot be run on fake tensors: {error}, so its memory is not"
            " known before a run; run the prediction on the model without this kernel"
        ) from error
    except Exception as error:
        # torch raises unrelated classes for this: DataDependentOutputException,
        # DynamicOutputShapeException, GuardOnDataDependentSymNode, and a RuntimeError for the data
        # pointer of a fake tensor.
        kind = type(error).__name__
        reads_values = "DataDependent" in kind or "DynamicOutputShape" in kind
        if not reads_values and "data_ptr" not in str(error):
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be run on fake tensors: its code reads values of"
            f" tensors ({kind}), so its memory is not known before a run; set"
            " parallel.recompute.mode instead of a budget"
        ) from error


def drop_local_balance_loss(fake: nn.Module, mesh: Mesh) -> None:
    """Disable the balance loss of a fake copy on a rank that has a part of every sequence.

    A run computes it by `RouterStatistics` instead. The model's own would read the padding of full
    sequences from the mask of the part.
    """
    if mesh.layout.cp > 1:
        disable_balance_loss(fake)


def refuse_grouped_products(
    model: nn.Module, compute_dtype: torch.dtype | None, *, remedy: str
) -> None:
    """Raise ModelError for experts whose kernel does not support their dtype on fake tensors.

    Args:
        model: The model.
        compute_dtype: Dtype of forward and backward. None takes that of the parameters.
        remedy: Further remedy, which begins with a comma, or "".
    """
    dtype = compute_dtype or next(model.parameters()).dtype
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if implementation == "grouped_mm" and dtype != torch.bfloat16 and find_experts(model):
        raise ModelError(
            f"a dry run on fake tensors: {type(model).__name__} computes its experts in"
            f" {dtype_name(dtype)} by torch's grouped_mm, which supports only bfloat16 on fake"
            " tensors; set bf16.enabled = true, or build it with"
            f" experts_implementation='batched_mm'{remedy}"
        )


MODES: tuple[BlockMode, ...] = ("none", "selective", "full")


def solved_recompute(
    resolved: Resolved, parts: Parts, mesh: Mesh, *, loss_fn: Loss | None, forward: Forward
) -> Recompute:
    """Return the recompute settings of a configuration.

    If they have a memory budget, the result has one mode per block instead. The modes meet the
    budget.

    Args:
        resolved: The configuration.
        parts: Full, unsharded model, with the plans that the checks of the techniques created.
        mesh: Mesh of the run.
        loss_fn: Loss. None uses the loss of a causal language model.
        forward: Calls the model.
    """
    recompute = resolved.recompute
    precision = resolved.precision
    if recompute.mode != "budget":
        return recompute
    compute_dtype = dtype_of(precision.compute) if precision.compute else None
    refuse_grouped_products(
        parts.model, compute_dtype, remedy=", or set parallel.recompute.mode instead of a budget"
    )
    ranks = rank_activations(
        parts,
        mesh=mesh,
        batch=token_batch(resolved.batch.micro_batch_size, recompute.sequence_length),
        techniques=ActivationTechniques.of(resolved),
        compute_dtype=compute_dtype,
        loss_fn=loss_fn or causal_lm_loss,
        forward=forward,
    )
    return recompute.solved(ranks, rank=mesh.coordinates["pp"])


@dataclass(frozen=True)
class ActivationTechniques:
    """Settings of all techniques that change which tensors a rank saves for the backward."""

    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    tiled_mlp: TiledMLP = field(default_factory=TiledMLP)
    recompute: Recompute = field(default_factory=Recompute)
    """Settings of recomputation. Their mode is ignored, because every mode is measured."""
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)

    @classmethod
    def of(cls, resolved: Resolved) -> ActivationTechniques:
        """Return the techniques of a configuration."""
        return cls(**{entry.name: getattr(resolved, entry.name) for entry in fields(cls)})


def rank_activations(
    model_parts: Parts,
    *,
    mesh: Mesh,
    batch: Any,
    techniques: ActivationTechniques | None = None,
    compute_dtype: torch.dtype | None = None,
    loss_fn: Loss = causal_lm_loss,
    forward: Forward = default_forward,
) -> tuple[RankActivations, ...]:
    """Measure the activation memory of every pipeline rank for one micro-batch. Collective over tp.

    The results are maxima over the ranks of the tp mesh dimension, so that all of these ranks take
    the same decisions.

    Args:
        model_parts: Full, unsharded model, its blocks and the plan of its pipeline. The model is
            not changed.
        mesh: Mesh of the run.
        batch: Micro-batch with full sequences.
        techniques: Techniques that are applied to the model. None applies no technique.
        compute_dtype: Dtype of forward and backward.
        loss_fn: Loss.
        forward: Calls the model.

    Raises:
        ModelError: The model's code reads values of tensors.
    """
    model = model_parts.model
    blocks = model_parts.blocks
    pipeline = model_parts.plans.pipeline
    techniques = techniques or ActivationTechniques()
    tensor_parallel = techniques.tensor_parallel
    context_parallel = techniques.context_parallel
    tiled_mlp = techniques.tiled_mlp
    tiles = tiled_mlp.modules(model, blocks)
    batch = local_batch(batch, context_parallel, mesh.layout.cp, mesh.coordinates["cp"])
    schedule = ONE_STAGE
    bounds: Sequence[int] = (0, len(blocks))
    if pipeline is not None:
        schedule = pipeline.schedule
        bounds = pipeline.cut.bounds

    by_stage = [blocks[low:high] for low, high in pairwise(bounds)]
    stored: set[str] = set()
    for rank in range(schedule.pp):
        names = list(chain.from_iterable(by_stage[stage] for stage in schedule.stages_of(rank)))
        stored.update(names[: techniques.activation_offload.blocks(len(names))])
    # Only a split backward shows what a stage keeps until the gradients of its weights are
    # computed.
    actions = (action for row in schedule.ranks for action in row)
    split_stages = {action.stage for action in actions if action.kind is Kind.INPUT}

    def measure(
        mode: BlockMode, stored: Collection[str]
    ) -> list[tuple[StageTrace, tuple[int, ...]]]:
        """Run all stages, and return (trace, offloaded bytes per block) for each stage.

        Args:
            mode: Recomputation mode of all blocks.
            stored: Names of the blocks whose saved tensors are offloaded.
        """
        # The sort is stable, so stored and other blocks keep their order.
        order = tuple(sorted(blocks, key=lambda name: name not in stored))
        # Every block gets the same mode. `RankActivations` combines the figures of the modes by
        # block.
        same_mode = techniques.recompute.model_copy(
            update={"mode": mode, "every": 1, "assignment": (mode,) * len(blocks)}
        )
        store = CountingStore()

        def apply(fake: nn.Module) -> tuple[Parts, StagedModel | None]:
            drop_local_balance_loss(fake, mesh)
            offloaded = OffloadedActivations(store, len(stored)) if stored else None
            parts_of_copy = Parts(fake, blocks, Plans(tiled=tiles), offloaded_activations=offloaded)
            parts = context_parallel.apply(tensor_parallel.apply(parts_of_copy, mesh), mesh)
            staged = None
            if pipeline is not None:
                staged = stage_model(
                    fake,
                    pipeline.cut,
                    range(schedule.stages),
                    region=parts.region,
                    device=mesh.device,
                )

            # The store takes the first blocks of a rank, so these come first while it is applied.
            tiled = replace(tiled_mlp.apply(parts, mesh), blocks=order)
            return replace(same_mode.apply(tiled, mesh), blocks=blocks), staged

        dry = DryModel(
            model,
            apply,
            device=mesh.device,
            batch=batch,
            compute_dtype=compute_dtype,
            loss_fn=loss_fn,
            forward=lambda _: forward,
        )

        results = []
        boundary = None
        length = 0
        for index, names in enumerate(by_stage):
            splits = index in split_stages
            trace, boundary = dry.trace(index, boundary, length=length, splits=splits)
            region = dry.parts.region
            length = region.length if region is not None else 0
            stored_bytes: tuple[int, ...] = ()
            if stored:
                stored_bytes = tuple(store.bytes[order.index(name)] for name in names)
            results.append((trace, stored_bytes))

        return results

    # Without a store, every tensor that a block saves stays on the device and is counted.
    plain = measure("none", ())
    by_mode: dict[BlockMode, list[tuple[StageTrace, tuple[int, ...]]]] = {}
    # Without blocks nothing is recomputed, and the modes do not differ.
    for mode in MODES if blocks else MODES[:1]:
        if mode == "none" and not stored:
            by_mode[mode] = plain
        else:
            by_mode[mode] = measure(mode, stored)

    facts = []
    for stage in range(schedule.stages):
        stage_runs = {mode: runs[stage] for mode, runs in by_mode.items()}
        facts.append(max_over_tp(_facts(plain[stage][0], stage_runs), mesh))

    ranks = []
    for rank in range(schedule.pp):
        facts_of_stages = tuple(facts[stage] for stage in schedule.stages_of(rank))
        ranks.append(RankActivations(schedule, rank, facts_of_stages))
    return tuple(ranks)


def _facts(
    plain: StageTrace, modes: dict[BlockMode, tuple[StageTrace, tuple[int, ...]]]
) -> StageFacts:
    """Combine the traces of a stage in several recomputation modes.

    Args:
        plain: Trace without recomputation and without offload. Its saved bytes are those that the
            backward of a block needs on the device.
        modes: (trace, offloaded bytes per block), keyed by recomputation mode.
    """
    by_mode: dict[BlockMode, StageMode] = {}
    for mode, (trace, stored) in modes.items():
        saved = trace.figures.saved
        # While a block's tensors return, those of the block before it are prefetched.
        prefetched = (0,) * len(saved)
        if stored:
            prefetched = (0, *stored[:-1])
        restored = tuple(
            without_recompute - by_mode_bytes + arriving
            for without_recompute, by_mode_bytes, arriving in zip(
                plain.figures.saved, saved, prefetched, strict=True
            )
        )
        by_mode[mode] = replace(trace.figures, restored=restored, stored=stored)

    return StageFacts(by_mode, plain.received, plain.differentiable)


def max_over_tp(stage: StageFacts, mesh: Mesh) -> StageFacts:
    """Return the maximum over the tp mesh dimension for every figure. Collective over tp.

    Shards may be uneven, but all tp ranks must take the same decisions: either all of them
    recompute a block or none does, because recomputation repeats the block's collectives.
    """
    group = mesh.group("tp")
    if group is None:
        return stage
    # Traffic and peak stay those of this rank.
    names = [field.name for field in fields(StageMode) if field.name not in ("traffic", "peak")]
    rows = [getattr(figures, name) for figures in stage.modes.values() for name in names]
    flat_values = [value for row in rows for value in (row if isinstance(row, tuple) else (row,))]
    largest = iter(max_over_ranks(flat_values, group, device=mesh.device))

    modes = {}
    for mode, figures in stage.modes.items():
        changed: dict[str, Any] = {}
        for name in names:
            value = getattr(figures, name)
            if isinstance(value, tuple):
                changed[name] = tuple(next(largest) for _ in value)
            else:
                changed[name] = next(largest)
        modes[mode] = replace(figures, **changed)

    return replace(stage, modes=modes)
