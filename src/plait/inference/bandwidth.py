"""Bandwidth bound of generation: how fast a deployment could decode if only bytes counted."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster import accelerator
from plait.errors import InputError
from plait.inference.capacity import USABLE_SHARE
from plait.inference.deployment import DeploymentBytes, Devices
from plait.planner.hardware import DeviceSpec, device, only


@dataclass(frozen=True)
class BandwidthBound:
    """Lower bound of the time per token. A real decoder is slower.

    Attributes:
        token_seconds: Time of the slowest tier.
        limit: Name of that tier.
    """

    token_seconds: float
    limit: str


def bandwidth_bound(account: DeploymentBytes, gpu: DeviceSpec) -> BandwidthBound:
    """Return the maximum over all tiers of the bytes per token divided by the tier's bandwidth.

    Every token reads all weights, and the keys and values of all requests at their full length.
    Files are left out, because no datasheet says how fast they are read.

    Args:
        account: Bytes per tier of one device.
        gpu: The device, from the planner's catalogue.
    """
    on_device = account.weights + account.streamed + account.cache
    from_host = account.on_host + account.cache_copied
    seconds = {
        "the GPU's memory": on_device / float(only(gpu.memory_bandwidth)),
        "the link from host memory": from_host / float(only(gpu.host_bandwidth)),
    }
    limit = max(seconds, key=lambda tier: seconds[tier])
    return BandwidthBound(seconds[limit], limit)


def devices_of(gpu: DeviceSpec, count: int | None) -> Devices:
    """Return a machine with idle devices of one kind.

    Args:
        gpu: The kind of device, from the planner's catalogue.
        count: Number of devices. None stands for the usual number of devices per machine.
    """
    count = count or int(only(gpu.devices_per_node))
    return Devices(
        on_gpu=not bool(gpu.on_cpu),
        count=count,
        memory_bytes=int(only(gpu.memory_bytes)),
        host_bytes=int(USABLE_SHARE * only(gpu.host_memory_bytes) * count),
    )


def catalogued_gpu() -> DeviceSpec | None:
    """Return this machine's GPU from the planner's catalogue, or None if it is not listed."""
    try:
        return device(accelerator.model_name())
    except InputError:
        return None
