"""The catalogue of devices and links (`data/hardware.yaml`), and the cluster that a plan is made
for.

Pure: figures of datasheets, read from the package; what a machine really reaches is in `constants`.
A Device may hold scalars, or arrays with one entry a candidate, so that rows of many machines are
priced in one call.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
import yaml

from plait.cluster.machines import Topology
from plait.errors import InputError
from plait.units import GIB

T = TypeVar("T")
Numbers = Any
"""A number, or an array with one entry a candidate."""

FAMILIES = ("volta", "ampere", "hopper", "blackwell", "cdna3", "cpu")
"""Devices of one family share fitted efficiencies."""

_HOST_GIB = {"volta": 64, "ampere": 128, "hopper": 256, "blackwell": 256, "cdna3": 256, "cpu": 8}
"""Usual memory of a node by its devices: DGX-1 0.5 TB, DGX A100 1 TB, DGX H100 and B200 and MI300X
servers 2 TB, of eight devices each.
"""

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "fp4")


@dataclass(frozen=True)
class Device:
    """One kind of device, with its usual surroundings. Bytes, seconds, FLOP/s; one direction,
    dense.
    """

    name: Any
    title: Any
    family: Numbers
    """Index into FAMILIES."""
    memory_bytes: Numbers
    memory_bandwidth: Numbers
    link_bandwidth: Numbers
    """To the other devices of the domain, bytes/s."""
    domain: Numbers
    """Devices that this link joins."""
    nic_bandwidth: Numbers
    """To other domains, bytes/s per device."""
    network_step: Numbers
    """Seconds of one step of a ring between domains: 14 us with NCCL over InfiniBand
    (`src/graph/tuning.cc`).
    """
    host_bandwidth: Numbers
    host_memory_bytes: Numbers
    """A device's share of its node's memory."""
    units: Numbers
    devices_per_node: Numbers
    power: Numbers
    """Clock under load, of that of the usual device of its family."""
    flops: dict[str, Numbers]
    """Precision to peak FLOP/s; NaN or absent: it cannot compute so."""
    source: Any = ""

    @property
    def on_cpu(self) -> Numbers:
        """Whether it is a process on CPU cores: kernels are not queued, and traffic takes the cores
        that compute.
        """
        return np.asarray(self.family) == FAMILIES.index("cpu")


@cache
def _catalogue() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (files("plait.planner") / "data" / "hardware.yaml").read_text(encoding="utf-8")
    )
    return content


def device_names() -> tuple[str, ...]:
    """Names in the catalogue."""
    return tuple(_catalogue()["devices"])


@cache
def device(name: str) -> Device:
    """The device that `name` means: a catalogue name, or as published tables write it. Raises
    InputError for an unknown one.
    """
    table = _catalogue()["devices"]
    wanted = name.strip().lower()
    places = {
        key: place
        for key, entry in table.items()
        if (place := _place(entry["match"], wanted)) is not None
    }
    found = wanted if wanted in table else min(places, key=lambda key: places[key], default=None)
    if found is None:
        near = difflib.get_close_matches(wanted, table, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"GPU {name!r}: not in the catalogue; {hint}it has {', '.join(table)}")
    entry = table[found]
    link = _catalogue()["links"][entry["link"]]
    return Device(
        name=found,
        title=entry["title"],
        family=FAMILIES.index(entry["family"]),
        memory_bytes=entry["memory_gib"] * GIB,
        memory_bandwidth=entry["memory_tb_s"] * 1e12,
        link_bandwidth=link["gb_s"] * 1e9,
        domain=entry.get("domain", entry["devices_per_node"]),
        nic_bandwidth=entry["nic_gb_s"] * 1e9,
        network_step=14e-6,
        host_bandwidth=entry["host_gb_s"] * 1e9,
        host_memory_bytes=entry.get("host_gib", _HOST_GIB[entry["family"]]) * GIB,
        units=entry["units"],
        devices_per_node=entry["devices_per_node"],
        power=entry.get("power", 1.0),
        flops={precision: value * 1e12 for precision, value in entry["tflops"].items()},
        source=f"{entry['source']}; link: {link['source']}",
    )


def _place(patterns: list[str], name: str) -> int | None:
    """Where in `name` the first pattern begins: of several devices that are named, the first is
    meant. An H1000 is no H100.
    """
    return min(
        (
            match.start()
            for pattern in patterns
            if (match := re.search(f"(?:{pattern})(?![0-9])", name))
        ),
        default=None,
    )


def mapped(numbers: T, change: Callable[[Any], Any]) -> T:
    """A copy of a dataclass of numbers with each of them changed, those in a mapping too."""

    def changed(value: Any) -> Any:
        return (
            {name: change(inner) for name, inner in value.items()}
            if isinstance(value, dict)
            else change(value)
        )

    return replace(numbers, **{f.name: changed(getattr(numbers, f.name)) for f in fields(numbers)})  # type: ignore[type-var, arg-type]


def only(value: Numbers) -> float:
    """The number of the first candidate, or of all."""
    return float(np.ravel(value)[0])


def stack(entries: Sequence[T]) -> T:
    """One of several, whose numbers are arrays with an entry each; NaN where a mapping lacks a
    name.
    """

    def together(values: list[Any]) -> Any:
        if not isinstance(values[0], dict):
            return np.array(values)
        names = dict.fromkeys(name for value in values for name in value)
        return {
            name: np.array([value.get(name, np.nan) for value in values], dtype=float)
            for name in names
        }

    names = [f.name for f in fields(entries[0])]  # type: ignore[arg-type]
    return replace(
        entries[0],
        **{name: together([getattr(entry, name) for entry in entries]) for name in names},
    )  # type: ignore[type-var]


@dataclass(frozen=True)
class Cluster:
    """The machines of a plan: a device, how many, and how they are grouped."""

    device: Device
    devices: int

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.devices // int(self.device.devices_per_node))

    def __str__(self) -> str:
        per_node = min(self.devices, int(self.device.devices_per_node))
        return f"{self.devices} x {self.device.title}, {per_node} a node"


def cluster(
    name: str,
    devices: int,
    *,
    devices_per_node: int | None = None,
    **figures: float | None,
) -> Cluster:
    """`devices` of the catalogue's `name`, with those of its `figures` (`memory_bytes`,
    `nic_bandwidth`) replaced that are not None. Raises InputError for what cannot be.
    """
    found = device(name)
    changes: dict[str, Any] = {key: value for key, value in figures.items() if value is not None}
    if devices < 1:
        raise InputError(
            f"--world-size {devices}: a cluster has at least one device; give the number of all"
            " devices"
        )
    if devices_per_node is not None:
        wide = found.domain if found.domain > found.devices_per_node else devices_per_node
        changes |= {"devices_per_node": devices_per_node, "domain": wide}
    found = replace(found, **changes)
    per_node = int(found.devices_per_node)
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        rule = (
            f"--world-size {devices}: nodes have {per_node} devices and {devices} % {per_node} ="
            f" {devices % per_node}"
        )
        raise InputError(f"{rule}; use {below} or {below + per_node}, or give --nproc-per-node")
    return Cluster(found, devices)


def cluster_of(topology: Topology, name: str, **changes: float | None) -> Cluster:
    """The same from a cluster file or a machine that was found. Raises InputError where its
    machines differ.
    """
    counts = sorted({node.devices for node in topology.nodes})
    if len(counts) > 1:
        raise InputError(
            f"the cluster has machines with {' and '.join(map(str, counts))} devices; plan for"
            " machines of one kind"
        )
    memory = changes.pop("memory_bytes", None) or topology.memory_bytes
    return cluster(
        name, topology.world_size, devices_per_node=counts[0], memory_bytes=memory, **changes
    )
