"""Description of the machines of a run, and the file that describes machines elsewhere.

Nothing here looks at this machine. A planner on a laptop gets the same Topology as on the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from plait.cluster import accelerator
from plait.cluster.accelerator import DeviceType
from plait.errors import InputError, Problem, raise_problems
from plait.names import suggest_names
from plait.units import is_count


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


def load(path: str | Path) -> Topology:
    """Return the machines that a YAML or JSON file describes, for planning elsewhere.

        device_type: cuda
        memory_bytes: 85_899_345_920     # of one device; may be left out
        nodes:
          - {name: a01, devices: 8}
          - {name: a02, devices: 8}

    `nodes: 128` with `devices_per_node: 8` describes equal machines.

    Raises:
        InputError: The file cannot be read.
        ConfigError: The file has errors.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cluster file {path}: {getattr(error, 'strerror', None) or error}; name a readable"
            " YAML or JSON file"
        ) from None
    is_json = path.suffix == ".json"
    try:
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        form = "JSON" if is_json else "YAML"
        raise InputError(f"cluster file {path} is not valid {form}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(
            f"cluster file {path}: holds {type(content).__name__}, not keys and values; begin with"
            " `nodes:`"
        )
    return _topology(content, str(path))


_KEYS = ("nodes", "devices_per_node", "device_type", "memory_bytes")
_NODE_KEYS = ("name", "devices")


def _topology(content: Mapping[str, Any], source: str) -> Topology:
    problems = [_unknown_key(f"{source}: {key}", key, _KEYS) for key in content if key not in _KEYS]
    nodes, node_problems = _nodes(content, source)
    problems += node_problems

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
    if memory is not None and not is_count(memory):
        problems.append(
            Problem(
                f"{source}: memory_bytes",
                memory,
                "not a whole number of bytes",
                "set the bytes of one device, or leave it out",
            )
        )
    raise_problems(problems)
    return Topology(tuple(nodes), device_type, memory)


def _nodes(content: Mapping[str, Any], source: str) -> tuple[list[Node], list[Problem]]:
    """Return the machines and the problems of the keys `nodes` and `devices_per_node`."""
    nodes = content.get("nodes")
    per_node = content.get("devices_per_node")
    if isinstance(nodes, list) and nodes:
        return _listed_nodes(nodes, per_node, source)
    if not is_count(nodes):
        problem = Problem(
            f"{source}: nodes",
            nodes,
            "neither a list of machines nor a count of at least 1",
            "list `{name: a01, devices: 8}`",
        )
        return [], [problem]
    if not is_count(per_node):
        problem = Problem(
            f"{source}: devices_per_node",
            per_node,
            f"`nodes: {nodes}` needs a whole number of devices, at least 1",
            "set it, for example 8",
        )
        return [], [problem]
    return [Node(f"node{index}", per_node) for index in range(nodes)], []


def _listed_nodes(
    entries: list[Any], per_node: Any, source: str
) -> tuple[list[Node], list[Problem]]:
    nodes: list[Node] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
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
            _unknown_key(f"{where}.{key}", key, _NODE_KEYS)
            for key in entry
            if key not in _NODE_KEYS
        ]
        name = entry.get("name", f"node{index}")
        devices = entry.get("devices", per_node)
        if not isinstance(name, str):
            problems.append(Problem(f"{where}.name", name, "not a name", "quote it"))
        if not is_count(devices):
            problems.append(
                Problem(
                    f"{where}.devices",
                    devices,
                    "not a whole number of at least 1",
                    "set the number of devices, for example 8",
                )
            )
        if any(node.name == name for node in nodes):
            problems.append(
                Problem(f"{where}.name", name, "named twice", "give every machine its own name")
            )
        nodes.append(Node(name, devices))
    return nodes, problems


def _unknown_key(field: str, key: object, known: tuple[str, ...]) -> Problem:
    return Problem(field, None, "unknown key", suggest_names(str(key), known))
