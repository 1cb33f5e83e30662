"""The most important numbers of a row in one line, for the screen and for
docs/reference/devices.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.units import format_bytes, format_count

Numbers = Mapping[str, Any]


def summary_of(name: str, numbers: Numbers) -> str:
    """Return a line about the numbers of the row `name`. Empty for a row without numbers."""
    if not numbers:
        return ""
    check, _, variant = name.partition("/")
    if check == "nccl":
        check = {"collectives": "links"}.get(
            variant, "parity" if "parity" in variant else "throughput"
        )
    summarise = _SUMMARIES.get(check)
    try:
        return summarise(numbers) if summarise is not None else ""
    except (KeyError, TypeError):  # A row that was cut has some of its numbers only.
        return ""


def _ceilings(numbers: Numbers) -> str:
    if "to_device" in numbers:
        rates = ("to_device", "to_host", "both")
        return ", ".join(f"{name} {numbers[name] / 1e9:.1f} GB/s" for name in rates)
    copied = numbers["copy_bytes_per_second"]
    product = numbers["product_flops_per_second"]
    return f"copy {copied / 1e9:,.0f} GB/s, product {product / 1e12:,.0f} TFLOP/s"


def _waits(numbers: Numbers) -> str:
    return f"{numbers['waits_per_step']:g} per step, {numbers['expected_per_step']} expected"


def _parity(numbers: Numbers) -> str:
    parts = []
    if "float64" in numbers:
        parts.append(f"float64: {numbers['float64']['largest_error']:.0e}")
    if "configured" in numbers:
        share = numbers["configured"]["largest_share_of_allowed"]
        parts.append(f"{numbers['computes_in']}: {share:.0%} of what is allowed")
    parts += [
        f"{name} ({case['kernel']}) {case['largest_error']:.0e}"
        for name, case in numbers.items()
        if isinstance(case, Mapping) and "kernel" in case
    ]
    return ", ".join(parts)


def _throughput(numbers: Numbers) -> str:
    parts = [
        f"{name} {tokens:,.0f} tokens/s, MFU {numbers['mfu'][name]:.1%}"
        for name, tokens in numbers["tokens_per_second"].items()
    ]
    parts += [
        f"step of {next(iter(numbers['seconds']))} / {name} {ratio['median']:.3f}"
        f" ({ratio['least']:.3f} to {ratio['most']:.3f})"
        for name, ratio in numbers["ratio"].items()
    ]
    if "layer" in numbers:
        layers = ", ".join(f"{name} {mfu:.1%}" for name, mfu in numbers["layer"]["mfu"].items())
        parts.append(f"MFU of a layer: {layers}")
    return "; ".join(parts)


def _profile(numbers: Numbers) -> str:
    between = numbers["idle_seconds_between_steps"]
    idle_between = "" if between is None else f", {between * 1e3:.2f} ms between steps"
    return (
        f"{numbers['kernels_per_step']:,.0f} kernels per step, idle {numbers['idle_share']:.1%}"
        f"{idle_between}, median gap {numbers['median_gap_seconds'] * 1e6:.1f} us"
    )


def _memory(numbers: Numbers) -> str:
    ranks = [
        rank
        for value in numbers.values()
        if isinstance(value, list)
        for rank in value
        if isinstance(rank, Mapping) and "predicted" in rank
    ]
    errors = [rank["predicted"] / rank["measured"] - 1 for rank in ranks]
    worst = max(errors, key=abs)
    most = max(rank["measured"] for rank in ranks)
    return f"measured {format_bytes(most)}, prediction {worst:+.1%}"


def _offload(numbers: Numbers) -> str:
    text = f"a step takes {numbers['step_ratio']:.2f} times as long"
    host = numbers["states_on_host"]
    if "extrapolated_parameters" in host:
        text += f", up to {format_count(host['extrapolated_parameters'])} parameters"
    return text


def _streaming(numbers: Numbers) -> str:
    if "rate" not in numbers:
        return f"{format_bytes(numbers['bytes_per_token'])} per token"
    return f"{numbers['rate'] / 1e9:.1f} GB/s, {numbers['share']:.0%} of plain copies"


def _kernels(numbers: Numbers) -> str:
    constants = ", ".join(f"{name} {value:.3g}" for name, value in numbers["constants"].items())
    if "step" not in numbers:
        return constants
    step = numbers["step"]
    return (
        f"{constants}; step measured {step['measured_seconds']:.3f} s, planned "
        f"{step['planned_seconds']:.3f} s, calibrated {step['planned_seconds_calibrated']:.3f} s"
    )


def _links(numbers: Numbers) -> str:
    return ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in numbers["rates"].items())


def _planned(numbers: Numbers) -> str:
    return f"ratio {numbers['ratio']:.2f}"


def _largest(numbers: Numbers) -> str:
    share = numbers["predicted_share"]
    memory = format_bytes(numbers["memory"])
    return f"{format_count(numbers['parameters'])} parameters, predicted {share:.0%} of {memory}"


_SUMMARIES: Mapping[str, Callable[[Numbers], str]] = {
    "ceilings": _ceilings,
    "kernels": _kernels,
    "largest": _largest,
    "links": _links,
    "memory": _memory,
    "offload": _offload,
    "parity": _parity,
    "planned": _planned,
    "profile": _profile,
    "streaming": _streaming,
    "throughput": _throughput,
    "waits": _waits,
}
