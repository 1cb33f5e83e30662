"""Costs of a run's links at its start: measured, or read from the file of an earlier start.

Stored costs are used for the same ranks on the same machines, and only if a probe of two sizes
agrees with them within a factor. Links that became slower or faster are measured again. All ranks
of the group use the first rank's result. `refine` then compares the best algorithms at the message
size of the run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from plait.cluster.mesh import Levels
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.comm.choose import AlgorithmChoice, prices, refined
from plait.comm.links import GroupLinks, load_with_facts, save
from plait.comm.measure import LEAST_COMPARED, SIZES, compare_algorithms, measure_algorithms, probe
from plait.errors import InputError
from plait.units import MIB, format_bytes

_LONGEST_REFINEMENT = 4.0
"""Multiple of the allowed time that a comparison may take at its fewest rounds."""
AGREEMENT = 2.0
"""Factor by which a probe may differ from the stored time, up or down."""


@dataclass(frozen=True)
class LinkMeasurement:
    """Links of a group, and a description of their source.

    Attributes:
        links: Costs of the group.
        how: End of the sentence "The links were ...".
    """

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
) -> LinkMeasurement:
    """Return the costs of the all-reduce algorithms over a group. Collective over the group.

    The result is the same on every rank.

    Args:
        axis: Name of the mesh dimension.
        group: The process group.
        levels: Groups inside and across machines.
        machines: Number of machines of the group.
        device: Device of the tensors.
        seconds: Approximate time of a measurement.
        kept: File of the costs. The first rank of the group reads it. Global rank 0 writes it after
            a measurement.
        largest_bytes: Size of the largest message of the run.
    """
    hosts = all_gather_objects(socket.gethostname(), group)
    stored: tuple[GroupLinks | None, str] = (None, "")
    if group.rank() == 0:
        stored = _read(kept, axis, group.size(), machines, hosts)
    links, reason = broadcast_object(stored, group)

    if links is not None:
        difference = _difference_from_probe(links, group, device)
        if not difference:
            return LinkMeasurement(
                links, f"measured at an earlier start of the run ({kept}), and a probe agrees"
            )
        reason = difference

    began = time.perf_counter()
    measured = measure_algorithms(
        axis,
        group,
        levels,
        machines=machines,
        device=device,
        seconds=seconds,
        largest_bytes=largest_bytes,
    )
    duration = time.perf_counter() - began
    how = f"measured at the start in {duration:.1f} s{reason}"
    links, how = broadcast_object((measured, how), group)

    # There may be several groups along the dimension. One of them writes the file.
    if kept is not None and dist.get_rank() == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device.type,
            "hosts": hosts,
        }
        save(kept, [links], facts=facts)
    return LinkMeasurement(links, how)


def _difference_from_probe(
    links: GroupLinks, group: dist.ProcessGroup, device: torch.device
) -> str:
    """Return how a probe contradicts stored links, or an empty string if it agrees. Collective."""
    sizes = (SIZES[0], MIB)
    probed = probe(group, sizes, device=device)
    stored = [prices(nbytes, links)["all-reduce"] for nbytes in sizes]
    if _agree(probed, stored):
        return ""
    seconds, stored_seconds = max(zip(probed, stored, strict=True), key=_deviation)
    return (
        f", because a probe took {seconds * 1e3:.3g} ms and the stored measurement has"
        f" {stored_seconds * 1e3:.3g} ms"
    )


def _agree(probed: Sequence[float], stored: Sequence[float]) -> bool:
    ratios = [seconds / expected for seconds, expected in zip(probed, stored, strict=True)]
    return all(1 / AGREEMENT <= ratio <= AGREEMENT for ratio in ratios)


def _deviation(times: tuple[float, float]) -> float:
    """Return the factor, 1 or more, by which two times differ."""
    return max(times[0] / times[1], times[1] / times[0])


def refine(
    choice: AlgorithmChoice,
    links: GroupLinks,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    seconds: float,
) -> tuple[AlgorithmChoice, str]:
    """Time the chosen algorithm against similarly good ones. Collective over the group.

    They are timed at the message size of the run, because links behave differently between measured
    sizes, and because a short measurement has errors. The result is the same on every rank.

    Args:
        choice: Choice by the costs of the links.
        links: Costs of the links.
        group: The process group.
        levels: Groups inside and across machines.
        device: Device of the tensors.
        seconds: Approximate time. If the comparison takes much longer, the choice is not changed.

    Returns:
        The new choice, and a description of the comparison. It is empty if there was none.
    """
    if len(choice.near) < 2:
        return choice, ""
    expected_seconds = choice.seconds / choice.messages * len(choice.near) * LEAST_COMPARED
    if expected_seconds > _LONGEST_REFINEMENT * seconds:
        return choice, ""

    began = time.perf_counter()
    times = compare_algorithms(
        choice.near, choice.bucket_bytes, group, levels, device=device, seconds=seconds
    )
    duration = time.perf_counter() - began
    description = (
        f"{len(times)} algorithms were timed in turn with messages of"
        f" {format_bytes(choice.bucket_bytes)} in {duration:.1f} s"
    )
    # Each rank has measured another duration.
    return refined(choice, links, times), broadcast_object(description, group)


def _read(
    path: Path | None, axis: str, ranks: int, machines: int, hosts: list[str]
) -> tuple[GroupLinks | None, str]:
    """Return the stored costs of a group, or None and the reason why they cannot be used."""
    if path is None or not path.exists():
        return None, ""
    try:
        groups, facts = load_with_facts(path)
    except InputError:
        return None, f", because {path} cannot be read"
    links = groups.get(axis)
    current = (ranks, machines, hosts)
    if links is None or (links.ranks, links.machines, facts.get("hosts")) != current:
        return None, ", because the ranks or machines differ from those of the last start"
    return links, ""
