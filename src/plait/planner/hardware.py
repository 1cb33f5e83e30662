"""Catalogue of devices and links (`data/hardware.yaml`), and the cluster that a plan is made for.

The figures are those of datasheets. `plait.planner.constants` has the share of each figure that
training reaches. The fields of a `DeviceSpec` are scalars, or arrays with one entry per candidate,
so that runs of many machines are estimated in one call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import yaml

from plait.cluster.machines import Topology
from plait.errors import InputError
from plait.names import did_you_mean
from plait.sizes import GIB

T = TypeVar("T")
Numbers = Any
"""Scalar, or array with one entry per candidate."""

DEVICE_FAMILIES = ("volta", "ampere", "hopper", "blackwell", "cdna3", "cpu")
"""Device families. Devices of one family share fitted constants."""

_HOST_GIB = {"volta": 64, "ampere": 128, "hopper": 256, "blackwell": 256, "cdna3": 256, "cpu": 8}
"""Usual host memory per device. DGX-1 has 0.5 TB per node of eight devices, DGX A100 1 TB, and
servers with H100, B200 and MI300X have 2 TB.
"""

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "fp4")


@dataclass(frozen=True)
class DeviceSpec:
    """Device type with its usual network.

    Units are bytes, seconds and FLOP/s. Bandwidths are for one direction, FLOP/s without sparsity.
    """

    name: Any
    title: Any
    family: Numbers
    """Index into DEVICE_FAMILIES."""
    memory_bytes: Numbers
    memory_bandwidth: Numbers
    link_bandwidth: Numbers
    """Bytes/s to the other devices of the domain."""
    domain: Numbers
    """Number of devices that the link connects."""
    nic_bandwidth: Numbers
    """Bytes/s per device to other domains."""
    network_step: Numbers
    """Seconds of one step of a ring between domains.

    14 us with NCCL over InfiniBand (`src/graph/tuning.cc`).
    """
    host_bandwidth: Numbers
    host_memory_bytes: Numbers
    """Host memory of the node divided by its devices."""
    units: Numbers
    """Number of multiprocessors."""
    devices_per_node: Numbers
    power: Numbers
    """Clock under load, relative to the usual device of its family."""
    flops: dict[str, Numbers]
    """Peak FLOP/s by precision. NaN or missing if the precision is not supported."""
    source: Any = ""

    @property
    def on_cpu(self) -> Numbers:
        """True for a process on CPU cores.

        CPU cores do not queue kernels, and communication uses the cores that compute.
        """
        return np.asarray(self.family) == DEVICE_FAMILIES.index("cpu")


_NOT_IN_NAMES = r"""[^a-z0-9 ().,:;?"/+-]"""
"""Characters that no name in published tables has."""


@cache
def _catalogue() -> dict[str, Any]:
    file = files("plait.planner") / "data" / "hardware.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def device_names() -> tuple[str, ...]:
    """Return the names of all devices in the catalogue."""
    return tuple(_catalogue()["devices"])


@cache
def device(name: str) -> DeviceSpec:
    """Return the device of the catalogue for a name such as `h100` or `NVIDIA H100 80GB HBM3`.

    Raises:
        InputError: The name is unknown.
    """
    table = _catalogue()["devices"]
    query = name.strip().lower().replace("_", "-")
    key = query if query in table else _first_mentioned(table, query)
    if key is None:
        hint = did_you_mean(query, table, cutoff=0.5)
        raise InputError(f"GPU {name!r}: not in the catalogue; {hint}known are {', '.join(table)}")
    entry = table[key]
    link = _catalogue()["links"][entry["link"]]

    return DeviceSpec(
        name=key,
        title=entry["title"],
        family=DEVICE_FAMILIES.index(entry["family"]),
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


def _first_mentioned(table: Mapping[str, Any], name: str) -> str | None:
    """Return the key of the first device that occurs in a name, or None.

    Only full words match: H1000 and MI300A are other devices than H100 and MI300X.
    """
    if re.search(_NOT_IN_NAMES, name):
        return None
    positions = {}
    for key, entry in table.items():
        matches = (re.search(f"\\b(?:{pattern})", name) for pattern in entry["match"])
        starts = [match.start() for match in matches if match is not None]
        if starts:
            positions[key] = min(starts)
    return min(positions, key=positions.__getitem__, default=None)


def mapped(numbers: T, change: Callable[[Any], Any]) -> T:
    """Return a copy of a dataclass with `change` applied to all numbers, also in mappings."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(inner) for name, inner in value.items()}
        return change(value)

    return replace(numbers, **{f.name: changed(getattr(numbers, f.name)) for f in fields(numbers)})  # type: ignore[type-var, arg-type]


def only(value: Numbers) -> float:
    """Return the one value of a scalar, or of an array whose entries are all equal."""
    return float(np.ravel(value)[0])


def stack(entries: Sequence[T]) -> T:
    """Combine instances of a dataclass into one that has arrays with one entry per instance.

    Keys that are missing in the mapping of an instance become NaN.
    """

    def together(values: list[Any]) -> Any:
        if not isinstance(values[0], dict):
            return np.array(values)
        arrays: dict[str, Any] = {}
        for name in chain.from_iterable(values):
            if name not in arrays:
                arrays[name] = np.array([value.get(name, np.nan) for value in values], dtype=float)
        return arrays

    stacked: dict[str, Any] = {}
    for f in fields(entries[0]):  # type: ignore[arg-type]
        stacked[f.name] = together([getattr(entry, f.name) for entry in entries])
    return replace(entries[0], **stacked)  # type: ignore[type-var]


@dataclass(frozen=True)
class Cluster:
    """Devices of a plan: type, number, and grouping into machines."""

    device: DeviceSpec
    devices: int

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.devices // int(self.device.devices_per_node))

    def __str__(self) -> str:
        per_node = min(self.devices, int(self.device.devices_per_node))
        return f"{self.devices} x {self.device.title}, {per_node} per node"


def cluster(
    name: str,
    devices: int,
    *,
    devices_per_node: int | None = None,
    **figures: float | None,
) -> Cluster:
    """Return a cluster whose devices are of one type of the catalogue.

    Args:
        name: Name of the device type.
        devices: Number of devices on all machines.
        devices_per_node: Devices per machine. None uses the number in the catalogue.
        **figures: Fields of `DeviceSpec` to replace, such as `memory_bytes`. None keeps the value
            of the catalogue.

    Raises:
        InputError: The device is unknown, or `devices` is not a multiple of the devices per
            machine.
    """
    chosen = device(name)
    changes: dict[str, Any] = {key: value for key, value in figures.items() if value is not None}
    if devices < 1:
        raise InputError(
            f"--world-size {devices}: a cluster has at least one device; pass the number of all"
            " devices"
        )

    if devices_per_node is not None:
        # A link across nodes, such as that of an NVL72, keeps its domain.
        spans_nodes = chosen.domain > chosen.devices_per_node
        domain = chosen.domain if spans_nodes else devices_per_node
        changes |= {"devices_per_node": devices_per_node, "domain": domain}

    chosen = replace(chosen, **changes)
    per_node = int(chosen.devices_per_node)
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        raise InputError(
            f"--world-size {devices}: nodes have {per_node} devices and {devices} % {per_node} ="
            f" {devices % per_node}; use {below} or {below + per_node}, or pass a --nproc-per-node"
            f" that divides {devices}"
        )

    return Cluster(chosen, devices)


def cluster_of(topology: Topology, name: str, **changes: float | None) -> Cluster:
    """Return the cluster of the machines in a detected topology. See `cluster` for the arguments.

    Raises:
        InputError: The machines have different numbers of devices.
    """
    counts = sorted({node.devices for node in topology.nodes})
    if len(counts) > 1:
        raise InputError(
            f"the machines have different numbers of devices ({' and '.join(map(str, counts))});"
            " plan for machines with equal numbers of devices"
        )

    memory = changes.pop("memory_bytes", None) or topology.memory_bytes
    return cluster(
        name, topology.world_size, devices_per_node=counts[0], memory_bytes=memory, **changes
    )
