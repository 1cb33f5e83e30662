"""The costs of a run's links at its start: a measurement of this run's own group, or the stored one
of an earlier start of the run.

A stored measurement is used for the same ranks on the same machines, and only while a probe of two
sizes agrees with it within a factor: links that became slower or faster are measured again. All
ranks of the group use the first rank's result. `refine` then compares the best algorithms at the
message size of the run.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from plait.cluster.mesh import Levels
from plait.comm.choose import Choice, prices, refined
from plait.comm.links import GroupLinks, load_with_facts, save
from plait.comm.measure import LEAST_COMPARED, SIZES, compare_ways, measure_ways, probe
from plait.errors import InputError
from plait.units import MIB, format_bytes

_LONGEST = 4.0
"""Comparing may take so many times the time that was allowed."""
AGREEMENT = 2.0
"""A probe may take this many times as long or as short as what was kept."""


@dataclass(frozen=True)
class Found:
    """Links, and a description of their source."""

    links: GroupLinks
    how: str


def find_links(
    axis: str,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    machines: int = 1,
    device: torch.device,
    seconds: float,
    kept: Path | None = None,
    largest_bytes: int = SIZES[-1],
) -> Found:
    """The costs of the all-reduce algorithms over the group, the same on every rank. Collective
    over the group. `kept` is read by the group's first rank, and written by rank 0 of all where it
    was measured. `largest_bytes`: no message will be larger.
    """
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    before, why = _shared(
        group, _read(kept, axis, group.size(), machines, hosts) if group.rank() == 0 else None
    )
    if before is not None:
        sizes = (SIZES[0], MIB)
        now = probe(group, sizes, device=device)
        expected = [prices(nbytes, before)["all-reduce"] for nbytes in sizes]
        if all(
            1 / AGREEMENT <= seen / said <= AGREEMENT
            for seen, said in zip(now, expected, strict=True)
        ):
            return Found(
                before, f"measured when the run was started before ({kept}), and a probe agrees"
            )
        worst = max(
            zip(now, expected, strict=True),
            key=lambda pair: max(pair[0] / pair[1], pair[1] / pair[0]),
        )
        why = (
            f", because a probe took {worst[0] * 1e3:.3g} ms and the stored measurement has"
            f" {worst[1] * 1e3:.3g} ms"
        )
    began = time.perf_counter()
    mine = measure_ways(
        axis,
        group,
        levels,
        machines=machines,
        device=device,
        seconds=seconds,
        largest_bytes=largest_bytes,
    )
    links, how = _shared(
        group, (mine, f"measured at the start in {time.perf_counter() - began:.1f} s{why}")
    )
    assert links is not None
    if kept is not None and dist.get_rank() == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save(
            kept,
            [links],
            facts={
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": device.type,
                "hosts": hosts,
            },
        )
    return Found(links, how)


def refine(
    choice: Choice,
    links: GroupLinks,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    seconds: float,
) -> tuple[Choice, str]:
    """(the choice, its description) after the candidates that seem nearly as good were timed
    against it, at the size of this run's own messages: links behave differently between measured
    sizes, and a short measurement has errors. The same on every rank. Collective over the group.
    Where that would take much longer than `seconds` the choice does not change.
    """
    if (
        len(choice.near) < 2
        or choice.seconds / choice.messages * len(choice.near) * LEAST_COMPARED > _LONGEST * seconds
    ):
        return choice, ""
    began = time.perf_counter()
    times = compare_ways(
        choice.near, choice.bucket_bytes, group, levels, device=device, seconds=seconds
    )
    words = (
        f"{len(times)} algorithms were timed in turn with messages of"
        f" {format_bytes(choice.bucket_bytes)}"
    )
    # each rank has its own clock
    _, shared_words = _shared(group, (None, f"{words} in {time.perf_counter() - began:.1f} s"))
    return refined(choice, links, times), shared_words


def _read(
    path: Path | None, axis: str, ranks: int, machines: int, hosts: list[str]
) -> tuple[GroupLinks | None, str]:
    """(what was kept for this group, why nothing of it can be used)."""
    if path is None or not path.exists():
        return None, ""
    try:
        groups, facts = load_with_facts(path)
    except InputError:
        return None, f", because {path} cannot be read"
    found = groups.get(axis)
    if found is None or (found.ranks, found.machines, facts.get("hosts")) != (
        ranks,
        machines,
        hosts,
    ):
        return None, ", because the ranks or machines are others than at the last start"
    return found, ""


def _shared(
    group: dist.ProcessGroup, mine: tuple[GroupLinks | None, str] | None
) -> tuple[GroupLinks | None, str]:
    box = [mine]
    dist.broadcast_object_list(box, group_src=0, group=group)
    assert box[0] is not None
    return box[0]
