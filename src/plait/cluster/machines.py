"""Description of the machines of a run.

This module does not inspect the machine. A planner on a laptop gets the same Topology as on the
cluster.

DeepSpeed's hostfile has one line `name slots=N` per machine. Include and exclude filters select
from these machines and slots. Names are not looked up on the network. A slot is a device of the
machine, numbered from 0. The order of the file is the order of the ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plait.cluster.accelerator import DeviceType
from plait.errors import ConfigError, InputError, Problem, raise_problems

MOST_SLOTS = 2**16
"""Largest number of slots of a machine."""
_LINE = re.compile(r"(?P<name>[^\s#=-][^\s#=]*)\s+slots\s*=\s*(?P<slots>\d{1,9})")


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        name: Name of the machine.
        devices: Number of devices. Each process has one: a GPU, or on a machine without GPUs its
            share of the cores.
    """

    name: str
    devices: int


@dataclass(frozen=True)
class Topology:
    """Machines of a run.

    Attributes:
        nodes: The machines, in the order of the ranks.
        device_type: Type of the devices.
        memory_bytes: Memory of one device, or None if it is not known.
    """

    nodes: tuple[Node, ...]
    device_type: DeviceType
    memory_bytes: int | None = None

    @property
    def world_size(self) -> int:
        """Number of devices, which is the number of processes."""
        return sum(node.devices for node in self.nodes)


@dataclass(frozen=True)
class HostfileEntry:
    """A machine of a hostfile.

    Attributes:
        name: Name for ssh, such as `node1` or `user@node1`.
        slots: Slots that are used.
    """

    name: str
    slots: tuple[int, ...]

    @property
    def address(self) -> str:
        """Host name without the user name."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str | Path) -> tuple[HostfileEntry, ...]:
    """Return the hosts of a hostfile.

    Raises:
        InputError: The file cannot be read.
        ConfigError: The file has errors.
    """
    try:
        # Editors of Windows begin a file with a byte order mark, which this encoding skips.
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"hostfile {path}: {getattr(error, 'strerror', None) or error}; name a readable file"
        ) from None
    return parse_hostfile(text, source=str(path))


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[HostfileEntry, ...]:
    """Return the hosts in the text of a hostfile. `#` begins a comment.

    >>> parse_hostfile("a slots=2\\nb slots=1  # the small one")
    (HostfileEntry(name='a', slots=(0, 1)), HostfileEntry(name='b', slots=(0,)))

    Args:
        text: Content of the file.
        source: Name of the file for messages.

    Raises:
        ConfigError: Lines are not valid, or hosts are listed twice. The error lists all problems.
    """
    hosts: dict[str, HostfileEntry] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        place = f"{source}:{number}"
        match = _LINE.fullmatch(content)
        if match is None or not 1 <= int(match["slots"]) <= MOST_SLOTS:
            rule = f"not `name slots=N` with N from 1 to {MOST_SLOTS}"
            problems.append(Problem(place, content, rule, "write for example `node1 slots=8`"))
        elif match["name"] in hosts:
            remedy = "give each machine one line with all its slots"
            problems.append(Problem(place, content, f"{match['name']} is named twice", remedy))
        else:
            hosts[match["name"]] = HostfileEntry(match["name"], tuple(range(int(match["slots"]))))
    raise_problems(problems)
    if not hosts:
        raise ConfigError(
            Problem(source, None, "names no machine", "write one `name slots=N` per line")
        )
    return tuple(hosts.values())


def select_hosts(
    hosts: tuple[HostfileEntry, ...], *, include: str = "", exclude: str = ""
) -> tuple[HostfileEntry, ...]:
    """Select machines and slots of a hostfile.

    The filters have DeepSpeed's notation: `name` for a machine, `name:0,2` for some of its slots,
    and `@` between machines.

    >>> select_hosts(parse_hostfile("a slots=4\\nb slots=4"), exclude="a:0,1@b")
    (HostfileEntry(name='a', slots=(2, 3)),)

    Args:
        hosts: Hosts of the hostfile.
        include: Machines and slots to use.
        exclude: Machines and slots not to use.

    Raises:
        ConfigError: Both filters are set, a machine or slot is not in the hostfile, or nothing is
            left.
    """
    if include and exclude:
        raise ConfigError(
            Problem(
                "--exclude",
                exclude,
                "given together with --include, which already selects what is used",
                "leave one of them out",
            )
        )
    if not include and not exclude:
        return hosts
    option = "--include" if include else "--exclude"
    text = include or exclude
    listed = _listed_slots(hosts, option, text)
    selected = []
    for host in hosts:
        slots = listed.get(host.name, ())
        # A machine that is not listed is not included, or not excluded.
        if exclude:
            slots = tuple(slot for slot in host.slots if slot not in slots)
        if slots:
            selected.append(HostfileEntry(host.name, slots))
    if not selected:
        remedy = "name at least one machine" if include else "leave at least one slot"
        raise ConfigError(Problem(option, text, "leaves no machine", remedy))
    return tuple(selected)


def _listed_slots(
    hosts: tuple[HostfileEntry, ...], option: str, text: str
) -> dict[str, tuple[int, ...]]:
    """Return the slots that a filter lists, keyed by the name of the machine in the hostfile."""
    hostfile_slots = {host.name: host.slots for host in hosts}
    names = {host.address: host.name for host in hosts}
    users = {host.name.rpartition("@")[0] for host in hosts if "@" in host.name}
    listed: dict[str, tuple[int, ...]] = {}
    problems = []
    for entry in text.split("@"):
        # `@` separates machines here, so names are those without the user.
        address, colon, numbers = entry.strip().partition(":")
        if address in users and address not in names:
            # The user of a name that was written as in the hostfile.
            continue
        name = names.get(address, address)
        if name not in hostfile_slots:
            remedy = f"use {', '.join(sorted(names)[:8])}"
            problems.append(Problem(option, entry, f"{name!r} is not in the hostfile", remedy))
            continue

        slots = hostfile_slots[name]
        if colon:
            if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", numbers):
                remedy = f"write for example `{entry.partition(':')[0].strip()}:0`"
                problems.append(Problem(option, entry, "not slot numbers after the colon", remedy))
                continue
            slots = tuple(int(number) for number in numbers.split(","))
        absent = sorted(set(slots) - set(hostfile_slots[name]))
        if absent:
            rule = f"{name} has slots 0 to {len(hostfile_slots[name]) - 1}, not {absent[0]}"
            problems.append(Problem(option, entry, rule, "name slots that exist"))
            continue
        listed[name] = tuple(sorted({*listed.get(name, ()), *slots}))
    raise_problems(problems)
    return listed
