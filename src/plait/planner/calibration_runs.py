"""What a live calibration measures: a few short runs that tell the constants apart, and the rates
of the device as what is believed before.

Pure: which layouts, and what a measured rate says of a constant. `engine` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.planner.constants import Knowledge
from plait.planner.hardware import FAMILIES, Device
from plait.planner.job import RECOMPUTE, SCHEDULES
from plait.planner.traffic import BASE, INSIDE_STEP

RATE_WIDTH = 0.15
"""How far the rate of a product alone is from that of products in a step, as a logarithm."""


@dataclass(frozen=True)
class DeviceRates:
    """What a process of the machine reaches while the others do the same."""

    products: Mapping[str, float]
    """`rows x inner x columns` to FLOP/s, in the precision of the runs."""
    memory_bytes_per_second: float
    """Of an addition: two tensors read, one written."""
    all_reduce: tuple[float, float] | None = None
    """(seconds, seconds a byte) over all processes; None for one process."""


def believed(
    known: Knowledge, device: Device, rates: DeviceRates, *, processes: int, precision: str
) -> Knowledge:
    """`known` with what was measured in the place of what is usual; processes of one machine."""
    family = FAMILIES[int(device.family)]
    suffix = ".cpu" if family == "cpu" else ""
    crowd = processes ** known.constants["crowding.cpu"].median if family == "cpu" else 1.0
    found = {
        f"gemm.{family}": (
            max(rates.products.values()) * crowd / float(device.flops[precision] * device.power)
        ),
        f"memory{suffix}": rates.memory_bytes_per_second * crowd / float(device.memory_bandwidth),
    }
    if rates.all_reduce is not None and processes <= int(device.domain):
        fixed, per_byte = rates.all_reduce
        # `traffic.collective_seconds`, solved for its constants.
        share = (
            2
            * (processes - 1)
            / processes
            * (processes + 0.5)
            / processes
            / float(device.link_bandwidth)
        )
        if per_byte > 0:
            found[f"link{suffix}"] = share / per_byte
        if fixed > 0:
            found[f"latency{suffix}"] = fixed / (BASE + 2 * (processes - 1) * INSIDE_STEP)
    constants = dict(known.constants)
    for name, value in found.items():
        constants[name] = replace(
            constants[name], median=float(value), width=max(RATE_WIDTH, 0.4 * constants[name].width)
        )
    return replace(known, constants=constants)


def calibration_layouts(processes: int, *, batch: int, heads: int) -> list[dict[str, Any]]:
    """Layouts of `processes` that differ in one thing each: the micro-batch, the ZeRO stage, tp,
    pp, recomputation. `batch` is a multiple of 4 x `processes`; where `heads` do not split, tp is
    left out.
    """
    full = RECOMPUTE.index("full")
    operators = RECOMPUTE.index("operators")
    per_rank = batch // processes
    found = [
        _layout(batch, replicate=processes, micro=per_rank),
        _layout(batch, replicate=processes, micro=1),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=full),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=operators),
    ]
    if processes > 1:
        found += [
            _layout(batch, shard=processes, stage=1, micro=per_rank // 2),
            _layout(batch, shard=processes, stage=2, micro=1),
            _layout(batch, shard=processes, stage=3, micro=per_rank),
            _layout(batch, shard=processes, stage=3, micro=1),
        ]
    if processes % 2 == 0:
        half = processes // 2
        if heads % 2 == 0:
            found += [
                _layout(batch, replicate=half, tp=2, micro=batch // half),
                _layout(batch, replicate=half, tp=2, micro=2),
            ]
        found += [
            _layout(batch, replicate=half, pp=2, micro=batch // half // micros) for micros in (2, 4)
        ]
    return [
        dict(layout)
        for layout in {tuple(sorted(layout.items())): layout for layout in found}.values()
    ]


def _layout(
    batch: int,
    *,
    micro: int,
    replicate: int = 1,
    shard: int = 1,
    tp: int = 1,
    pp: int = 1,
    stage: int = 0,
    recompute: int = 0,
) -> dict[str, Any]:
    micro = max(1, micro)
    return {
        "pp": pp,
        "schedule": SCHEDULES.index("1f1b" if pp > 1 else "none"),
        "tp": tp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "stage": stage,
        "recompute": recompute,
        "micro_batch": micro,
        "accumulation": batch // (replicate * shard * micro),
    }
