"""Which collectives the data-parallel technique uses on the groups that exist, and a sentence that says so and why.

Decided once, when the model is sharded, and alike on every rank of a group. Compression that was asked for comes first, then an algorithm
that was asked for, then a file of links, then shared memory, then what a measurement at the start says, then torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from plait._torch import sharded_modules
from plait.cluster.mesh import Mesh
from plait.comm.algorithms import Name
from plait.comm.buckets import AlgorithmBuckets, Buckets, Flat
from plait.comm.choose import choose_buckets
from plait.comm.compress import QuantisedReduceScatter
from plait.comm.links import GroupLinks, load
from plait.comm.startup import Found, find_links
from plait.comm.transport import connect
from plait.comm.waits import TimedAllGather, TimedReduceScatter
from plait.errors import ConfigError, InputError, Problem
from plait.parallel.compression import QUANTISED_BUCKET_BYTES, Compression
from plait.parallel.reducer import Reducer
from plait.parallel.technique import Parts
from plait.parallel.trial import Option, Trial

if TYPE_CHECKING:
    from plait.parallel.data import DataParallel

MakeBuckets = Callable[[Sequence[Flat]], Buckets]


@dataclass(frozen=True)
class Summing:
    """How the gradients of replicated parameters are summed."""

    make_buckets: MakeBuckets
    bucket_bytes: int
    said: str
    """For people."""
    options: tuple[Option, ...] = ()
    """What may take the buckets' place after the first steps."""

    def trial_of(self, reducer: Reducer) -> Trial | None:
        """The steps that decide."""
        return Trial(reducer, self.options) if self.options else None


def replicated(technique: DataParallel, group: dist.ProcessGroup, mesh: Mesh, *, gradient_bytes: int) -> Summing:
    """Collective over the group. `gradient_bytes`: of all gradients that this rank sums."""
    compression = technique.compression
    if compression.gradients:
        return Summing(
            partial(compression.buckets, group, mesh.device), technique.bucket_bytes, f"gradients are summed as {compression.name}"
        )
    levels = mesh.levels("dp_replicate") if technique.all_reduce in ("by-machines", "two-level") else None
    wanted: str = technique.all_reduce
    why = "set in the configuration"
    bucket_bytes, shared = technique.bucket_bytes, None
    found: Found | None = None
    if wanted == "two-level" and levels is None:
        rule = f"the {group.size()} processes are on one machine, or do not fill several equally with two or more"
        raise ConfigError(Problem("parallel.all_reduce", "two-level", rule, 'use "auto" or "all-reduce"'))
    if wanted == "by-machines" and dist.get_backend(group) != "fake":
        if technique.links is not None:
            found = Found(_from_file(technique.links, group, mesh.machines("dp_replicate")), f"read from {technique.links}")
        else:
            shared = connect(group, label="dp_replicate", device=mesh.device, wanted=technique.transport)
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
            wanted, bucket_bytes, why = choice.algorithm, choice.bucket_bytes, f"{choice.reason} The links were {found.how}"
    if wanted == "by-machines" and levels is not None and (shared is None or shared.name == "torch"):
        wanted, why = "two-level", f"{levels.across.size()} machines with {levels.inside.size()} ranks each"
    if wanted in ("by-machines", "shared-memory"):
        way = shared or connect(group, label="dp_replicate", device=mesh.device, wanted=technique.transport)
        note = "; the links were not measured, because nothing here is faster" if way.name == "shared-memory" else ""
        why = way.reason + note if wanted == "by-machines" else why
        make, said = way.buckets, f"gradients are summed by {way.name}: {why}"
    else:
        make = partial(AlgorithmBuckets, group, device=mesh.device, algorithm=cast(Name, wanted), levels=levels)
        said = f"gradients are summed by {wanted}: {why}"
    if not technique.may_compress:
        return Summing(make, bucket_bytes, said)
    if mesh.device.type != "cpu":
        return Summing(make, bucket_bytes, f"{said}. Gradients stay whole: what a step waits for is not measured on {mesh.device.type}")
    if wanted == "shared-memory" or (wanted == "by-machines" and way.name == "shared-memory"):
        return Summing(make, bucket_bytes, f"{said}. Gradients stay whole: shared memory is faster than compressing")
    names = ", ".join(way.name for way in technique.may_compress)
    options = tuple(_option(way, technique, group, mesh) for way in technique.may_compress)
    return Summing(make, bucket_bytes, f"{said}. The first steps decide on compression: {names}", options)


def _option(way: Compression, technique: DataParallel, group: dist.ProcessGroup, mesh: Mesh) -> Option:
    by_default = technique.bucket_by_links and way.gradient_bits
    bucket_bytes = QUANTISED_BUCKET_BYTES if by_default else technique.bucket_bytes
    make = partial(way.buckets, group, mesh.device, whole_steps=0)  # those before were whole
    return Option(way.name, way.code, make, bucket_bytes)


def _from_file(path: str, group: dist.ProcessGroup, machines: int) -> GroupLinks:
    """The measured links of a file that the configuration names. The group's first rank reads it, for all."""
    answer: list[GroupLinks | ConfigError | None] = [None]
    if group.rank() == 0:
        answer = [_read(path, group.size(), machines)]
    dist.broadcast_object_list(answer, group_src=0, group=group)
    found = answer[0]
    if isinstance(found, ConfigError):
        raise found
    assert found is not None
    return found


def _read(path: str, ranks: int, machines: int) -> GroupLinks | ConfigError:
    try:
        measured = load(Path(path)).get("dp_replicate")
    except InputError as error:
        return ConfigError(Problem("parallel.links", path, str(error), "or leave it out"))
    if measured is None or (measured.ranks, measured.machines) != (ranks, machines):
        there = f"{measured.ranks} ranks on {measured.machines}" if measured is not None else "no group dp_replicate on any"
        rule = f"it was measured for {there} machine(s), and gradients are summed over {ranks} on {machines}"
        return ConfigError(Problem("parallel.links", path, rule, "measure again with `plait doctor --links`, or leave it out"))
    return measured


def sharded(technique: DataParallel, parts: Parts, mesh: Mesh) -> tuple[Mapping[str, QuantisedReduceScatter], str]:
    """(units' compressed collectives that may keep errors, how shards travel). Collective over `dp_shard`."""
    group = mesh.group("dp_shard")
    if group is None:
        if technique.transport == "shared-memory" and mesh.layout.dp > 1:
            rule = "replicated parameters that are cast for the computation are reduced by torch's collectives"
            raise ConfigError(Problem("parallel.transport", "shared-memory", rule, 'use "auto", or zero_optimization.stage 1, 2 or 3'))
        return {}, ""
    way = connect(group, label="dp_shard", device=mesh.device, wanted=technique.transport)
    # Shared memory is laid out for one group, and the second copy is gathered over another.
    all_gather = way.all_gather if not (technique.stage == 3 and technique.second_copy) else None
    for module in sharded_modules(parts.model):
        if mesh.device.type == "cpu":
            module.set_custom_all_gather(TimedAllGather(all_gather, parts.waits, "dp_shard"))
        if way.reduce_scatter is not None:
            module.set_custom_reduce_scatter(TimedReduceScatter(way.reduce_scatter, parts.waits, "dp_shard"))
    compression = technique.compression
    names = {0: f"by {way.name}", 4: "as int4", 8: "as int8"}
    said = f"parameters are gathered {names[compression.weight_bits]}, gradients reduced {names[compression.gradient_bits]}: {way.reason}"
    return compression.install(parts.model, mesh.levels("dp_shard") if compression.gradient_bits else None, parts.waits), said
