"""Rows of a validation, and their results as data, as a JSON document and as summaries.

A row is one check with its settings. This module does not use a GPU, because the process that
starts the checks imports it.

The JSON document has the machine, the versions and the measurements of all rows. It contains no
paths, user names or host names, and only those environment variables that change how CUDA, NCCL and
torch work. A summary is one line with the most important measurements of a row, for the screen and
for docs/reference/devices.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from plait.files import with_finite_numbers
from plait.sizes import format_bytes, format_count

Outcome = Literal["passed", "failed", "not run"]

LIMIT_FACTOR = 3.0
"""Ratio of the time limit of a row to its planned time."""


@dataclass(frozen=True)
class Row:
    """Check of `plait doctor --validate`, with its settings and limits."""

    name: str
    """Name as `check/variant`, for `--only` and for the document."""
    title: str
    check: str
    """`module:function` below `plait.validation`, called as function(context, settings) on every
    rank.
    """
    ranks: int = 1
    planned_seconds: float = 10.0
    """Planned time on an H100. A row does not start if less time is left."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    own_process: bool = False
    """True if the row needs a process of its own, because it changes the state of the process."""
    by_default: bool = True
    """True if the row runs without `--only`."""
    unavailable: str = ""
    """Reason why the row cannot run on this machine. Empty for a row that can run."""
    least_limit_seconds: float = 60.0
    """Shortest time limit. First uses of a GPU load kernels, which can take seconds."""

    @property
    def limit_seconds(self) -> float:
        """Seconds after which the row is stopped."""
        return max(self.least_limit_seconds, LIMIT_FACTOR * self.planned_seconds)


@dataclass(frozen=True)
class Result:
    """Result of one row. If the row did not pass, the result has a reason."""

    name: str
    title: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    planned_seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """Result that a check returns on its first rank: passed or failed, with measurements."""

    outcome: Outcome
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


class NotRun(Exception):
    """Raised by a check that cannot run on this machine. All ranks or none must raise it."""


def verdict(problems: Sequence[str], **numbers: Any) -> Verdict:
    """Return a failed verdict if any problem is not empty, otherwise a passed one."""
    reason = "; ".join(filter(None, problems))
    return Verdict("failed" if reason else "passed", reason, numbers)


def not_run(row: Row, reason: str) -> Result:
    """Return the result of a row that did not run."""
    return Result(row.name, row.title, "not run", reason, planned_seconds=row.planned_seconds)


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of results of each outcome."""
    return {
        outcome: sum(result.outcome == outcome for result in results)
        for outcome in ("passed", "failed", "not run")
    }


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if at least one row passed and none failed, otherwise 1."""
    by_outcome = counts(results)
    # A validation in which nothing passed has shown nothing.
    return 1 if by_outcome["failed"] or not by_outcome["passed"] else 0


FORMAT = 2


def document(
    facts: Mapping[str, Any],
    results: Sequence[Result],
    *,
    at: str,
    seconds: float,
    only: Sequence[str],
) -> dict[str, Any]:
    """Return the results of a validation as a JSON document.

    Args:
        facts: Description of the machine, from `validation_facts`.
        results: Results of the rows that have ended.
        at: Start of the validation (UTC, ISO 8601).
        seconds: Seconds since the start.
        only: Patterns of `--only`. Empty if the default rows were run.
    """
    return {
        "format": FORMAT,
        "at": at,
        "seconds": round(seconds, 1),
        "only": list(only),
        **facts,
        "counts": counts(results),
        "rows": [with_finite_numbers(result.as_dict()) for result in results],
    }


Numbers = Mapping[str, Any]


def summary_of(name: str, numbers: Numbers) -> str:
    """Return one line with the main measurements of the row `name`, or "" if it has none."""
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
    except (KeyError, TypeError):
        # A row that was stopped has only some of its numbers.
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
    parts = []
    for name, tokens in numbers["tokens_per_second"].items():
        parts.append(f"{name} {tokens:,.0f} tokens/s, MFU {numbers['mfu'][name]:.1%}")
    for name, ratio in numbers["ratio"].items():
        # The first contender is Plait, which the others are compared with.
        first = next(iter(numbers["seconds"]))
        spread = f"({ratio['least']:.3f} to {ratio['most']:.3f})"
        parts.append(f"step of {first} / {name} {ratio['median']:.3f} {spread}")
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
    errors = []
    measured = []
    # Each case has a list with an entry per rank. The other numbers are not lists.
    for value in numbers.values():
        for rank in value if isinstance(value, list) else ():
            if isinstance(rank, Mapping) and "predicted" in rank:
                errors.append(rank["predicted"] / rank["measured"] - 1)
                measured.append(rank["measured"])
    worst = max(errors, key=abs)
    most = max(measured)
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
