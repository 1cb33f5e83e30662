"""Report of a verification: compared values with errors and allowed errors, as text and as JSON.

In float64 each loss, norm, gradient and parameter of the layout may differ from that of one process
by at most a fixed relative error. The comparison with the independent reference has the same limit.

In the configured precision, the error of a trace is its difference from the float64 trace. The root
mean square of the layout's errors, over all tensors of a kind (gradients or parameters), must be at
most 1.2 times that of one process in the same precision. A single tensor is a small sample, so its
allowed error is based on the sum of its error in one process and the largest error of its kind.
If the allowed error of gradients amounts to a larger factor than 1.2, parameters get this factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from plait.errors import ParityError
from plait.files import with_finite_numbers
from plait.sizes import dtype_of
from plait.verify.parity import Difference, Kind, Trace, compare, relative_error
from plait.verify.plan import Pass, VerificationPlan

INDEPENDENT = (
    "float64, against a reference without Plait's code: its own cross entropy, clipping and AdamW"
)
EXACT_BAR = 1e-10
ROUNDED_BAR = 1e-7
FACTOR = 1.2
ROUNDINGS = 8
"""Additional float32 roundings of a gradient in a layout: scaling by ranks, the clip factor."""
SCALAR_SHARE = 0.1
"""Allowed error of a loss or norm, as a fraction of the error of that step's gradients.

A loss or norm is a single number, whose error in one process may be 0 by chance.
"""
FLOOR = 1e-3
"""Fraction of the usual size of a kind that is added to the size of a tensor.

Tensors whose exact value is 0 contain rounding noise.
"""


@dataclass(frozen=True)
class ComparedRow:
    """Compared quantity (a loss, norm or tensor), with its error and the allowed error."""

    kind: Kind
    step: int | None
    name: str
    """Name of the parameter. Empty for a loss, a norm, or all tensors together."""
    error: float
    allowed: float
    one_process: float | None = None
    """Error of one process in the same precision."""
    what: str = ""
    """Description of a difference that is not a numerical error."""

    @property
    def equal(self) -> bool:
        """True if the error is at most the allowed error. False for NaN."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        tested = f"{self.kind} of {self.name}" if self.name else self.kind
        if self.step is not None:
            tested += f" in step {self.step}"
        if self.what:
            return f"{tested}: {self.what}"
        return f"{tested}: error {self.error:.1e}, allowed {self.allowed:.1e}"


@dataclass(frozen=True)
class Section:
    """All compared quantities of one pass, or of the comparison with the independent reference."""

    name: Pass | Literal["independent"]
    title: str
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[ComparedRow, ...]:
        """Rows that are not equal, in the order of the computation."""
        return tuple(row for row in self.rows if not row.equal)


@dataclass(frozen=True)
class Report:
    """Result of a verification: the sections with all compared quantities."""

    sections: tuple[Section, ...]
    blocks: tuple[str, ...] = ()
    """Names of the model's blocks."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Description of the run for the JSON report."""

    @property
    def equal(self) -> bool:
        """True if all compared values are equal."""
        return not any(section.different for section in self.sections)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, with non-finite numbers as strings."""
        sections = []
        different: list[str] = []
        for section in self.sections:
            different += [row.name for row in section.different if row.name]
            sections.append(
                {
                    "name": section.name,
                    "title": section.title,
                    "equal": not section.different,
                    "notes": list(section.notes),
                    "rows": [{**asdict(row), "equal": row.equal} for row in section.rows],
                }
            )
        return with_finite_numbers(
            {
                **self.facts,
                "equal": self.equal,
                "first_different": next(iter(different), None),
                "passes": sections,
            }
        )


def compare_float64(
    plan: VerificationPlan, exact: Trace, trace: Trace, *, tolerance: float | None = None
) -> Section:
    """Compare the layout's float64 pass with a float64 run in one process.

    Args:
        plan: The plan.
        exact: Trace of one process in float64.
        trace: Trace of the layout in float64.
        tolerance: Largest relative error. The default is 1e-10, or 1e-7 if the model itself rounds
            to float32.
    """
    bar = _bar(plan, tolerance)
    rows = [*_rows(compare(exact, trace), bar), *_wrong_skips(exact, trace)]
    title = f"float64 in place of every dtype of the configuration, within {bar:.0e} of one process"
    return Section("float64", title, tuple(rows), _skips(trace))


def compare_independent(
    plan: VerificationPlan,
    second: Trace | None,
    trace: Trace,
    *,
    unchecked: str = "",
    tolerance: float | None = None,
) -> Section:
    """Compare the layout's float64 pass with the independent reference.

    Args:
        plan: The plan.
        second: Trace of the independent reference, which may have fewer steps and no parameters.
            None if nothing is compared.
        trace: Trace of the layout in float64.
        unchecked: Description of what the reference does not check.
        tolerance: As in `compare_float64`.
    """
    notes = (unchecked,) if unchecked else ()
    if second is None:
        return Section("independent", INDEPENDENT, (), notes)
    bar = _bar(plan, tolerance)
    count = len(second.losses)
    same = replace(
        trace,
        losses=trace.losses[:count],
        grad_norms=trace.grad_norms[:count],
        gradients=trace.gradients[:count],
        parameters=trace.parameters if second.parameters else {},
        # The other comparison reports copies.
        spread=(),
    )
    return Section("independent", INDEPENDENT, tuple(_rows(compare(second, same), bar)), notes)


def _bar(plan: VerificationPlan, tolerance: float | None) -> float:
    if tolerance is not None:
        return tolerance
    return EXACT_BAR if plan.tested.exact else ROUNDED_BAR


def _rows(differences: Iterable[Difference], allowed: float) -> list[ComparedRow]:
    return [
        ComparedRow(d.kind, d.step, d.tensor or "", d.error, allowed, what=_difference_text(d))
        for d in differences
    ]


def _difference_text(difference: Difference) -> str:
    if difference.kind == "other":
        return difference.name
    if difference.name.startswith("copies"):
        return f"ranks hold different copies, {difference.error:.1e} apart"
    if difference.error == math.inf:
        return "missing in one of the two runs, or of another shape"
    return ""


def compare_configured(
    plan: VerificationPlan, exact: Trace, single: Trace, trace: Trace
) -> Section:
    """Compare the layout's errors in the configured precision with those of one process.

    Steps that the layout skipped because of float16 overflow have no gradients to compare. A run in
    one process with the same loss scales shows whether these steps had to be skipped.

    Args:
        plan: The plan.
        exact: Trace of one process in float64, from which errors are measured.
        single: Trace of one process in the configured precision.
        trace: Trace of the layout in the configured precision.
    """
    errors_of_one = _errors(exact, single)
    allowed = _allowances(errors_of_one, *_units(plan))
    rows = []
    for key, error in _errors(exact, trace).items():
        rows.append(ComparedRow(*key, error, allowed.get(key, 0.0), errors_of_one.get(key)))
    differences = compare(exact, trace)
    # Weights before the first step and copies on several ranks are compared bitwise, in every
    # precision.
    rows += _rows([d for d in differences if d.kind == "initial weight" or d in trace.spread], 0.0)
    rows += _wrong_skips(single, trace)
    title = f"{plan.computes_in}, error against float64 at most {FACTOR} x that of one process"
    return Section("configured", title, tuple(sorted(rows, key=_order)), _skips(trace))


def _wrong_skips(one: Trace, trace: Trace) -> list[ComparedRow]:
    """Return a row per needlessly skipped step, and one more row if all steps were skipped."""
    rows = []
    for step in trace.skipped:
        if math.isfinite(one.grad_norms[step]):
            needless = "the step was skipped, but one process does not overflow"
            rows.append(ComparedRow("gradient norm", step, "", math.inf, 0.0, what=needless))
    if len(trace.skipped) == len(trace.losses):
        nothing = "every step was skipped, so no gradient was compared; raise --steps"
        rows.append(ComparedRow("other", None, "", math.inf, 0.0, what=nothing))
    return rows


def _order(row: ComparedRow) -> tuple[int, int]:
    """Return a key that sorts quantities in the order of the computation."""
    if row.kind == "initial weight":
        return (0, 0)
    if row.kind in ("parameter", "other"):
        return (2, 0)
    return (1, row.step or 0)


def _skips(trace: Trace) -> tuple[str, ...]:
    if not trace.skipped:
        return ()
    return (f"skipped, so only the loss is compared: step {', '.join(map(str, trace.skipped))}",)


Key = tuple[Kind, int | None, str]


def _allowances(
    errors_of_one: Mapping[Key, float], unit: float, single_number: float
) -> dict[Key, float]:
    """Return the allowed error of every quantity, from the errors of one process.

    The additional error `unit` raises the factor by which gradients may exceed the errors of one
    process. Parameters get the same factor, because optimizers such as Adam magnify errors of small
    gradients.

    Args:
        errors_of_one: Errors of one process.
        unit: Additional error that is allowed for a tensor.
        single_number: Additional error that is allowed for a loss or norm.
    """
    allowed: dict[Key, float] = {}
    slack = FACTOR
    tensors: dict[tuple[Kind, int | None], list[float]] = {}
    for (kind, step, name), error in errors_of_one.items():
        if name:
            tensors.setdefault((kind, step), []).append(error)
        elif kind in ("loss", "gradient norm"):
            all_tensors = errors_of_one.get(("gradient", step, ""), 0.0)
            rounding = max(single_number, SCALAR_SHARE * all_tensors)
            allowed[kind, step, name] = FACTOR * error + rounding
        elif kind == "gradient":
            allowed[kind, step, name] = FACTOR * error + unit
            # The factor is at most doubled.
            slack = max(slack, FACTOR + min(unit / error if error else FACTOR, FACTOR))
    for (kind, step, name), error in errors_of_one.items():
        factor = slack if kind == "parameter" else FACTOR
        if name:
            # A single tensor is a small sample.
            allowed[kind, step, name] = factor * (error + max(tensors[kind, step])) + unit
        elif kind == "parameter":
            allowed[kind, step, name] = factor * error + unit
    return allowed


def _units(plan: VerificationPlan) -> tuple[float, float]:
    """Return (additional allowed error of a tensor, additional allowed error of a loss or norm).

    The engine sums and divides gradients in another order than one process, and in the dtype of the
    reduction. A loss or norm is a single number, whose error in one process may be 0 by chance.
    """
    precision = plan.resolved.precision
    reduced = torch.finfo(dtype_of(precision.reduction or plan.dtype)).eps
    computed = torch.finfo(dtype_of(precision.compute or plan.dtype)).eps
    # A reduction in bfloat16 or float16 rounds more than the additional float32 operations.
    unit = max(ROUNDINGS * torch.finfo(torch.float32).eps, reduced)
    return unit, max(unit, computed / 4)


def _errors(exact: Trace, trace: Trace) -> dict[Key, float]:
    """Return the relative errors of a trace, in the order of the computation.

    The name "" stands for all tensors of a step. Errors of parameters are relative to the change of
    the parameters in training.
    """
    errors: dict[Key, float] = {}
    for step in range(len(exact.losses)):
        errors["loss", step, ""] = relative_error(exact.losses[step], trace.losses[step])
        if step in trace.skipped:
            continue
        norm_error = relative_error(exact.grad_norms[step], trace.grad_norms[step])
        errors["gradient norm", step, ""] = norm_error
        errors |= _tensor_errors("gradient", step, exact.gradients[step], trace.gradients[step], {})
    return errors | _tensor_errors(
        "parameter", None, exact.parameters, trace.parameters, exact.initial
    )


def _tensor_errors(
    kind: Kind,
    step: int | None,
    exact: Mapping[str, torch.Tensor | None],
    trace: Mapping[str, torch.Tensor | None],
    initial: Mapping[str, torch.Tensor],
) -> dict[Key, float]:
    sizes: dict[str, float] = {}
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    mismatches: dict[Key, float] = {}
    for name in dict.fromkeys([*exact, *trace]):
        truth = exact.get(name)
        value = trace.get(name)
        if truth is None and value is None:
            continue
        if truth is None or value is None or truth.shape != value.shape:
            mismatches[kind, step, name] = math.inf
            continue
        # Training changes a parameter little, and an error of the change would vanish beside the
        # value.
        change = truth.double()
        if name in initial:
            change = change - initial[name].double()
        sizes[name] = float(change.square().sum())
        squares[name] = float((truth.double() - value.double()).square().sum())
        counts[name] = truth.numel()

    usual_square = sum(sizes.values()) / max(sum(counts.values()), 1)
    errors: dict[Key, float] = {}
    errors[kind, step, ""] = math.sqrt(sum(squares.values()) / max(sum(sizes.values()), 1e-300))
    for name, size in sizes.items():
        # Squared sizes are added, so the fraction is squared as well.
        floor = FLOOR**2 * usual_square * counts[name]
        errors[kind, step, name] = math.sqrt(squares[name] / max(size + floor, 1e-300))
    return errors | mismatches


def raise_unless_equal(report: Report) -> None:
    """Raise ParityError with the message of `failure` if compared values differ."""
    if not report.equal:
        raise ParityError(failure(report))


def failure(report: Report) -> str:
    """Return a text with the first and the largest difference of each section of a report."""
    lines = []
    for section in report.sections:
        rows = section.different
        if not rows:
            continue
        first = next((row for row in rows if row.name), rows[0])
        largest = max(rows, key=_badness)
        lines.append(
            f"{section.name}: {len(rows):,} of {len(section.rows):,} compared values differ from"
            " one process"
        )
        lines.append(f"  first: {first}")
        if largest != first:
            lines.append(f"  worst: {largest}")
    return "\n".join(lines)


def _badness(row: ComparedRow) -> float:
    if row.error == 0:
        return 0.0
    if math.isnan(row.error) or row.allowed == 0:
        return math.inf
    return row.error / row.allowed


def lines(report: Report, *, everything: bool = False) -> list[str]:
    """Return the lines of the report's tables, with the largest errors first.

    The tensors of a block are merged into one line unless `everything` is set.
    """
    table_lines = []
    for section in report.sections:
        table_lines += ["", section.title]
        table_lines += [f"  {note}" for note in section.notes]
        if not section.rows:
            continue
        groups = _groups(section.rows, report.blocks, everything)
        groups.sort(key=lambda group: -_badness(group[1]))
        table: list[tuple[str, ...]] = [("", "worst", "error", "one process", "allowed", "")]
        table += [_cells(title, row) for title, row in groups]
        if section.name != "configured":
            # Only the configured pass has the error of one process.
            table = [(*cells[:3], *cells[4:]) for cells in table]
        table_lines += _aligned(table)
    return table_lines


_TITLES = {
    "loss": "losses",
    "gradient norm": "gradient norms",
    "gradient": "all gradients together",
    "parameter": "all parameters together",
}
"""Titles of rows without the name of a tensor."""


def _groups(
    rows: Iterable[ComparedRow], blocks: Sequence[str], everything: bool
) -> list[tuple[str, ComparedRow]]:
    """Return (title, row with the largest error) for every printed line."""
    groups: dict[str, list[ComparedRow]] = {}
    for row in rows:
        title = f"{row.kind} {row.name}"
        if not row.name:
            title = _TITLES.get(row.kind, row.kind)
        elif not everything:
            block = next((block for block in blocks if row.name.startswith(f"{block}.")), None)
            # Equal initial weights need one line. A difference is shown by its name.
            if row.kind == "initial weight" and row.error == 0:
                title = "initial weights"
            elif block is not None:
                title = f"{row.kind} {block}.*"
        groups.setdefault(title, []).append(row)
    return [(title, max(members, key=_badness)) for title, members in groups.items()]


def _cells(title: str, row: ComparedRow) -> tuple[str, ...]:
    """Return the cells of a printed line."""
    tensor = ""
    if not title.endswith(row.name):
        # The name inside its block, because the title has the block.
        tensor = row.name.rpartition(title.split(" ")[-1].removesuffix("*"))[2]
    step = "" if row.step is None else f"step {row.step}"
    return (
        title,
        ", ".join(filter(None, (tensor, step))),
        row.what or f"{row.error:.1e}",
        "" if row.one_process is None else f"{row.one_process:.1e}",
        f"{row.allowed:.1e}",
        "equal" if row.equal else "DIFFERENT",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append(f"  {'  '.join(cells).rstrip()}")
    return lines
