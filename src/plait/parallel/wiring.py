"""Which collectives the data-parallel technique uses on the groups that exist, and a sentence that says so and why.

Decided once, when the model is sharded, and alike on every rank of a group. Compression that was asked for comes first, then an algorithm
that was asked for, then what measured links say, then shared memory or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import nn

from plait._torch import sharded_modules
from plait.cluster.mesh import Levels, Mesh
from plait.comm.algorithms import Name
from plait.comm.buckets import AlgorithmBuckets, Buckets, Flat
from plait.comm.choose import choose_all_reduce
from plait.comm.compress import QuantisedReduceScatter
from plait.comm.links import load
from plait.comm.transport import connect
from plait.errors import ConfigError, InputError, Problem

if TYPE_CHECKING:
    from plait.parallel.data import DataParallel

MakeBuckets = Callable[[Sequence[Flat]], Buckets]


def replicated(technique: DataParallel, group: dist.ProcessGroup, mesh: Mesh) -> tuple[MakeBuckets, str]:
    """(what makes the reducer's buckets, how gradients are summed). Collective over the group."""
    compression = technique.compression
    if compression.gradients:
        how = f"PowerSGD of rank {compression.powersgd_rank}" if compression.powersgd_rank else f"int{compression.gradient_bits}"
        return lambda flats: compression.buckets(group, flats, mesh.device), f"gradients are summed as {how}"
    levels = mesh.levels("dp_replicate") if technique.all_reduce in ("by-machines", "two-level") else None
    wanted: str = technique.all_reduce
    why = "set in the configuration"
    if wanted == "two-level" and levels is None:
        rule = f"the {group.size()} processes are on one machine, or do not fill several equally with two or more"
        raise ConfigError(Problem("parallel.all_reduce", "two-level", rule, 'use "auto" or "all-reduce"'))
    if wanted == "by-machines" and technique.links is not None:
        wanted, why = _by_links(technique.links, technique.bucket_bytes, group, levels)
    elif wanted == "by-machines" and levels is not None:
        wanted, why = "two-level", f"{levels.across.size()} machines with {levels.inside.size()} ranks each"
    if wanted in ("by-machines", "shared-memory"):
        way = connect(group, label="dp_replicate", device=mesh.device, wanted=technique.transport)
        return way.buckets, f"gradients are summed by {way.name}: {way.reason if wanted == 'by-machines' else why}"
    algorithm = cast(Name, wanted)
    return (
        lambda flats: AlgorithmBuckets(group, flats, mesh.device, algorithm=algorithm, levels=levels),
        f"gradients are summed by {algorithm}: {why}",
    )


def _by_links(path: str, bucket_bytes: int, group: dist.ProcessGroup, levels: Levels | None) -> tuple[str, str]:
    """(way, why) from measured links. The group's first rank reads the file, for all."""
    answer: list[tuple[str, str] | ConfigError | None] = [None]
    if group.rank() == 0:
        answer = [_chosen(path, bucket_bytes, group.size(), levels.across.size() if levels is not None else 1)]
    if dist.get_backend(group) != "fake":
        dist.broadcast_object_list(answer, group_src=0, group=group)
    found = answer[0]
    if isinstance(found, ConfigError):
        raise found
    return found or ("by-machines", "")


def _chosen(path: str, bucket_bytes: int, ranks: int, machines: int) -> tuple[str, str] | ConfigError:
    try:
        measured = load(Path(path)).get("dp_replicate")
    except InputError as error:
        return ConfigError(Problem("parallel.links", path, str(error), "or leave it out"))
    if measured is None or (measured.ranks, measured.machines) != (ranks, machines):
        there = f"{measured.ranks} ranks on {measured.machines}" if measured is not None else "no group dp_replicate on any"
        rule = f"it was measured for {there} machine(s), and gradients are summed over {ranks} on {machines}"
        return ConfigError(Problem("parallel.links", path, rule, "measure again with `plait doctor --links`, or leave it out"))
    choice = choose_all_reduce(bucket_bytes, measured)
    return choice.algorithm, choice.reason


def sharded(technique: DataParallel, model: nn.Module, mesh: Mesh) -> tuple[Mapping[str, QuantisedReduceScatter], str]:
    """(units' compressed collectives that may keep errors, how shards travel). Collective over `dp_shard`."""
    group = mesh.group("dp_shard")
    if group is None:
        if technique.transport == "shared-memory" and mesh.layout.dp > 1:
            rule = "replicated parameters that are cast for the computation are reduced by torch's collectives"
            raise ConfigError(Problem("parallel.transport", "shared-memory", rule, 'use "auto", or zero_optimization.stage 1, 2 or 3'))
        return {}, ""
    way = connect(group, label="dp_shard", device=mesh.device, wanted=technique.transport)
    for module in sharded_modules(model):
        # Shared memory is laid out for one group, and the second copy is gathered over another.
        if way.all_gather is not None and not (technique.stage == 3 and technique.second_copy):
            module.set_custom_all_gather(way.all_gather)
        if way.reduce_scatter is not None:
            module.set_custom_reduce_scatter(way.reduce_scatter)
    compression = technique.compression
    names = {0: f"by {way.name}", 4: "as int4", 8: "as int8"}
    said = f"parameters are gathered {names[compression.weight_bits]}, gradients reduced {names[compression.gradient_bits]}: {way.reason}"
    return compression.install(model, mesh.levels("dp_shard") if compression.gradient_bits else None), said
