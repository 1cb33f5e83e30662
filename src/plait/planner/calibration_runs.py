"""Runs and priors of a live calibration: layouts to measure, and constants from measured rates.

A few short runs are chosen that separate the constants from each other. The rates of the device
become the priors of the fit. The engine measures; this module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.planner.constants import Knowledge
from plait.planner.hardware import FAMILIES, DeviceSpec
from plait.planner.job import RECOMPUTE, SCHEDULES
from plait.planner.traffic import BASE, INSIDE_STEP

RATE_WIDTH = 0.15
"""Uncertainty of a rate that was measured alone, compared to that in a step, as a logarithm."""


@dataclass(frozen=True)
class DeviceRates:
    """Rates that one process of the machine reaches while the others do the same."""

    products: Mapping[str, float]
    """FLOP/s by `rows x inner x columns`, in the precision of the runs."""
    memory_bytes_per_second: float
    """Bandwidth of an addition, which reads two tensors and writes one."""
    all_reduce: tuple[float, float] | None = None
    """(seconds, seconds per byte) over all processes; None for one process."""


def priors_from_rates(
    known: Knowledge, device: DeviceSpec, rates: DeviceRates, *, processes: int, precision: str
) -> Knowledge:
    """Return priors in which measured rates replace the usual ones.

    Args:
        known: Priors for any machine.
        device: Device of the machine.
        rates: Measured rates.
        processes: Processes of one machine that were measured together.
        precision: Precision of the products.
    """
    family = FAMILIES[int(device.family)]
    suffix = ""
    crowd = 1.0
    if family == "cpu":
        # Processes share the memory, and the constants are those of a process alone.
        suffix = ".cpu"
        crowd = processes ** known.constants["crowding.cpu"].median
    measured = {
        f"gemm.{family}": (
            max(rates.products.values()) * crowd / float(device.flops[precision] * device.power)
        ),
        f"memory{suffix}": rates.memory_bytes_per_second * crowd / float(device.memory_bandwidth),
    }
    if rates.all_reduce is not None and processes <= int(device.domain):
        fixed, per_byte = rates.all_reduce
        # `traffic.collective_seconds`, solved for its constants.
        ring = 2 * (processes - 1) / processes
        share = ring * (processes + 0.5) / processes / float(device.link_bandwidth)
        if per_byte > 0:
            measured[f"link{suffix}"] = share / per_byte
        if fixed > 0:
            measured[f"latency{suffix}"] = fixed / (BASE + 2 * (processes - 1) * INSIDE_STEP)

    constants = dict(known.constants)
    for name, value in measured.items():
        constants[name] = replace(
            constants[name], median=float(value), width=max(RATE_WIDTH, 0.4 * constants[name].width)
        )
    return replace(known, constants=constants)


def calibration_layouts(processes: int, *, batch: int, heads: int) -> list[dict[str, Any]]:
    """Return layouts that differ in one property each.

    These are the micro-batch, the ZeRO stage, tp, pp, and recomputation.

    Args:
        processes: Number of processes.
        batch: Global batch, a multiple of 4 x `processes`.
        heads: Attention heads. With an odd number tp is left out.
    """
    full = RECOMPUTE.index("full")
    operators = RECOMPUTE.index("operators")
    per_rank = batch // processes
    layouts = [
        _layout(batch, replicate=processes, micro=per_rank),
        _layout(batch, replicate=processes, micro=1),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=full),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=operators),
    ]
    if processes > 1:
        layouts += [
            _layout(batch, shard=processes, stage=1, micro=per_rank // 2),
            _layout(batch, shard=processes, stage=2, micro=1),
            _layout(batch, shard=processes, stage=3, micro=per_rank),
            _layout(batch, shard=processes, stage=3, micro=1),
        ]

    if processes % 2 == 0:
        half = processes // 2
        if heads % 2 == 0:
            layouts += [
                _layout(batch, replicate=half, tp=2, micro=batch // half),
                _layout(batch, replicate=half, tp=2, micro=2),
            ]
        for micro_batches in (2, 4):
            micro = batch // half // micro_batches
            layouts.append(_layout(batch, replicate=half, pp=2, micro=micro))

    unique = {tuple(sorted(layout.items())): layout for layout in layouts}
    return list(unique.values())


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
