"""Selection and compression of the collectives between data-parallel ranks.

The selection is made once, when the model is sharded. The first of these that applies decides: the
configured compression, the configured algorithm, shared memory, a measurement of the links at the
start of the run, or torch's default.

Note [Same selection on all ranks of tp]
    Replicated parameters must keep the same bits on all ranks of tp, but each of these ranks sums
    the gradients of the parameters in a separate data-parallel group. Different algorithms add in
    different orders. Therefore all groups use the selection of the first rank of tp, even if their
    links or machines differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from plait._torch.units import DefaultReduceScatter, ReduceScatter, sharded_modules
from plait.cluster.mesh import Levels, Mesh
from plait.cluster.process_groups import is_fake
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.comm.all_reduce import AlgorithmBuckets, Buckets, Flat, Name
from plait.comm.choose import choose_buckets
from plait.comm.measure import find_links, refine
from plait.comm.transport import Transport, TransportName, connect
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.data.compression import (
    CompressedUnits,
    CompressionAutotuner,
    CompressionCandidate,
    Residuals,
)
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts, ShardCollectives, ShardSettings
from plait.parallel.technique import Technique
from plait.sizes import MIB

T = TypeVar("T")
MakeBuckets = Callable[[Sequence[Flat]], Buckets]
NEEDS_LEVELS = ("by-machines", "hierarchical")
"""Values of `all_reduce` that depend on which ranks share a machine."""


class CollectiveSettings(Technique):
    """Settings of the collectives between data-parallel ranks."""

    bucket_bytes: int = 25 * MIB
    """Approximate size of a gradient bucket at stage 0. Sharded stages reduce block by block."""
    transport: TransportName = "prefer-shared-memory"
    """Transport between processes: shared memory inside a machine, or torch's collectives."""
    all_reduce: Name | Literal["by-machines"] = "by-machines"
    """Algorithm of the all-reduce of gradients at stage 0 (see `comm.all_reduce`).

    `by-machines` is hierarchical if the group spans several machines with several ranks each.
    Otherwise it is shared memory or the backend's own algorithm.
    """
    measure_seconds: float = 0.0
    """Seconds for which `by-machines` measures the links when the model is sharded. 0: never.

    Nothing is measured if the ranks use shared memory.
    """
    kept_links: str | None = None
    """File that stores the measured links for the next start of the run."""
    bucket_by_links: bool = False
    """True if measured links also determine the size of a bucket. Otherwise `bucket_bytes` does."""
    secondary_partition: int = 0
    """Ranks over which stage 3 shards the parameters of a block between forward and backward.

    The backward gathers them from these neighbouring ranks. 0: from all ranks of dp_shard.
    """


class Compression(Technique):
    """Settings of the compression of gradients and gathered parameters.

    The technique only stores the scheme, or the candidates that are compared in the first steps.
    `DataParallel` installs the compressed collectives.
    """

    scheme: Scheme = Scheme()
    """Scheme that is used from the first step."""
    candidates: tuple[Scheme, ...] = ()
    """Candidates for the first steps, the least lossy first (see `CompressionAutotuner`)."""

    @property
    def gradients(self) -> bool:
        """True if gradients are compressed, or the first steps may select compression."""
        return self.scheme.gradients or bool(self.candidates)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The configured scheme and all candidates."""
        return (self.scheme, *self.candidates)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Store the scheme and the candidates for `DataParallel`."""
        return parts.with_shard(compression=self.scheme, compression_candidates=self.candidates)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks that select the compression and store its state between steps."""
        if not self.gradients:
            return []
        residuals = Residuals(
            parts.reducer, parts.compressors, device=mesh.device, own_loop=parts.shard.mean
        )
        autotuner = parts.compression_autotuner
        if autotuner is None:
            return [residuals]
        return [autotuner, residuals]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Store the scheme in the ledger for `DataParallel.account`, which counts the traffic."""
        return ledger.with_(scheme=self.scheme)


def select_replicated(
    technique: CollectiveSettings,
    shard: ShardSettings,
    group: dist.ProcessGroup,
    mesh: Mesh,
    *,
    gradient_bytes: int,
) -> ReplicatedReduction:
    """Select the reduction of replicated gradients. Collective over the group and tp.

    Args:
        technique: The settings.
        shard: Settings of sharding, which contain the compression scheme or the candidate schemes.
        group: The ranks that sum gradients.
        mesh: The mesh of all ranks.
        gradient_bytes: Bytes of all gradients that this rank reduces per step.

    Raises:
        ConfigError: `all_reduce` is "hierarchical", which requires several machines, each with
            the same number of at least two ranks of the group.
    """
    scheme = shard.compression
    if scheme.gradients:
        compressed = BucketReduction(
            partial(scheme.buckets, group, mesh.device), technique.bucket_bytes
        )
        return ReplicatedReduction(compressed, f"gradients are reduced as {scheme.name}")

    levels = _replica_levels(technique, group, mesh)
    algorithm: str = technique.all_reduce
    reason = "set in the configuration"
    bucket_bytes = technique.bucket_bytes
    transport: Transport | None = None
    measured = None
    if algorithm == "by-machines" and not is_fake(group):
        transport = _connect(technique, group, mesh, label="dp_replicate")
        # Nothing is faster than shared memory, so links are measured only without it.
        if transport.name == "torch" and technique.measure_seconds:
            measured = _select_by_links(technique, group, levels, mesh, gradient_bytes)
    if measured is not None:
        algorithm, bucket_bytes, reason = measured

    # Without measured links the levels decide, unless the ranks share memory.
    has_shared_memory = transport is not None and transport.name == "shared-memory"
    if algorithm == "by-machines" and levels is not None and not has_shared_memory:
        algorithm = "hierarchical"
        reason = f"{levels.across.size()} machines with {levels.inside.size()} ranks each"

    make_buckets: MakeBuckets
    if algorithm in ("by-machines", "shared-memory"):
        if transport is None:
            transport = _connect(technique, group, mesh, label="dp_replicate")
        if algorithm == "by-machines":
            reason = transport.reason
            if transport.name == "shared-memory":
                reason += "; the links were not measured, because shared memory is faster"
        make_buckets = transport.buckets
        description = f"gradients are reduced by {transport.name}: {reason}"
        in_memory = algorithm == "shared-memory" or transport.name == "shared-memory"
    else:
        make_buckets = partial(
            AlgorithmBuckets,
            group,
            device=mesh.device,
            algorithm=cast(Name, algorithm),
            levels=levels,
        )
        description = f"gradients are reduced by {algorithm}: {reason}"
        in_memory = False

    schemes, sentence = _candidate_schemes(shard, in_memory=in_memory)
    candidates = tuple(
        (scheme, _compressed_reduction(scheme, technique, group, mesh)) for scheme in schemes
    )
    is_default = (
        algorithm == "by-machines"
        and measured is None
        and technique.transport == "prefer-shared-memory"
        and not sentence
    )
    return ReplicatedReduction(
        BucketReduction(make_buckets, bucket_bytes),
        f"{description}{sentence}",
        candidates,
        is_default,
    )


@dataclass(frozen=True)
class ReplicatedReduction:
    """Reduction of replicated gradients, with candidates that may replace it after some steps."""

    buckets: BucketReduction
    description: str
    candidates: tuple[tuple[Scheme, BucketReduction], ...] = ()
    is_default: bool = False
    """True if neither a setting nor a measurement has decided the selection."""

    def autotuner_of(self, reducer: Reducer, mesh: Mesh) -> CompressionAutotuner | None:
        """Return the hook that selects a candidate, or None if there are no candidates."""
        if not self.candidates:
            return None
        candidates = tuple(
            CompressionCandidate(
                scheme.name, scheme.code, partial(buckets.activate, reducer, compressed=True)
            )
            for scheme, buckets in self.candidates
        )
        uncompressed = partial(self.buckets.activate, reducer, compressed=False)
        return CompressionAutotuner(deciding_groups(mesh), mesh.device, uncompressed, candidates)


@dataclass(frozen=True)
class BucketReduction:
    """Collective that sums the gradient buckets of replicated parameters."""

    make_buckets: MakeBuckets
    bucket_bytes: int

    def activate(self, reducer: Reducer, *, compressed: bool) -> None:
        """Make a reducer use this reduction, starting with the next step. Collective."""
        reducer.rebuild(
            self.make_buckets, bucket_bytes=self.bucket_bytes, separate_vectors=compressed
        )


def _replica_levels(
    technique: CollectiveSettings, group: dist.ProcessGroup, mesh: Mesh
) -> Levels | None:
    """Return the groups within and between machines.

    The result is None if the algorithm does not use these groups, or if they do not exist on all
    ranks of tp.
    """
    levels = None
    if technique.all_reduce in NEEDS_LEVELS:
        levels = mesh.levels("dp_replicate")
    # See Note [Same selection on all ranks of tp].
    if not _all_over_tp(mesh, levels is not None):
        levels = None
    if technique.all_reduce == "hierarchical" and levels is None:
        rule = (
            "it requires several machines that each run the same number (at least two) of the"
            f" {group.size()} processes of dp_replicate"
        )
        raise ConfigError(
            Problem("parallel.all_reduce", "hierarchical", rule, 'use "auto" or "all-reduce"')
        )
    return levels


def _select_by_links(
    technique: CollectiveSettings,
    group: dist.ProcessGroup,
    levels: Levels | None,
    mesh: Mesh,
    gradient_bytes: int,
) -> tuple[str, int, str]:
    """Measure the group's links, and select the algorithm. Collective over the group and tp.

    Returns:
        (algorithm, bucket size in bytes, reason).
    """
    kept_links = None
    if technique.kept_links:
        kept_links = Path(technique.kept_links)
    measurement = find_links(
        "dp_replicate",
        group,
        levels,
        machines=mesh.machines("dp_replicate"),
        device=mesh.device,
        seconds=technique.measure_seconds,
        path=kept_links,
        largest_bytes=gradient_bytes,
    )
    fixed_bucket_bytes = None
    if not technique.bucket_by_links:
        fixed_bucket_bytes = technique.bucket_bytes
    choice = choose_buckets(gradient_bytes, measurement.links, bucket_bytes=fixed_bucket_bytes)
    choice, refinement = refine(
        choice,
        measurement.links,
        group,
        levels,
        device=mesh.device,
        seconds=technique.measure_seconds,
    )
    reason = f"{choice.reason} The links were {measurement.origin}"
    if refinement:
        reason += f"; {refinement}"
    return _broadcast_over_tp(mesh, (choice.algorithm, choice.bucket_bytes, reason))


def _broadcast_over_tp(mesh: Mesh, value: T) -> T:
    """Return the value of the first rank of tp. See Note [Same selection on all ranks of tp]."""
    group = mesh.group("tp")
    if group is None or is_fake(group):
        return value
    return broadcast_object(value, group)


def _candidate_schemes(shard: ShardSettings, *, in_memory: bool) -> tuple[tuple[Scheme, ...], str]:
    """Return (schemes that are compared in the first steps, sentence for the report)."""
    schemes = shard.compression_candidates
    if not schemes:
        return (), ""
    if in_memory:
        return (), ". Gradients stay uncompressed: shared memory is faster than compressing"
    names = ", ".join(scheme.name for scheme in schemes)
    return schemes, f". The first steps decide on compression: {names}"


def _compressed_reduction(
    scheme: Scheme, technique: CollectiveSettings, group: dist.ProcessGroup, mesh: Mesh
) -> BucketReduction:
    # PowerSGD starts after some uncompressed steps, which the run has already made by then.
    make_buckets = partial(scheme.buckets, group, mesh.device, uncompressed_steps=0)
    bucket_bytes = technique.bucket_bytes
    if technique.bucket_by_links:
        bucket_bytes = scheme.bucket_bytes(bucket_bytes)
    return BucketReduction(make_buckets, bucket_bytes)


def select_sharded(
    technique: CollectiveSettings, stage: int, parts: Parts, mesh: Mesh
) -> tuple[ShardCollectives, CompressionAutotuner | None]:
    """Select and install the collectives of shards. Collective over `dp_shard` and tp.

    Args:
        technique: The settings.
        stage: The ZeRO stage.
        parts: The sharded model.
        mesh: The mesh of all ranks.

    Returns:
        (collectives, hook that selects the compression in the first steps). The hook is None if
        there are no candidates.

    Raises:
        ConfigError: `transport` is "shared-memory", but the parameters are not sharded.
    """
    group = mesh.group("dp_shard")
    if group is None:
        if technique.transport == "shared-memory" and mesh.layout.dp > 1:
            rule = (
                "replicated parameters that are cast for the computation are reduced by torch's"
                " collectives"
            )
            remedy = 'use "auto", or zero_optimization.stage 1, 2 or 3'
            raise ConfigError(Problem("parallel.transport", "shared-memory", rule, remedy))
        return ShardCollectives(), None

    transport = _connect(technique, group, mesh, label="dp_shard")
    # Shared memory is laid out for one group, and the secondary partition is gathered over another.
    all_gather = transport.all_gather
    if stage == 3 and technique.secondary_partition:
        all_gather = None
    if all_gather is not None:
        for module in _dp_shard_units(parts):
            module.set_custom_all_gather(all_gather)
    if transport.reduce_scatter is not None:
        _install_reduce_scatter(transport.reduce_scatter, parts)

    scheme = parts.shard.compression
    host = None
    if all_gather is not None and not scheme.weight_bits and _computes_with_shards(parts):
        host = transport.host
    description = _describe_sharded(scheme, transport, is_shared=host is not None)

    in_memory = transport.name == "shared-memory"
    schemes, sentence = _candidate_schemes(parts.shard, in_memory=in_memory)
    levels = None
    if scheme.gradient_bits or schemes:
        levels = mesh.levels("dp_shard")
    compressors = CompressedUnits(scheme.install(parts.model, levels))

    def compress(scheme: Scheme) -> None:
        compressors.clear()
        compressors.update(scheme.install(parts.model, levels))

    def uncompress() -> None:
        compressors.clear()
        _install_reduce_scatter(transport.reduce_scatter or DefaultReduceScatter(), parts)

    candidates = tuple(
        CompressionCandidate(scheme.name, scheme.code, partial(compress, scheme))
        for scheme in schemes
    )
    autotuner = None
    if candidates:
        autotuner = CompressionAutotuner(deciding_groups(mesh), mesh.device, uncompress, candidates)
    is_default = technique.transport == "prefer-shared-memory" and not (
        scheme.weight_bits or scheme.gradient_bits or sentence
    )
    selected = ShardCollectives(f"{description}{sentence}", compressors, is_default, host)
    return selected, autotuner


def _describe_sharded(scheme: Scheme, transport: Transport, *, is_shared: bool) -> str:
    names = {0: f"by {transport.name}", 4: "as int4", 8: "as int8"}
    storage = f"gathered {names[scheme.weight_bits]}"
    if is_shared:
        storage = "stored once in shared memory"
    return (
        f"parameters are {storage}, gradients reduced {names[scheme.gradient_bits]}:"
        f" {transport.reason}"
    )


def _computes_with_shards(parts: Parts) -> bool:
    """Return True if all shards are in memory, on one mesh, and in the dtype of the forward.

    Only such shards can be stored in shared memory.
    """
    shard = parts.shard
    is_special = shard.offloaded_units or shard.always_shard or shard.separate_mesh
    return shard.compute_dtype is None and not is_special


def _dp_shard_units(parts: Parts) -> list[FSDPModule]:
    """Return the units that are sharded over `dp_shard`. Units of experts are excluded."""
    separate = {id(parts.model.get_submodule(name)) for name in parts.shard.separate_mesh}
    return [module for module in sharded_modules(parts.model) if id(module) not in separate]


def _install_reduce_scatter(reduce_scatter: ReduceScatter, parts: Parts) -> None:
    for module in _dp_shard_units(parts):
        module.set_custom_reduce_scatter(reduce_scatter)


def deciding_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups whose ranks must select the same compression.

    These are the groups that sum gradients, and the tp group. The ranks of tp have the same
    replicated parameters, but sum the gradients of these parameters in separate groups.
    """
    groups = (mesh.group(axis) for axis in ("dp_replicate", "dp_shard", "tp"))
    return tuple(group for group in groups if group is not None)


def _connect(
    technique: CollectiveSettings, group: dist.ProcessGroup, mesh: Mesh, *, label: str
) -> Transport:
    """Select one transport for all ranks of tp. Collective over the group and tp."""
    transport = connect(group, label=label, device=mesh.device, requested=technique.transport)
    # Only a preference can have different results on different ranks. The exchange comes before the
    # last condition, because all ranks of tp must take part in it.
    if (
        technique.transport != "prefer-shared-memory"
        or _all_over_tp(mesh, transport.name == "shared-memory")
        or transport.name == "torch"
    ):
        return transport
    return replace(
        connect(group, label=label, device=mesh.device, requested="torch"),
        reason="another rank of the tp axis has no memory in common with its group",
    )


def _all_over_tp(mesh: Mesh, condition: bool) -> bool:
    """Return True if a condition holds on all ranks of tp. Collective over tp."""
    group = mesh.group("tp")
    if group is None or is_fake(group):
        return condition
    return all(all_gather_objects(condition, group))
