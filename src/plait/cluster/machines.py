"""The machines of a run as plain facts, and the file that describes them where they are not at
hand.

Pure but for reading that file: nothing looks at this machine. A planner on a laptop gets the same
Topology as the cluster would give.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from plait.cluster import accelerator
from plait.cluster.accelerator import DeviceType
from plait.errors import InputError, Problem, refuse


@dataclass(frozen=True)
class Node:
    """One machine. A device is what one process drives: a GPU, or on a machine without GPUs the
    process's share of the cores.
    """

    name: str
    devices: int


@dataclass(frozen=True)
class Topology:
    """The machines of a run, in rank order. `memory_bytes` is that of one device, or None where it
    is not known.
    """

    nodes: tuple[Node, ...]
    device_type: DeviceType
    memory_bytes: int | None = None

    @property
    def world_size(self) -> int:
        """Number of devices, which is the number of processes."""
        return sum(node.devices for node in self.nodes)


def load(path: str | Path) -> Topology:
    """Machines described in a YAML or JSON file, for planning where they are not at hand:

        device_type: cuda
        memory_bytes: 85_899_345_920     # of one device; may be left out
        nodes:
          - {name: a01, devices: 8}
          - {name: a02, devices: 8}

    `nodes: 128` with `devices_per_node: 8` describes equal machines. Raises InputError for a file
    that cannot be read and ConfigError for its content.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cluster file {path}: {getattr(error, 'strerror', None) or error}; name a readable"
            " YAML or JSON file"
        ) from None
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"cluster file {path} is not valid {'JSON' if path.suffix == '.json' else 'YAML'}:"
            f" {error}"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            f"cluster file {path}: holds {type(content).__name__}, not keys and values; begin with"
            " `nodes:`"
        )
    return _topology(content, str(path))


_KEYS = ("nodes", "devices_per_node", "device_type", "memory_bytes")


def _topology(content: Mapping[str, Any], source: str) -> Topology:
    problems = [_unknown(f"{source}: {key}", key, _KEYS) for key in content if key not in _KEYS]
    nodes = content.get("nodes")
    per_node = content.get("devices_per_node")
    machines: list[Node] = []
    if isinstance(nodes, int) and _is_count(nodes):
        if isinstance(per_node, int) and _is_count(per_node):
            machines = [Node(f"node{index}", per_node) for index in range(nodes)]
        else:
            problems.append(
                Problem(
                    f"{source}: devices_per_node",
                    per_node,
                    f"`nodes: {nodes}` needs a whole number of devices, at least 1",
                    "set it, for example 8",
                )
            )
    elif isinstance(nodes, list) and nodes:
        machines, found = _machines(nodes, per_node, source)
        problems += found
    else:
        problems.append(
            Problem(
                f"{source}: nodes",
                nodes,
                "neither a list of machines nor a count of at least 1",
                "list `{name: a01, devices: 8}`",
            )
        )
    device_type = content.get("device_type", accelerator.NAME)
    if device_type not in get_args(DeviceType):
        remedy = f"use {accelerator.NAME} or cpu"
        problems.append(
            Problem(
                f"{source}: device_type",
                device_type,
                "not a device type that Plait runs on",
                remedy,
            )
        )
    memory = content.get("memory_bytes")
    if memory is not None and not _is_count(memory):
        problems.append(
            Problem(
                f"{source}: memory_bytes",
                memory,
                "not a whole number of bytes",
                "set the bytes of one device, or leave it out",
            )
        )
    refuse(problems)
    return Topology(tuple(machines), device_type, memory)


def _machines(nodes: list[Any], per_node: Any, source: str) -> tuple[list[Node], list[Problem]]:
    machines: list[Node] = []
    problems: list[Problem] = []
    for index, entry in enumerate(nodes):
        where = f"{source}: nodes[{index}]"
        if not isinstance(entry, dict):
            problems.append(
                Problem(
                    where,
                    entry,
                    "not a machine with its devices",
                    "write `{name: a01, devices: 8}`",
                )
            )
            continue
        problems += [
            _unknown(f"{where}.{key}", key, ("name", "devices"))
            for key in entry
            if key not in ("name", "devices")
        ]
        name = entry.get("name", f"node{index}")
        devices = entry.get("devices", per_node)
        if not isinstance(name, str):
            problems.append(Problem(f"{where}.name", name, "not a name", "quote it"))
        if not _is_count(devices):
            problems.append(
                Problem(
                    f"{where}.devices",
                    devices,
                    "not a whole number of at least 1",
                    "set the number of devices, for example 8",
                )
            )
        if any(machine.name == name for machine in machines):
            problems.append(
                Problem(f"{where}.name", name, "named twice", "give every machine its own name")
            )
        machines.append(Node(name, devices))
    return machines, problems


def _unknown(field: str, key: object, known: tuple[str, ...]) -> Problem:
    near = difflib.get_close_matches(str(key), known, n=1)
    return Problem(
        field,
        None,
        "unknown key",
        f"did you mean `{near[0]}`?" if near else f"use {', '.join(known)}",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
