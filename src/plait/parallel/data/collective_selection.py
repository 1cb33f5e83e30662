"""Which collectives the data-parallel technique uses on the groups that exist, and a sentence that
says so and why.

Decided once, when the model is sharded, the same on every rank of a group and of the tp axis.
Compression that was asked for comes first, then an algorithm that was asked for, then shared
memory, then what a measurement at the start says, then torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from plait._torch.units import DefaultReduceScatter, ReduceScatter, sharded_modules
from plait.cluster.fake_group import is_fake
from plait.cluster.mesh import Mesh
from plait.comm.algorithms import Name
from plait.comm.buckets import AlgorithmBuckets, Buckets, Flat
from plait.comm.choose import choose_buckets
from plait.comm.shared_memory.host import Host
from plait.comm.startup import Found, find_links, refine
from plait.comm.transport import Transport, TransportName, connect
from plait.errors import ConfigError, Problem
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.data.autotune import Candidate, CompressionAutotuner
from plait.parallel.data.compression import Compression
from plait.parallel.data.reducer import Reducer
from plait.parallel.data.residuals import CompressedUnits
from plait.parallel.technique import Parts, Technique
from plait.units import MIB

T = TypeVar("T")
MakeBuckets = Callable[[Sequence[Flat]], Buckets]


NEEDS_LEVELS = ("by-machines", "hierarchical")
"""Values of `all_reduce` that look at which ranks share a machine."""


class CollectiveSettings(Technique):
    """How gradients and parameters are sent between data-parallel ranks."""

    bucket_bytes: int = 25 * MIB
    """Stage 0: gradients are reduced in buckets of about this size. Sharded stages reduce block by
    block.
    """
    transport: TransportName = "prefer-shared-memory"
    """How bytes move between processes: torch's collectives, or memory that the processes of one
    machine share.
    """
    all_reduce: Name | Literal["by-machines"] = "by-machines"
    """Stage 0: how gradients are summed (see `comm.algorithms`). `by-machines`: hierarchical where
    a group spans machines that hold several of its ranks each, else the backend's own, or shared
    memory.
    """
    measure_seconds: float = 0.0
    """How long `by-machines` measures the links when the model is sharded, where there is no shared
    memory; 0 does not.
    """
    kept_links: str | None = None
    """Where that measurement is kept for the next start of the run."""
    bucket_by_links: bool = False
    """Let the links decide the size of a bucket too, where they are known; else `bucket_bytes`
    does.
    """
    secondary_partition: int = 0
    """Stage 3: keep a block's parameters sharded over so many neighbouring ranks from its forward
    to its backward, which gathers them from those; 0 keeps what the optimizer has.
    """


@dataclass(frozen=True)
class BucketWay:
    """How the gradients of replicated parameters are summed."""

    make_buckets: MakeBuckets
    bucket_bytes: int

    def take(self, reducer: Reducer, *, compressed: bool) -> None:
        """From the next step on."""
        reducer.rebuild(
            self.make_buckets, bucket_bytes=self.bucket_bytes, separate_vectors=compressed
        )


@dataclass(frozen=True)
class Summing:
    """The selected collective, and the candidates that may replace it after the first steps."""

    way: BucketWay
    said: str
    """A description."""
    others: tuple[tuple[Scheme, BucketWay], ...] = ()
    is_default: bool = False
    """Whether the choice is the default, without a setting or a measurement that decided it."""

    def autotuner_of(self, reducer: Reducer, mesh: Mesh) -> CompressionAutotuner | None:
        """Return the hook whose steps decide on compression; None if there are no candidates."""
        if not self.others:
            return None
        candidates = tuple(
            Candidate(to.name, to.code, partial(way.take, reducer, compressed=True))
            for to, way in self.others
        )
        uncompressed = partial(self.way.take, reducer, compressed=False)
        return CompressionAutotuner(deciding_groups(mesh), mesh.device, uncompressed, candidates)


def deciding_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    """The groups along the axes whose ranks must take the same decision on compression: all that
    sum the same gradients, and the tp axis, whose ranks hold the same replicated parameters and sum
    them in groups of their own.
    """
    groups = (mesh.group(axis) for axis in ("dp_replicate", "dp_shard", "tp"))
    return tuple(group for group in groups if group is not None)


def _agreed(mesh: Mesh, mine: T) -> T:
    """What the first rank of the tp axis found. Its ranks measure links in groups of their own, and
    replicated parameters keep the same bits on all of them only if all use one algorithm.
    Collective over tp.
    """
    group = mesh.group("tp")
    if group is None or is_fake(group):
        return mine
    box = [mine]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def _on_all_of_tp(mesh: Mesh, here: bool) -> bool:
    """Whether it holds on every rank of the tp axis. Collective over tp."""
    group = mesh.group("tp")
    if group is None or is_fake(group):
        return here
    answers = [here] * group.size()
    dist.all_gather_object(answers, here, group=group)
    return all(answers)


def _connected(
    technique: CollectiveSettings, group: dist.ProcessGroup, mesh: Mesh, *, label: str
) -> Transport:
    """`connect`, the same on every rank of the tp axis."""
    way = connect(group, label=label, device=mesh.device, wanted=technique.transport)
    if (
        technique.transport != "prefer-shared-memory"
        or _on_all_of_tp(mesh, way.name == "shared-memory")
        or way.name == "torch"
    ):
        return way
    found = connect(group, label=label, device=mesh.device, wanted="torch")
    return replace(
        found, reason="another rank of the tp axis has no memory in common with its group"
    )


def replicated(
    technique: CollectiveSettings,
    compression: Compression,
    group: dist.ProcessGroup,
    mesh: Mesh,
    *,
    gradient_bytes: int,
) -> Summing:
    """Collective over the group and over tp. `gradient_bytes`: of all gradients that this rank
    sums.
    """
    scheme = compression.scheme
    if scheme.gradients:
        fixed = BucketWay(partial(scheme.buckets, group, mesh.device), technique.bucket_bytes)
        return Summing(fixed, f"gradients are reduced as {scheme.name}")
    levels = mesh.levels("dp_replicate") if technique.all_reduce in NEEDS_LEVELS else None
    if not _on_all_of_tp(mesh, levels is not None):
        levels = None
    wanted: str = technique.all_reduce
    why = "set in the configuration"
    bucket_bytes = technique.bucket_bytes
    shared = None
    found: Found | None = None
    if wanted == "hierarchical" and levels is None:
        rule = (
            f"the {group.size()} processes are on one machine, or do not fill several equally with"
            " two or more"
        )
        raise ConfigError(
            Problem("parallel.all_reduce", "hierarchical", rule, 'use "auto" or "all-reduce"')
        )
    if wanted == "by-machines" and not is_fake(group):
        shared = _connected(technique, group, mesh, label="dp_replicate")
        if shared.name == "torch" and technique.measure_seconds:
            found = find_links(
                "dp_replicate",
                group,
                levels,
                machines=mesh.machines("dp_replicate"),
                device=mesh.device,
                seconds=technique.measure_seconds,
                kept=Path(technique.kept_links) if technique.kept_links else None,
                largest_bytes=gradient_bytes,
            )
        if found is not None:
            given = None if technique.bucket_by_links else bucket_bytes
            choice = choose_buckets(gradient_bytes, found.links, bucket_bytes=given)
            choice, words = refine(
                choice,
                found.links,
                group,
                levels,
                device=mesh.device,
                seconds=technique.measure_seconds,
            )
            why = "; ".join(filter(None, (f"{choice.reason} The links were {found.how}", words)))
            wanted, bucket_bytes, why = _agreed(mesh, (choice.algorithm, choice.bucket_bytes, why))
    if (
        wanted == "by-machines"
        and levels is not None
        and (shared is None or shared.name == "torch")
    ):
        wanted = "hierarchical"
        why = f"{levels.across.size()} machines with {levels.inside.size()} ranks each"
    if wanted in ("by-machines", "shared-memory"):
        way = shared or _connected(technique, group, mesh, label="dp_replicate")
        note = (
            "; the links were not measured, because nothing here is faster"
            if way.name == "shared-memory"
            else ""
        )
        why = way.reason + note if wanted == "by-machines" else why
        make = way.buckets
        said = f"gradients are reduced by {way.name}: {why}"
    else:
        make = partial(
            AlgorithmBuckets, group, device=mesh.device, algorithm=cast(Name, wanted), levels=levels
        )
        said = f"gradients are reduced by {wanted}: {why}"
    in_memory = wanted == "shared-memory" or (
        wanted == "by-machines" and way.name == "shared-memory"
    )
    open_, words = _open_to_compression(compression, in_memory=in_memory)
    others = tuple((to, _compressed_way(to, technique, group, mesh)) for to in open_)
    is_default = (
        wanted == "by-machines"
        and found is None
        and technique.transport == "prefer-shared-memory"
        and not words
    )
    return Summing(BucketWay(make, bucket_bytes), f"{said}{words}", others, is_default)


def _open_to_compression(
    compression: Compression, *, in_memory: bool
) -> tuple[tuple[Scheme, ...], str]:
    """(candidates of the first steps, a sentence about them)."""
    allowed = compression.candidates
    if not allowed:
        return (), ""
    if in_memory:
        return (), ". Gradients stay uncompressed: shared memory is faster than compressing"
    return (
        allowed,
        f". The first steps decide on compression: {', '.join(to.name for to in allowed)}",
    )


def _compressed_way(
    to: Scheme, technique: CollectiveSettings, group: dist.ProcessGroup, mesh: Mesh
) -> BucketWay:
    given = technique.bucket_bytes
    # the steps before were uncompressed
    make = partial(to.buckets, group, mesh.device, whole_steps=0)
    return BucketWay(make, to.bucket_bytes(given) if technique.bucket_by_links else given)


@dataclass(frozen=True)
class Sharing:
    """How the shards of a model are exchanged."""

    said: str = ""
    """A description."""
    compressors: CompressedUnits = field(default_factory=CompressedUnits)
    autotuner: CompressionAutotuner | None = None
    """The steps that decide whether gradients are compressed."""
    is_default: bool = False
    """Whether the choice is the default, without a setting that decided it."""
    parameter_host: Host | None = None
    """Ranks that can hold parameters once, in the memory that they share."""


def sharded(
    technique: CollectiveSettings, compression: Compression, stage: int, parts: Parts, mesh: Mesh
) -> Sharing:
    """Collective over `dp_shard` and tp."""
    group = mesh.group("dp_shard")
    if group is None:
        if technique.transport == "shared-memory" and mesh.layout.dp > 1:
            rule = (
                "replicated parameters that are cast for the computation are reduced by torch's"
                " collectives"
            )
            raise ConfigError(
                Problem(
                    "parallel.transport",
                    "shared-memory",
                    rule,
                    'use "auto", or zero_optimization.stage 1, 2 or 3',
                )
            )
        return Sharing()
    way = _connected(technique, group, mesh, label="dp_shard")
    # Shared memory is laid out for one group, and the secondary partition is gathered over another.
    all_gather = way.all_gather if not (stage == 3 and technique.secondary_partition) else None
    if all_gather is not None:
        for module in _units(parts):
            module.set_custom_all_gather(all_gather)
    if way.reduce_scatter is not None:
        _reduce_by(way.reduce_scatter, parts)
    scheme = compression.scheme
    # The shared memory has the parameters that the forward computes with; on a disk, or in another
    # dtype, they are others.
    shard = parts.shard
    as_they_are = shard.compute_dtype is None and not (
        shard.offloaded_units or shard.always_shard or shard.own_mesh
    )
    host = way.host if all_gather is not None and as_they_are and not scheme.weight_bits else None
    names = {0: f"by {way.name}", 4: "as int4", 8: "as int8"}
    gathered = (
        f"gathered {names[scheme.weight_bits]}" if host is None else "stored once in shared memory"
    )
    said = (
        f"parameters are {gathered}, gradients reduced {names[scheme.gradient_bits]}: {way.reason}"
    )
    open_, words = _open_to_compression(compression, in_memory=way.name == "shared-memory")
    levels = mesh.levels("dp_shard") if scheme.gradient_bits or open_ else None
    compressors = CompressedUnits(scheme.install(parts.model, levels))

    def take(to: Scheme | None) -> None:
        compressors.clear()
        if to is None:
            _reduce_by(way.reduce_scatter or DefaultReduceScatter(), parts)
        else:
            compressors.update(to.install(parts.model, levels))

    candidates = tuple(Candidate(to.name, to.code, partial(take, to)) for to in open_)
    autotuner = None
    if candidates:
        autotuner = CompressionAutotuner(
            deciding_groups(mesh), mesh.device, partial(take, None), candidates
        )
    is_default = technique.transport == "prefer-shared-memory" and not (
        scheme.weight_bits or scheme.gradient_bits or words
    )
    return Sharing(f"{said}{words}", compressors, autotuner, is_default, host)


def _units(parts: Parts) -> list[FSDPModule]:
    """Those that are sharded over `dp_shard`."""
    apart = {id(parts.model.get_submodule(name)) for name in parts.shard.own_mesh}
    return [module for module in sharded_modules(parts.model) if id(module) not in apart]


def _reduce_by(reduce_scatter: ReduceScatter, parts: Parts) -> None:
    for module in _units(parts):
        module.set_custom_reduce_scatter(reduce_scatter)
