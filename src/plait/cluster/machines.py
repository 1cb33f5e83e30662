"""Description of the machines of a run.

Nothing here looks at this machine. A planner on a laptop gets the same Topology as on the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.accelerator import DeviceType


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
