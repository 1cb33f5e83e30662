"""Data parallelism and ZeRO stages 0 to 3 over `dp_replicate` x `dp_shard` ranks.

A stage is a meaning, in bytes and in traffic (P: bytes of all parameters, k: micro-batches of a
step, n: ranks; times (n-1)/n):

    stage  sharded                            traffic per step           between micro-batches a
    rank holds 0      nothing                            2 P   (one all-reduce)     parameters, full
    gradients 1      optimizer states                   2 P                        gathered
    parameters, full gradients 2      and gradients                      (k + 1) P
    gathered parameters, gradient shards 3      and parameters, freed after use    3 k P - k O
    shards only

O are the bytes of the parameters outside of the blocks, which are gathered once per micro-batch:
the root unit stays gathered from the forward to the end of the backward, the head from its forward
to its backward, and an embedding does not need its weight in the backward (`model.outer_units`).

Mechanisms: replicated parameters in their own dtype use `reducer.Reducer`; everything else is
torch's `fully_shard`, which keeps the master weights sharded and gathers a copy in the compute
dtype. With `dp_replicate > 1` (hybrid sharding) shards stay inside the `dp_shard` group and the
reduced shards are all-reduced across, once per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.dtensor import local_tensor, sum_before_reading
from plait._torch.passes import reset_failed_step
from plait._torch.unit_order import UnitOrder
from plait._torch.units import keep_trainability, sharded_modules
from plait._torch.watched_shards import watch_shards
from plait.cluster.layout import SAMPLE_AXES
from plait.cluster.mesh import Groups, Mesh
from plait.comm.buckets import GroupBuckets
from plait.comm.shared_memory.parameters import share_parameters
from plait.model.facts import ModelFacts
from plait.model.outer_units import OuterUnits, outer_units
from plait.parallel.accounting.compression_scheme import error_bytes, sent_bytes
from plait.parallel.accounting.expert_view import is_sharded, of_experts
from plait.parallel.accounting.ledger import Array, Ledger, local_rows, part_of
from plait.parallel.accounting.zero_rule import of_block
from plait.parallel.buffers import ChangingBuffers
from plait.parallel.data import collective_selection
from plait.parallel.data.bucket_account import ALGORITHM_KINDS, account_buckets
from plait.parallel.data.collective_selection import CollectiveSettings, Sharing
from plait.parallel.data.compression import Compression
from plait.parallel.data.gathered_writes import LostWrites
from plait.parallel.data.reducer import Reducer
from plait.parallel.data.shard_units import shard_units
from plait.parallel.data.unused import UnusedTracker
from plait.parallel.hooks import Lost, StepHook
from plait.parallel.offload.optimizer_offload import OptimizerOffload
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.parameter_checks import (
    refuse_complex,
    refuse_quantised,
    refuse_unusable_parameters,
)
from plait.parallel.precision.mixed_precision import Precision
from plait.parallel.precision.optimizer_states import state_bytes
from plait.parallel.technique import Context, Parts

Stage = Literal[0, 1, 2, 3]


class DataParallel(CollectiveSettings):
    """ZeRO stage, and how gradients are reduced."""

    batch_axes: ClassVar[tuple[str, ...]] = SAMPLE_AXES
    stage: Stage = 0
    """0 replicated; 1 optimizer states sharded; 2 gradients too; 3 parameters too."""
    unused_parameters: bool = True
    """Let a step leave parameters unused, also different ones on different ranks. Costs one small
    all-reduce a step.
    """
    update_in_backward: bool = False
    """Update a parameter when its gradient is complete, inside of the backward, and free the
    gradient.
    """

    def check(self, context: Context) -> OuterUnits | None:
        """Find the outer units before other techniques change the model's layers.

        Raises:
            ModelError: A parameter cannot be trained.
        """
        if context.model is None:
            return None
        layout = context.layout
        offloads = (
            context.chosen(OptimizerOffload).device,
            context.chosen(ParameterOffload).device,
        )
        cast = context.chosen(Precision).compute is not None
        offloaded = set(offloads) != {"none"}
        # Casting and offloading wrap the model in FSDP even on a single rank.
        sharded = layout.dp_shard > 1 or cast or offloaded
        moved = layout.tp > 1 or any(
            p.device.type != context.device_type for p in context.model.parameters()
        )
        refuse_quantised(
            context.model, moved=moved or offloaded, cast=cast, several=layout.world_size > 1
        )
        refuse_unusable_parameters(
            context.model, sharded=sharded, moved=moved, summed=layout.dp * layout.cp > 1
        )
        return outer_units(context.model, context.blocks)

    def groups(self, context: Context) -> Groups:
        """Return the axes whose collectives run within and between machines in turn."""
        compression = context.chosen(Compression)
        layout = context.layout
        if _all_reduces(context):
            needs_levels = (
                not compression.scheme.gradients
                and self.all_reduce in collective_selection.NEEDS_LEVELS
            )
            return Groups(
                levels=("dp_replicate",) if layout.dp_replicate > 1 and needs_levels else ()
            )
        compressed = compression.scheme.gradient_bits or compression.candidates
        return Groups(levels=("dp_shard",) if layout.dp_shard > 1 and compressed else ())

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Shard in place, or make the gradient reducer."""
        shard = parts.shard
        compression = parts.noted(Compression) or Compression()
        parts = parts.with_notes(self)
        if shard.compute_dtype is not None or shard.reduce_dtype is not None:
            refuse_complex(parts.model)
        whole = mesh.layout.dp_shard == 1 and shard.compute_dtype is None
        # nothing to shard, nothing to cast
        if whole and not shard.master_weights_on_host and not shard.always_shard:
            group = mesh.group("dp_replicate")
            if group is None:
                return parts
            summing = collective_selection.replicated(
                self, compression, group, mesh, gradient_bytes=_gradient_bytes(parts)
            )
            reducer = Reducer(
                parts.model,
                group,
                bucket_bytes=summing.way.bucket_bytes,
                make_buckets=summing.way.make_buckets,
                separate_vectors=compression.scheme.gradients,
                reduce_dtype=shard.reduce_dtype,
                track_unused=self.unused_parameters,
                apart=parts.apart,
            )
            reducer.said = summing.said
            reducer.said_is_default = summing.is_default
            return parts.with_notes(reducer, summing.autotuner_of(reducer, mesh))
        shard_units(
            parts,
            mesh,
            free_after_forward=(self.secondary_partition or True) if self.stage == 3 else False,
        )
        sharing = collective_selection.sharded(self, compression, self.stage, parts, mesh)
        return parts.with_notes(sharing, sharing.autotuner, sharing.compressors)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks of a step.

        They reduce gradients, restore None as the gradient of unused parameters, and synchronise
        buffers that a forward changes.
        """
        model = parts.model
        mean = parts.shard.mean
        hooks = list[StepHook]()
        reducer = parts.noted(Reducer)
        sharing = parts.noted(Sharing)
        if reducer is not None:
            hooks.append(_attached(reducer, mean=mean))
        if isinstance(model, FSDPModule):
            steps = ShardedSteps(model, self.stage)
            if sharing is not None:
                steps.said = _description(sharing, parts)
                steps.said_is_default = sharing.is_default
            hooks.append(steps)
            keep_trainability(model)
            if not mean:
                reduce_by_sum(model)
            # With expert parallelism the ranks of tp hold different experts, so they may differ in
            # the parameters that a step used.
            group = mesh.group(*parts.batch_axes, *(("tp",) if mesh.layout.ep > 1 else ()))
            scalars = _scalar_reducer(parts, group, mesh, track_unused=self.unused_parameters)
            if scalars is not None:
                hooks.append(_attached(scalars, mean=mean))
            if self.unused_parameters and group is not None:
                # After `_description`, because shared memory replaces the gathering of units, and
                # the order has to wrap what it puts there.
                order = _unit_order(self, parts, mesh)
                hooks.append(
                    UnusedTracker(
                        model, group, device=mesh.device, order=order, finishes_backward=mean
                    )
                )
            if sharing is None or sharing.parameter_host is None:
                # Shards in shared memory are read in place, so writes to them are kept.
                hooks.append(LostWrites(model, in_forward=mean))
        buffers = ChangingBuffers(model, parts.blocks, mesh, parts.batch_axes)
        if mean:
            buffers.send_in_forward(model)
        return [*hooks, buffers]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Bytes and traffic of the table above, exact to the padding."""
        return _account(self, ledger, facts)


def _all_reduces(context: Context) -> bool:
    """Whether there will be a reducer (`apply` asks the same of what the techniques before it have
    left): nothing is sharded or cast.
    """
    states = context.chosen(OptimizerOffload)
    shards = context.chosen(ParameterOffload)
    sharded = (
        context.layout.dp_shard > 1
        or states.device == "cpu"
        or (shards.device == "nvme" and not shards.with_states)
    )
    return not sharded and context.chosen(Precision).compute is None


def _description(sharing: Sharing, parts: Parts) -> str:
    """Put shards into shared memory if it was chosen, and describe how they are gathered."""
    words = (
        share_parameters(parts.model, sharing.parameter_host)
        if sharing.parameter_host is not None
        else ""
    )
    return ". ".join(filter(None, (sharing.said, words)))


def _attached(reducer: Reducer, *, mean: bool) -> Reducer:
    """Let a reducer listen to its parameters, and return it."""
    reducer.mean = reducer.accepts = mean
    reducer.attach()
    if mean:
        reducer.finish_with_backward()
    return reducer


def _scalar_reducer(
    parts: Parts, group: dist.ProcessGroup | None, mesh: Mesh, *, track_unused: bool
) -> Reducer | None:
    """Return the reducer of 0-dimensional parameters, which `fully_shard` cannot shard.

    The result is None if the model has none, or if `group` is None.
    """
    parameters = list(parts.model.parameters())
    others = frozenset(p for p in parameters if p.ndim > 0)
    if group is None or len(others) == len(parameters):
        return None
    return Reducer(
        parts.model,
        group,
        bucket_bytes=1 << 20,
        make_buckets=partial(GroupBuckets, group, device=mesh.device),
        track_unused=track_unused,
        apart=others,
    )


def _unit_order(technique: DataParallel, parts: Parts, mesh: Mesh) -> UnitOrder | None:
    """Return the order of the units' collectives.

    The result is None in a pipeline, whose schedule fixes the order.
    """
    if mesh.layout.pp > 1:
        return None
    model: Any = parts.model
    outer = (parts.noted(OuterUnits) or OuterUnits()).without(parts.shard.float32_modules)
    return UnitOrder(
        model,
        is_fixed=technique.stage < 3,
        embeddings=[model.get_submodule(name) for name in outer.embeddings],
        heads=[model.get_submodule(outer.head)] if outer.head is not None else [],
    )


def _gradient_bytes(parts: Parts) -> int:
    """Return the bytes of the gradients that this rank reduces per step."""
    apart = parts.apart
    trainable = [p for p in parts.model.parameters() if p.requires_grad and p not in apart]
    return sum(
        local_tensor(p.detach()).numel() * (parts.shard.reduce_dtype or p.dtype).itemsize
        for p in trainable
    )


def reduce_by_sum(model: nn.Module) -> None:
    """Make the reductions of shards sums: the engine has divided every loss by the global weight
    already. torch's default is the mean over ranks.
    """
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled reduction


class ShardedSteps(StepHook):
    """Gives every ZeRO stage its meaning from micro-batch to micro-batch."""

    def __init__(self, model: FSDPModule, stage: Stage) -> None:
        assert isinstance(model, nn.Module)
        self.model = model
        self.stage = stage
        self._root = model

    def before_microbatch(self, last: bool) -> None:
        """Which gradients are reduced, and which parameters are freed."""
        # one stage, and the root unit ends its step with the blocks
        then = of_block(self.stage, {0: 1 if last else 2}, ran=0, own=0)
        self.model.set_requires_gradient_sync(then.reduce)
        self.model.set_requires_all_reduce(then.last)
        self.model.set_reshard_after_backward(then.free)

    def finish_reduction(self) -> None:
        """Nothing gathered is left."""
        # a forward between the last backward and this would keep the old values, or be read
        # while they change
        free_gathered(self._root)

    def on_error(self, lost: Lost) -> None:
        """Everything is sharded, and nothing awaited."""
        reset_failed_step(self._root, keep_gradients=lost == "forward")


def watch_shards_of(model: nn.Module) -> None:
    """What a user does with shards is right or refused: reading numbers of them, and writing to
    what is not them. When the model has the parameters that it keeps.
    """
    sum_before_reading()
    for module in sharded_modules(model):
        watch_shards(module)


def free_after_evaluation(model: nn.Module, unless: Callable[[], bool] = lambda: False) -> None:
    """Free what a forward without gradients gathered, when it ends: code that then reads or writes
    the model's parameters finds the shards.
    """

    def after(*_: object) -> None:
        if not torch.is_grad_enabled() and not unless():
            free_gathered(model)

    if isinstance(model, FSDPModule):
        model.register_forward_hook(after)


def free_gathered(model: nn.Module) -> None:
    """Reshard gathered parameters, e.g. after an evaluation, so that the model holds its shards."""
    for module in sharded_modules(model):
        module.reshard()


def _account(technique: DataParallel, ledger: Ledger, facts: ModelFacts) -> Ledger:
    if not ledger.experts:
        return _account_of(technique, ledger, facts, sharded=is_sharded(ledger))
    apart = tuple(p for p in facts.parameters if p.name in ledger.experts)
    rest = tuple(p for p in facts.parameters if p.name not in ledger.experts)
    found = _account_of(
        technique, ledger, replace(facts, parameters=rest), sharded=is_sharded(ledger)
    )
    plain = technique.model_copy(update={"all_reduce": "by-machines"})  # another hook sums them
    view = _account_of(
        plain, of_experts(ledger), replace(facts, parameters=apart), sharded=is_sharded(ledger)
    )
    for kind, count in view.memory.items():
        found = found.add_memory(kind, count)
    for collective, count in view.traffic.items():
        found = found.add_traffic(collective, count)
    return found


def _account_of(
    technique: DataParallel, ledger: Ledger, facts: ModelFacts, *, sharded: NDArray[np.bool_]
) -> Ledger:
    stage = np.broadcast_to(np.asarray(technique.stage), ledger.dp_shard.shape)
    n = ledger.dp_shard
    replicas = ledger.dp_replicate
    k = ledger.accumulation
    # One column a distinct shape, split and so on: models repeat a few shapes many times.
    kinds = (
        "parameters",
        "gradients",
        "optimizer",
        "gathered",
        "wire_gather_block",
        "wire_gather_root",
        "wire_reduce_block",
        "wire_reduce_root",
        "wire_gather_again",
        "across",
        "compression",
        "whole",
    )
    total: dict[str, Array] = {kind: np.zeros_like(n) for kind in kinds}
    for (shape, itemsize, trainable, in_block, tensor_dim), count in _shapes(facts, ledger).items():
        part = part_of(shape, tensor_dim, ledger)
        rows = part.rows
        row_numel = part.row
        padded = part.padded
        compute = itemsize if ledger.compute_bytes is None else ledger.compute_bytes
        reduce = compute if ledger.reduce_bytes is None else ledger.reduce_bytes
        total["parameters"] += count * padded * row_numel * itemsize
        total["gathered"] += count * padded * n * row_numel * compute
        shard = padded * row_numel
        again = technique.secondary_partition or n
        sent = count * n * sent_bytes(ledger.scheme.weight_bits, shape, shard, compute)
        total["wire_gather_block" if in_block else "wire_gather_root"] += sent
        if in_block:  # the backward's gathering, which may have larger shards over fewer ranks
            larger = sent_bytes(ledger.scheme.weight_bits, shape, shard * n // again, compute)
            total["wire_gather_again"] += count * (again - 1) * larger
        if trainable:
            total["gradients"] += count * padded * row_numel * itemsize
            states = state_bytes(
                ledger.optimizer_states,
                shape,
                itemsize=itemsize,
                tensors=ledger.optimizer_tensors,
                numel=part.held * row_numel,
            )
            total["optimizer"] += count * (states + ledger.optimizer_scalar_bytes)
            sent = count * n * sent_bytes(ledger.scheme.gradient_bits, shape, shard, reduce)
            total["wire_reduce_block" if in_block else "wire_reduce_root"] += sent
            total["across"] += count * padded * row_numel * reduce
            total["compression"] += count * error_bytes(ledger.scheme, shape, shard, n)
            total["whole"] += count * rows * row_numel * reduce
    # a pipeline's, after each computation, are `pipeline.account.held_after`
    accumulates = (k > 1) & (ledger.stage is None)
    between = {
        "gathered_parameters": np.where(sharded & (stage < 3) & accumulates, total["gathered"], 0),
        "unsharded_gradients": np.where(sharded & (stage < 2) & accumulates, total["whole"], 0),
    }
    if technique.update_in_backward:
        total["gradients"] = _largest_gradients(ledger, facts, sharded)
    for kind in ("parameters", "gradients", "optimizer"):
        ledger = ledger.add_memory(kind, total[kind])
    for kind, extra in between.items():
        ledger = ledger.add_memory(kind, extra)
    root_gathers = k if ledger.stage is None else ledger.stage.root_gathers
    root_reduces = k if ledger.stage is None else ledger.stage.root_reduces
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
    special = ledger.scheme.gradients or technique.all_reduce in ALGORITHM_KINDS
    in_buckets = np.broadcast_to(~sharded & (replicas > 1) & special, n.shape)
    ledger = ledger.add_traffic(
        "all_reduce", np.where(in_buckets, 0, 2 * total["across"] * (replicas - 1) // replicas)
    )
    if not in_buckets.any():
        return ledger
    numels = [
        rows * of_row
        for rows, of_row in (
            local_rows(p.shape, ledger.tensor_dims.get(p.name), ledger) for p in facts.trainable
        )
    ]
    return account_buckets(
        technique.all_reduce,
        ledger,
        facts,
        numels,
        bucket_bytes=technique.bucket_bytes,
        at=in_buckets,
    )


def _largest_gradients(ledger: Ledger, facts: ModelFacts, sharded: NDArray[np.bool_]) -> Array:
    """Bytes of the gradients that exist at the same time where parameters are updated in the
    backward: those of the largest unit, which are reduced together; where nothing is sharded, the
    largest parameter's.
    """
    zero = np.zeros_like(ledger.dp_shard)
    units: dict[int | str, Array] = {}
    largest = zero
    for parameter in facts.trainable:
        part = part_of(parameter.shape, ledger.tensor_dims.get(parameter.name), ledger)
        unit = facts.sharding_unit(parameter)
        units[unit] = units.get(unit, zero) + part.padded * part.row * parameter.itemsize
        largest = np.maximum(largest, part.rows * part.row * parameter.itemsize)
    return np.where(sharded, np.max([zero, *units.values()], axis=0), largest)


def _shapes(
    facts: ModelFacts, ledger: Ledger
) -> Counter[tuple[tuple[int, ...], int, bool, bool, int | None]]:
    return Counter(
        (p.shape, p.itemsize, p.trainable, p.unit >= 0, ledger.tensor_dims.get(p.name))
        for p in facts.parameters
    )
