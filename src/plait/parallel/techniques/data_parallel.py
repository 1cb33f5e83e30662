"""Data parallelism and ZeRO stages 0 to 3 over `dp_replicate` x `dp_shard` ranks.

Note [ZeRO stages]
    A stage defines what is sharded and what a step sends. P: bytes of all parameters, O: bytes of
    the parameters outside the blocks, k: micro-batches per step, n: ranks. Traffic is in units
    of (n - 1) / n. The last column is what a rank stores between two micro-batches.

    stage  sharded states             traffic per step  between micro-batches
    0      none                       2 P (all-reduce)  parameters, full gradients
    1      optimizer states           2 P               gathered parameters, full gradients
    2      gradients as well          (k + 1) P         gathered parameters, gradient shards
    3      parameters as well         3 k P - k O       shards only

    Stage 3 frees gathered parameters after their use. Parameters outside the blocks are gathered
    once per micro-batch: the root unit stays gathered from forward to the end of backward, the head
    from its forward to its backward, and an embedding does not need its weight in backward
    (`model.outer_layers`).

If parameters are neither sharded nor cast, `reducer.Reducer` reduces their gradients. Otherwise
torch's `fully_shard` shards the master weights and gathers a copy in the compute dtype. With
`dp_replicate > 1` (hybrid sharding) shards stay inside the `dp_shard` group, and the reduced shards
are all-reduced over `dp_replicate` once per step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.ignored_changes import GatheredWrites, watch_shards
from plait._torch.passes import backward_was_interrupted, reset_failed_step
from plait._torch.tensors import local_tensor, sum_before_reading
from plait._torch.unit_order import UnitOrder
from plait._torch.units import (
    keep_trainability,
    sharded_modules,
    wait_for_offloaded_gradients,
)
from plait.cluster.accelerator import HostCopy
from plait.cluster.layout import SAMPLE_AXES
from plait.cluster.mesh import Groups, Mesh
from plait.cluster.process_groups import is_fake
from plait.comm.all_reduce import GroupBuckets, Name, wire_bytes
from plait.comm.compress import factor_numel, factor_rank, owned_numel
from plait.comm.quantise import packed_bytes
from plait.comm.shared_memory.parameters import share_parameters
from plait.errors import ModelError
from plait.model.facts import ModelFacts
from plait.model.outer_layers import OuterUnits, outer_units
from plait.parallel.accounting.compression_scheme import copies, error_bytes, sent_bytes
from plait.parallel.accounting.ledger import (
    AfterBackward,
    Array,
    Ledger,
    after_block_backward,
    is_sharded,
    local_rows,
    of_experts,
    parameter_part,
)
from plait.parallel.data.buffers import ChangingBuffers
from plait.parallel.data.reducer import Reducer, partition
from plait.parallel.data.unused import UnusedTracker
from plait.parallel.hooks import FailureScope, StepHook
from plait.parallel.parts import Parts, Plans
from plait.parallel.precision.optimizer_states import state_bytes
from plait.parallel.shared_state import SharedState
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques import data_collectives
from plait.parallel.techniques.data_collectives import (
    CollectiveSettings,
    Compression,
    ShardCollectives,
)
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import OptimizerOffload, ParameterOffload
from plait.parallel.techniques.shard_units import (
    refuse_complex,
    refuse_quantised,
    refuse_uneven_complex,
    refuse_unusable_parameters,
    shard_units,
)

Stage = Literal[0, 1, 2, 3]


class DataParallel(CollectiveSettings):
    """Settings of the ZeRO stage and of the gradient reduction. See Note [ZeRO stages]."""

    batch_axes: ClassVar[tuple[str, ...]] = SAMPLE_AXES
    stage: Stage = 0
    """ZeRO stage: which states are sharded.

    0: everything is replicated. 1: optimizer states are sharded. 2: gradients too. 3: parameters
    too.
    """
    unused_parameters: bool = True
    """True if a step may leave parameters unused, possibly different ones on each rank.

    Costs one small all-reduce per step.
    """
    update_in_backward: bool = False
    """True to update a parameter inside backward, as soon as its gradient is complete.

    The gradient is freed after the update.
    """

    def check(self, context: TechniqueContext) -> Plans | None:
        """Check the parameters, and find the layers outside the blocks that become FSDP units.

        These layers are found before other techniques change the layers of the model.

        Returns:
            The plan of these units, or None if the context has no model.

        Raises:
            ModelError: A parameter cannot be trained.
        """
        if context.model is None:
            return None
        layout = context.layout
        is_cast = context.technique(Precision).compute is not None
        offloaded = (
            context.technique(OptimizerOffload).device != "none"
            or context.technique(ParameterOffload).device != "none"
        )
        # Casting and offloading wrap the model in FSDP even on a single rank.
        sharded = layout.dp_shard > 1 or is_cast or offloaded
        moved = layout.tp > 1 or any(
            p.device.type != context.device_type for p in context.model.parameters()
        )
        refuse_quantised(
            context.model, moved=moved or offloaded, cast=is_cast, several=layout.world_size > 1
        )
        refuse_unusable_parameters(
            context.model, sharded=sharded, moved=moved, summed=layout.dp * layout.cp > 1
        )
        refuse_uneven_complex(context.model, layout.dp_shard)
        return Plans(outer_units=outer_units(context.model, context.blocks))

    def groups(self, context: TechniqueContext) -> Groups:
        """Return the axes that need separate groups inside machines and across them."""
        compression = context.technique(Compression)
        layout = context.layout
        if _all_reduces(context):
            needs_levels = (
                not compression.scheme.gradients
                and self.all_reduce in data_collectives.NEEDS_LEVELS
            )
            if layout.dp_replicate > 1 and needs_levels:
                return Groups(levels=("dp_replicate",))
            return Groups()

        compressed = compression.scheme.gradient_bits or compression.candidates
        if layout.dp_shard > 1 and compressed:
            return Groups(levels=("dp_shard",))
        return Groups()

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Shard the model in place, or create the reducer of gradients if nothing is sharded."""
        shard = parts.shard
        parts = replace(parts, zero_stage=self.stage, tracks_unused=self.unused_parameters)
        if shard.compute_dtype is not None or shard.reduce_dtype is not None:
            refuse_complex(parts.model)
        # The stage does not matter on a single rank of dp_shard: there is nothing to shard.
        is_replicated = mesh.layout.dp_shard == 1 and shard.compute_dtype is None
        if is_replicated and not shard.master_weights_on_host and not shard.always_shard:
            group = mesh.group("dp_replicate")
            if group is None:
                return parts
            reduction = data_collectives.select_replicated(
                self, shard, group, mesh, gradient_bytes=_gradient_bytes(parts)
            )
            reducer = Reducer(
                parts.model,
                group,
                bucket_bytes=reduction.buckets.bucket_bytes,
                make_buckets=reduction.buckets.make_buckets,
                separate_vectors=shard.compression.gradients,
                reduce_dtype=shard.reduce_dtype,
                track_unused=self.unused_parameters,
                excluded=parts.separately_reduced,
            )
            reducer.description = reduction.description
            reducer.is_default_choice = reduction.is_default
            autotuner = reduction.autotuner_of(reducer, mesh)
            return replace(parts, reducer=reducer, compression_autotuner=autotuner)

        free_after_forward: bool | int = False
        if self.stage == 3:
            free_after_forward = self.secondary_partition or True
        shard_units(parts, mesh, free_after_forward=free_after_forward)
        collectives, autotuner = data_collectives.select_sharded(self, self.stage, parts, mesh)
        return replace(parts, shard_collectives=collectives, compression_autotuner=autotuner)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks of a step.

        These hooks reduce gradients, restore None as the gradient of unused parameters, and
        synchronise the buffers that a forward changes.
        """
        model = parts.model
        mean = parts.shard.mean
        hooks = list[StepHook]()
        reducer = parts.reducer
        collectives = parts.shard_collectives
        if reducer is not None:
            hooks.append(_attach_reducer(reducer, mean=mean))

        if isinstance(model, FSDPModule):
            steps = ShardedSteps(model, self.stage)
            if collectives is not None:
                steps.description = _place_in_shared_memory(collectives, parts)
                steps.is_default_choice = collectives.is_default
            hooks.append(steps)
            keep_trainability(model)
            if parts.shard.master_weights_on_host and mesh.layout.dp_replicate > 1:
                wait_for_offloaded_gradients(model)
            if not mean:
                reduce_by_sum(model)

            axes = parts.batch_axes
            # With expert parallelism the ranks of tp hold different experts, so they may differ in
            # the parameters that a step used.
            if mesh.layout.ep > 1:
                axes = (*axes, "tp")
            group = mesh.group(*axes)
            scalars = _scalar_reducer(parts, group, mesh, track_unused=self.unused_parameters)
            if scalars is not None:
                hooks.append(_attach_reducer(scalars, mean=mean))
            if self.unused_parameters and group is not None:
                # After `_place_in_shared_memory`, which replaces the all-gather of the units. The
                # order must wrap the replacement.
                hooks.append(
                    UnusedTracker(
                        model,
                        group,
                        device=mesh.device,
                        order=_unit_order(self, parts, mesh),
                        finishes_backward=mean,
                        have_errors=parts.compressors.have_errors,
                    )
                )

            # Shards in shared memory are read in place, so writes to them are not lost.
            reads_in_place = collectives is not None and collectives.parameter_host is not None
            if not reads_in_place and not is_fake():
                hooks.append(LostWrites(model, in_forward=mean))

        if mesh.layout.tp * mesh.layout.cp > 1 and not is_fake():
            # Before the hook of `buffers`, which would make differing states equal.
            is_sequence_split = parts.region is not None and parts.region.sequence_parallel
            hooks.append(
                SharedState(model, mesh, own_loop=mean, sequence_parallel=is_sequence_split)
            )
        buffers = ChangingBuffers(model, parts.blocks, mesh, parts.batch_axes)
        if mean:
            buffers.send_in_forward(model)
        return [*hooks, buffers]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add the bytes and the traffic of Note [ZeRO stages], including padding."""
        sharded = is_sharded(ledger)
        if not ledger.experts:
            return _account_parameters(self, ledger, facts, sharded=sharded)
        experts = tuple(p for p in facts.parameters if p.name in ledger.experts)
        shared = tuple(p for p in facts.parameters if p.name not in ledger.experts)
        total = _account_parameters(
            self, ledger, replace(facts, parameters=shared), sharded=sharded
        )
        # `ExpertGradients` sums the gradients of experts, by one plain all-reduce.
        expert_ledger = _account_parameters(
            self.model_copy(update={"all_reduce": "by-machines"}),
            of_experts(ledger),
            replace(facts, parameters=experts),
            sharded=sharded,
        )
        for kind, count in expert_ledger.memory.items():
            total = total.add_memory(kind, count)
        for collective, count in expert_ledger.traffic.items():
            total = total.add_traffic(collective, count)
        return total


class ShardedSteps(StepHook):
    """Hook that sets flags of `fully_shard` before every micro-batch. See Note [ZeRO stages]."""

    def __init__(self, model: FSDPModule, stage: Stage) -> None:
        assert isinstance(model, nn.Module)
        self.model = model
        self.stage = stage
        # torch's setters walk over all modules of the root. On a GPU the device waits for that.
        self._units = sharded_modules(model)

    def before_microbatch(self, last: bool) -> None:
        """Set which gradients are reduced and which parameters are freed in this micro-batch."""
        # Without a pipeline the only stage is stage 0, and the root unit ends its step together
        # with the blocks. Two backwards left stand for any number above one.
        backwards_left = 2
        if last:
            backwards_left = 1
        after_backward = after_block_backward(self.stage, {0: backwards_left}, ran=0, block_stage=0)
        for unit in self._units:
            set_unit_flags(unit, after_backward)

    def finish_reduction(self) -> None:
        """Free all gathered parameters."""
        # A forward after the last backward gathers parameters again. They would keep their old
        # values through the update.
        for unit in self._units:
            unit.reshard()

    def backward_failed(self) -> bool:
        """Return True if the last backward of the model ended with an exception."""
        return backward_was_interrupted(self.model)

    def on_error(self, lost: FailureScope) -> None:
        """Free all gathered parameters, and wait for the collectives in flight."""
        reset_failed_step(self.model, keep_gradients=lost == "forward")


def set_unit_flags(unit: FSDPModule, after_backward: AfterBackward) -> None:
    """Set whether `fully_shard` reduces and reshards a unit at the end of the next backward."""
    unit.set_requires_gradient_sync(after_backward.reduce, recurse=False)
    unit.set_requires_all_reduce(after_backward.last, recurse=False)
    unit.set_reshard_after_backward(after_backward.free, recurse=False)


class LostWrites(StepHook):
    """Hook that refuses models that write to gathered parameters, because such writes are lost.

    In the first step, the hook compares the parameters of a unit after the gather and before the
    resharding. On an accelerator it reads the result at the end of the second step, so that no step
    waits for the device.

    Args:
        model: The sharded model, before its first forward.
        in_forward: Whether to read the result before each forward, for training loops that do not
            call `finish_reduction`.
    """

    def __init__(self, model: FSDPModule, *, in_forward: bool) -> None:
        assert isinstance(model, nn.Module)
        self._writes = GatheredWrites(model)
        self._names: list[str] = []
        self._flags: HostCopy | None = None
        if in_forward:
            model.register_forward_pre_hook(lambda *_: self.finish_reduction(), prepend=True)

    def finish_reduction(self) -> None:
        """Raise ModelError if the first step wrote to a gathered parameter."""
        if self._writes.is_watching:
            compared = self._writes.take()
            if compared is None:
                return
            self._writes.is_watching = False
            self._names, flags = compared
            self._flags = HostCopy(flags)
            if not self._flags.is_ready():
                return
        if self._flags is None:
            return

        values = self._flags.values().tolist()
        self._flags = None
        for name, is_changed in zip(self._names, values, strict=True):
            if is_changed:
                raise ModelError(
                    f"{name}: the model writes to this parameter during the forward or backward."
                    " ZeRO gathers a copy of it, so what is written is lost when the copy is freed;"
                    " compute the changed value in the forward instead"
                    " (torch.nn.utils.parametrize), or use zero_optimization.stage = 0"
                )


def _all_reduces(context: TechniqueContext) -> bool:
    """Return True if nothing is sharded or cast, so that a `Reducer` reduces the gradients.

    `DataParallel.apply` makes the same decision from the settings that earlier techniques stored.
    """
    states = context.technique(OptimizerOffload)
    shards = context.technique(ParameterOffload)
    sharded = (
        context.layout.dp_shard > 1
        or states.device == "cpu"
        or (shards.device == "nvme" and not shards.with_states)
    )
    return not sharded and context.technique(Precision).compute is None


def _gradient_bytes(parts: Parts) -> int:
    """Return the bytes of the gradients that this rank reduces per step."""
    excluded = parts.separately_reduced
    trainable = [p for p in parts.model.parameters() if p.requires_grad and p not in excluded]
    return sum(
        local_tensor(p.detach()).numel() * (parts.shard.reduce_dtype or p.dtype).itemsize
        for p in trainable
    )


def _place_in_shared_memory(collectives: ShardCollectives, parts: Parts) -> str:
    """Move the shards to shared memory if this was selected.

    Returns:
        Description of how the shards are gathered.
    """
    sentences = [collectives.description]
    if collectives.parameter_host is not None:
        sentences.append(share_parameters(parts.model, collectives.parameter_host))
    return ". ".join(filter(None, sentences))


def _attach_reducer(reducer: Reducer, *, mean: bool) -> Reducer:
    reducer.mean = mean
    # An engine expects gradients only inside its backward, and sets this there.
    reducer.expects_gradients = mean
    reducer.attach()
    if mean:
        reducer.finish_with_backward()
    return reducer


def _scalar_reducer(
    parts: Parts, group: dist.ProcessGroup | None, mesh: Mesh, *, track_unused: bool
) -> Reducer | None:
    """Return the reducer of 0-dimensional parameters, which `fully_shard` cannot shard.

    The result is None if the model has no such parameter, or if `group` is None.
    """
    parameters = list(parts.model.parameters())
    sharded = frozenset(p for p in parameters if p.ndim > 0)
    if group is None or len(sharded) == len(parameters):
        return None
    return Reducer(
        parts.model,
        group,
        bucket_bytes=1 << 20,
        make_buckets=partial(GroupBuckets, group, device=mesh.device),
        track_unused=track_unused,
        excluded=sharded,
    )


def _unit_order(technique: DataParallel, parts: Parts, mesh: Mesh) -> UnitOrder | None:
    """Return the order of the units' collectives.

    The result is None in a pipeline, whose schedule fixes the order.
    """
    if mesh.layout.pp > 1:
        return None
    model: Any = parts.model
    outer = (parts.plans.outer_units or OuterUnits()).without(parts.shard.float32_modules)
    heads = []
    if outer.head is not None:
        heads.append(model.get_submodule(outer.head))
    return UnitOrder(
        model,
        is_fixed=technique.stage < 3,
        embeddings=[model.get_submodule(name) for name in outer.embeddings],
        heads=heads,
    )


def reduce_by_sum(model: nn.Module) -> None:
    """Make a sharded model sum gradients over ranks. torch's default is the mean.

    The engine has already divided every loss by its global weight.
    """
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # By default torch scales inside the collective, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)


def watch_shards_of(model: nn.Module) -> None:
    """Make the user's operations on sharded parameters correct, or refuse them.

    The norm of a sharded tensor, for example, is then the norm of the full tensor. Changes that
    would not reach the shards raise an error. Call this when the model has its final parameters.
    """
    sum_before_reading()
    for module in sharded_modules(model):
        watch_shards(module)


def free_after_evaluation(model: nn.Module, *, stays_gathered: Callable[[], bool]) -> None:
    """Free gathered parameters at the end of a forward without gradients.

    Code that later reads or writes the parameters of the model therefore accesses the shards.

    Args:
        model: The root. A model that is not sharded is left unchanged.
        stays_gathered: Function that is called after such a forward. If it returns True, nothing is
            freed.
    """

    def free_if_evaluated(*_: object) -> None:
        if not torch.is_grad_enabled() and not stays_gathered():
            free_gathered(model)

    if isinstance(model, FSDPModule):
        model.register_forward_hook(free_if_evaluated)


def free_gathered(model: nn.Module) -> None:
    """Reshard all gathered parameters, for example after an evaluation."""
    for module in sharded_modules(model):
        module.reshard()


def _account_parameters(
    technique: DataParallel, ledger: Ledger, facts: ModelFacts, *, sharded: NDArray[np.bool_]
) -> Ledger:
    """Add the bytes and the traffic of parameters that are all sharded over the same ranks.

    Note [ZeRO stages] defines the variables `n` and `k`.
    """
    stage = np.broadcast_to(np.asarray(technique.stage), ledger.dp_shard.shape)
    n = ledger.dp_shard
    replicas = ledger.dp_replicate
    k = ledger.accumulation
    total: defaultdict[str, Array] = defaultdict(lambda: np.zeros_like(n))
    # Models repeat a few shapes many times, so equal parameters are estimated once.
    for (shape, itemsize, trainable, in_block, tensor_dim), count in _shapes(facts, ledger).items():
        part = parameter_part(shape, tensor_dim, ledger)
        row_numel = part.row
        padded = part.padded
        compute: Any = itemsize
        if ledger.compute_bytes is not None:
            compute = ledger.compute_bytes
        reduce = compute
        if ledger.reduce_bytes is not None:
            reduce = ledger.reduce_bytes
        place = "root"
        if in_block:
            place = "block"

        total["parameters"] += count * padded * row_numel * itemsize
        total["gathered"] += count * padded * n * row_numel * compute
        shard = padded * row_numel
        sent = count * n * sent_bytes(ledger.scheme.weight_bits, shape, shard, compute)
        total[f"wire_gather_{place}"] += sent
        if in_block:
            # The all-gather of the backward, from a secondary partition with larger shards over
            # fewer ranks.
            ranks = technique.secondary_partition or n
            larger = sent_bytes(ledger.scheme.weight_bits, shape, shard * n // ranks, compute)
            total["wire_gather_again"] += count * (ranks - 1) * larger

        if trainable:
            total["gradients"] += count * padded * row_numel * itemsize
            states = state_bytes(
                ledger.optimizer_states,
                shape,
                itemsize=itemsize,
                tensors=ledger.optimizer_tensors,
                numel=part.local * row_numel,
            )
            total["optimizer"] += count * (states + ledger.optimizer_scalar_bytes)
            sent = count * n * sent_bytes(ledger.scheme.gradient_bits, shape, shard, reduce)
            total[f"wire_reduce_{place}"] += sent
            total["all_reduced"] += count * padded * row_numel * reduce
            total["compression"] += count * error_bytes(ledger.scheme, shape, shard, n)
            total["unsharded_gradients"] += count * part.rows * row_numel * reduce

    if technique.update_in_backward:
        total["gradients"] = _largest_gradients(ledger, facts, sharded)
    for kind in ("parameters", "gradients", "optimizer"):
        ledger = ledger.add_memory(kind, total[kind])

    # Additional memory between two micro-batches. In a pipeline it differs between the moments of a
    # step (`accounting.peak`).
    accumulates = (k > 1) & (ledger.stage is None)
    ledger = ledger.add_memory(
        "gathered_parameters",
        np.where(sharded & (stage < 3) & accumulates, total["gathered"], 0),
    )
    ledger = ledger.add_memory(
        "unsharded_gradients",
        np.where(sharded & (stage < 2) & accumulates, total["unsharded_gradients"], 0),
    )

    root_gathers = k
    root_reduces = k
    if ledger.stage is not None:
        root_gathers = ledger.stage.root_gathers
        root_reduces = ledger.stage.root_reduces
    gathers = (
        np.where(stage == 3, k, 1) * total["wire_gather_block"]
        + np.where(stage == 3, root_gathers, 1) * total["wire_gather_root"]
    )
    again = np.where(stage == 3, k, 0) * total["wire_gather_again"]
    reduces = (
        np.where(stage >= 2, k, 1) * total["wire_reduce_block"]
        + np.where(stage >= 2, root_reduces, 1) * total["wire_reduce_root"]
    )
    ledger = ledger.add_traffic("all_gather", np.where(sharded, gathers * (n - 1) // n + again, 0))
    ledger = ledger.add_traffic("reduce_scatter", np.where(sharded, reduces * (n - 1) // n, 0))
    ledger = ledger.add_memory("compression", np.where(sharded, total["compression"], 0))

    # The traffic of a plain all-reduce is that of all gradients together. Compression and other
    # algorithms depend on the buckets.
    depends_on_buckets = ledger.scheme.gradients or technique.all_reduce in _ALGORITHM_COLLECTIVES
    in_buckets = np.broadcast_to(~sharded & (replicas > 1) & depends_on_buckets, n.shape)
    all_reduces = 2 * total["all_reduced"] * (replicas - 1) // replicas
    ledger = ledger.add_traffic("all_reduce", np.where(in_buckets, 0, all_reduces))
    if not in_buckets.any():
        return ledger

    numels = []
    for parameter in facts.trainable:
        tensor_dim = ledger.tensor_dims.get(parameter.name)
        rows, row_numel = local_rows(parameter.shape, tensor_dim, ledger)
        numels.append(rows * row_numel)
    return _account_buckets(
        technique.all_reduce,
        ledger,
        facts,
        numels,
        bucket_bytes=technique.bucket_bytes,
        candidates=in_buckets,
    )


def _shapes(
    facts: ModelFacts, ledger: Ledger
) -> Counter[tuple[tuple[int, ...], int, bool, bool, int | None]]:
    """Count parameters by (shape, itemsize, trainable, in a block, dimension split over tp)."""
    return Counter(
        (p.shape, p.itemsize, p.trainable, p.unit >= 0, ledger.tensor_dims.get(p.name))
        for p in facts.parameters
    )


def _largest_gradients(ledger: Ledger, facts: ModelFacts, sharded: NDArray[np.bool_]) -> Array:
    """Return the peak bytes of gradients if parameters are updated inside the backward.

    In a sharded model the peak is the gradients of the largest unit, which are reduced together.
    Otherwise it is the gradient of the largest parameter.
    """
    zero = np.zeros_like(ledger.dp_shard)
    units: dict[int | str, Array] = {}
    largest = zero
    for parameter in facts.trainable:
        part = parameter_part(parameter.shape, ledger.tensor_dims.get(parameter.name), ledger)
        unit = facts.sharding_unit(parameter)
        units[unit] = units.get(unit, zero) + part.padded * part.row * parameter.itemsize
        largest = np.maximum(largest, part.rows * part.row * parameter.itemsize)
    return np.where(sharded, np.max([zero, *units.values()], axis=0), largest)


_ALGORITHM_COLLECTIVES: dict[str, tuple[str, ...]] = {
    "reduce-scatter+all-gather": ("reduce_scatter", "all_gather"),
    "ring": ("send",),
    "recursive-doubling": ("send",),
}
"""Collectives under which the ledger counts the messages of an algorithm, in equal parts.

The hierarchical algorithm is absent, because it sends as many bytes as one all-reduce.
"""


def _account_buckets(
    algorithm: str,
    ledger: Ledger,
    facts: ModelFacts,
    numels: Iterable[Array],
    *,
    bucket_bytes: int,
    candidates: NDArray[np.bool_],
) -> Ledger:
    """Add the traffic and memory of ZeRO stage 0 that depend on the gradient buckets.

    The added bytes are those of the first rank.

    Args:
        algorithm: Name of the algorithm that sums uncompressed gradients.
        ledger: The ledger of all candidate layouts.
        facts: The parameters of the model.
        numels: Elements of every trainable parameter on a rank, in the order of `facts`.
        bucket_bytes: Size of a gradient bucket.
        candidates: Mask of the candidates to account.
    """
    columns = [np.broadcast_to(numel, candidates.shape) for numel in numels]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send", "compression", "gradients")
    sums = {kind: np.zeros_like(ledger.dp_replicate) for kind in kinds}
    for candidate in np.flatnonzero(candidates):
        costs = _candidate_costs(
            algorithm,
            ledger,
            facts,
            [int(column[candidate]) for column in columns],
            bucket_bytes=bucket_bytes,
            candidate=int(candidate),
        )
        for kind, count in costs.items():
            sums[kind][candidate] = count

    for kind in ("compression", "gradients"):
        ledger = ledger.add_memory(kind, sums.pop(kind))
    for kind, counts in sums.items():
        ledger = ledger.add_traffic(kind, counts)
    return ledger


def _candidate_costs(
    algorithm: str,
    ledger: Ledger,
    facts: ModelFacts,
    numels: Sequence[int],
    *,
    bucket_bytes: int,
    candidate: int,
) -> Counter[str]:
    """Return the bytes of each kind of traffic and of memory, for one candidate of the ledger."""
    scheme = ledger.scheme
    parameters = facts.trainable
    ranks = int(ledger.dp_replicate[candidate])
    tensor_dims: Mapping[str, int | None] = {}
    if int(ledger.tp[candidate]) > 1:
        tensor_dims = ledger.tensor_dims

    # A bucket has parameters of one kind only, as in `Reducer._partition`.
    sizes: list[tuple[int, Hashable]] = []
    for numel, parameter in zip(numels, parameters, strict=True):
        kind = (
            parameter.itemsize,
            len(parameter.shape) > 1 or not scheme.gradients,
            tensor_dims.get(parameter.name) is not None,
        )
        sizes.append((numel * parameter.itemsize, kind))

    costs = Counter[str]()
    carried = 0
    if scheme.powersgd_rank:
        # PowerSGD's count of steps, int64.
        carried += 8
    for members in partition(sizes, bucket_bytes):
        numel = sum(numels[i] for i in members)
        itemsize = parameters[members[0]].itemsize
        if ledger.reduce_bytes is not None:
            itemsize = int(ledger.reduce_bytes[candidate])

        if not scheme.gradients:
            # All ranks count as one machine, because only the total matters.
            total_bytes, _ = wire_bytes(
                cast(Name, algorithm), numel=numel, itemsize=itemsize, ranks=ranks, per_node=ranks
            )
            collectives = _ALGORITHM_COLLECTIVES[algorithm]
            for collective in collectives:
                costs[collective] += total_bytes // len(collectives)
        elif len(parameters[members[0]].shape) < 2:
            # Vectors are sent uncompressed.
            costs["all_reduce"] += 2 * (ranks - 1) * numel * itemsize // ranks
        elif scheme.powersgd_rank:
            shapes = [parameters[i].shape for i in members]
            factors = sum(factor_numel(shape, scheme.powersgd_rank) for shape in shapes)
            costs["all_reduce"] += 2 * (ranks - 1) * factors * max(itemsize, 4) // ranks
            right_factors = sum(
                prod(shape[1:]) * factor_rank(shape, scheme.powersgd_rank) for shape in shapes
            )
            # Residuals of the bucket and right factors, at least in float32.
            carried += (numel + right_factors) * max(itemsize, 4) * bool(right_factors)
        else:
            part_numel = owned_numel(numel, ranks)
            for collective in ("reduce_scatter", "all_gather"):
                costs[collective] += (ranks - 1) * packed_bytes(part_numel, scheme.gradient_bits)
            # float32 residuals of both collectives: all parts, and the part of this rank.
            carried += 4 * (ranks + 1) * part_numel * scheme.error_feedback
            # Buckets are padded to equal parts.
            costs["gradients"] += (ranks * part_numel - numel) * itemsize
    costs["compression"] = copies(scheme) * carried
    return costs
