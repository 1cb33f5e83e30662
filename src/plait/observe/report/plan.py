"""Page of a plan.

It shows the query, the chosen layout with the reasons, its memory and time by part, its ranks on
the machines, and the layouts that were left out. All figures come from the planner. A section is a
function from the report to markup. Empty sections are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase, ascii_uppercase

from markupsafe import Markup

from plait.cluster import accelerator
from plait.cluster.layout import AXES, Layout
from plait.cluster.machines import Node, Topology
from plait.errors import InputError
from plait.observe.report import charts, page
from plait.observe.report.ranks import rank_grid
from plait.observe.schedule import timeline_svg
from plait.parallel.schedules.timeline import Timeline
from plait.planner import detail
from plait.planner.calibrate import Calibration
from plait.planner.choice import LayoutChoice
from plait.planner.constants import coverage_of_intervals
from plait.planner.estimate import lower_end
from plait.planner.explain import Comparison, LayoutChange, describe
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.search import Plan
from plait.planner.step import TERMS
from plait.units import GIB, format_count

_MEMORY_NAMES = MEMORY_TERMS | {
    "slack": "reserved by the allocator beyond that",
    "context": "outside the allocator: context and communicators",
}
_MAX_ACTIONS = 2400
_MAX_ACTIONS_OF_RANK = 180
"""Number of timeline actions that are drawn. Of a longer timeline, the start and end are drawn."""
_MAX_STEP_BARS = 5
_MIN_SHARE = 0.0005
"""Share of a step below which terms are summed up in one row, because they would read 0.0 %."""


@dataclass(frozen=True)
class PlanReport:
    """Plan with everything that the user asked about it."""

    plan: Plan
    notes: Sequence[str] = ()
    reasons: Sequence[Comparison] = ()
    """Comparisons that the user requested with --why."""
    changes: Sequence[LayoutChange] = ()
    """Plans for other hardware, if the user passed --sensitivity."""
    fixed: Mapping[str, int] | None = None
    """Degrees that the user fixed."""
    calibration: Calibration | None = None

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        return float(self.plan.request.cluster.device.memory_bytes)

    @cached_property
    def marks(self) -> dict[str, LayoutChoice]:
        """Choices by their mark: 1, 2, .. for the best, and a, b, .. for those of --why."""
        marks = {str(index + 1): choice for index, choice in enumerate(self.plan.best)}
        letters = iter(ascii_lowercase + ascii_uppercase)
        for reason in self.reasons:
            other = reason.other
            if other is not None and all(other.layout != known.layout for known in marks.values()):
                marks[next(letters, "*")] = other
        return marks

    def mark_of(self, choice: LayoutChoice) -> str:
        """Return the mark of a choice, or "" if the letters do not suffice for all choices."""
        for mark, marked in self.marks.items():
            if marked.layout == choice.layout:
                return mark
        return ""

    @cached_property
    def timeline(self) -> Timeline | str:
        """Timeline of the best choice, or the reason why it cannot be computed."""
        try:
            return detail.timeline(
                self.plan.request, self.plan.best[0], calibration=self.calibration
            )
        except InputError as error:
            return str(error)


def plan_page(report: PlanReport) -> str:
    """Return the page of a plan as HTML."""
    plan = report.plan
    request = plan.request
    model = request.model.architecture
    title = f"Plan: {model.name} on {request.cluster}"
    compiled = ", compiled" if request.compile else ""
    subtitle = (
        f"{format_count(float(model.parameters))} parameters; a step is {request.global_batch:,}"
        f" samples of {request.sequence:,} tokens, {request.precision}{compiled}."
        f" {plan.candidates:,} layouts evaluated, {plan.fitting:,} fit."
    )
    sections = [("chosen", "Nothing fits", nothing_section(report))]
    if plan.best:
        sections = [
            ("chosen", "The plan", chosen_section(report)),
            ("memory", "Memory of a rank", memory_section(report)),
            ("step", "Time of a step", step_section(report)),
            ("timeline", "Pipeline timeline", timeline_section(report)),
            ("ranks", "Ranks on machines", ranks_section(report)),
        ]
    sections += [
        ("candidates", "All candidates", candidates_section(report)),
        ("why", "Why not another", why_section(report)),
        ("sensitivity", "With other hardware", sensitivity_section(report)),
        ("left-out", "Left out", left_out_section(report)),
    ]
    return page.page(title, subtitle, sections)


def chosen_section(report: PlanReport) -> Markup:
    """Return the figures of the best choice, and a table of all good choices."""
    best = report.plan.best[0]
    request = report.plan.request
    tokens = request.global_batch * request.sequence
    low = best.seconds_low
    high = best.seconds_high
    # MFU and throughput are inversely proportional to the seconds.
    mfu_seconds = best.mfu * best.seconds
    figures = [
        ("step", f"{best.seconds:.4g} s", _format_seconds_interval(best)),
        (
            "tokens/s",
            format_count(best.tokens_per_second),
            f"{format_count(tokens / high)} to {format_count(tokens / low)}",
        ),
        ("MFU", f"{best.mfu:.1%}", f"{mfu_seconds / high:.1%} to {mfu_seconds / low:.1%}"),
        (
            "memory of a rank",
            _format_gib(best.needed),
            f"{_format_memory_interval(best)}, of {_format_gib(report.memory_bytes)}",
        ),
        ("fits with probability", f"{best.fit_probability:.1%}", "of that memory"),
    ]
    rows = []
    for index, choice in enumerate(report.plan.best):
        rows.append(
            [
                str(index + 1),
                _format_layout(choice),
                f"{choice.seconds:.4g} s",
                _format_seconds_interval(choice),
                format_count(choice.tokens_per_second),
                f"{choice.mfu:.1%}",
                _format_gib(choice.needed),
                _format_memory_interval(choice),
            ]
        )
    columns = ("", "layout", "step", "90 % interval", "tokens/s", "MFU", "memory", "90 % interval")
    coverage = coverage_of_intervals(experts=bool(request.model.architecture.experts))
    return page.join(
        Markup('<p class="lead">{}</p>\n').format(describe(best.layout)),
        page.tiles(figures),
        page.note(f"Predicted, not measured. {coverage}."),
        *map(page.note, report.notes),
        page.table(columns, rows, numbers=(2, 3, 4, 5, 6, 7), marked=0),
    )


def nothing_section(report: PlanReport) -> Markup:
    """Return a warning that no layout fits."""
    plan = report.plan
    margin = ""
    if plan.fitting:
        margin = (
            f"{plan.fitting:,} would fit by a margin smaller than the uncertainty of their memory. "
        )
    return page.warning(
        f"None of {plan.candidates:,} layouts fits into {_format_gib(report.memory_bytes)} with"
        f" enough certainty. {margin}Use more GPUs, GPUs with more memory, shorter samples, or a"
        " smaller model."
    )


def memory_section(report: PlanReport) -> Markup:
    """Return the memory of every pipeline rank by kind, next to the memory of the device."""
    best = report.plan.best[0]
    ranks = detail.rank_memory(report.plan.request, best, calibration=report.calibration)
    bars = []
    for memory in ranks:
        segments = tuple(
            charts.BarSegment(f"m-{name}", f"{_MEMORY_NAMES[name]}: {_format_gib(size)}", size)
            for name, size in memory.terms.items()
        )
        interval = f"{memory.needed_low / GIB:.1f} to {_format_gib(memory.needed_high)}"
        bars.append(
            charts.Bar(
                memory.rank,
                segments,
                f"{_format_gib(memory.needed)} ({interval})",
                low=memory.needed_low,
                high=memory.needed_high,
            )
        )

    fullest = max(ranks, key=lambda memory: memory.needed)
    explanation = f"Bytes on a device, the same on every rank, at the peak: {fullest.moment}."
    if len(ranks) > 1:
        explanation = (
            f"Bytes on one device of each pipeline rank at its peak; the fullest is {fullest.rank},"
            f" at its peak in: {fullest.moment}."
        )

    # Ranks between the second and the last are like the second.
    columns = ranks if len(ranks) <= 3 else (ranks[0], ranks[1], ranks[-1])
    kinds = [name for name in _MEMORY_NAMES if any(memory.terms[name] > 0 for memory in ranks)]
    table = []
    for name in kinds:
        sizes = [f"{memory.terms[name] / GIB:.2f}" for memory in columns]
        table.append([_MEMORY_NAMES[name], *sizes])
    intervals = [
        f"{memory.needed_low / GIB:.2f} to {memory.needed_high / GIB:.2f}" for memory in columns
    ]
    table.append(["needed", *(f"{memory.needed / GIB:.2f}" for memory in columns)])
    table.append(["90 % interval", *intervals])
    table.append(["peak at the", *(memory.moment for memory in columns)])

    capacity = _format_gib(report.memory_bytes)
    return page.join(
        page.note(
            f"{explanation} The line is the device's {capacity}; the whisker is the 90 % interval."
        ),
        charts.bars(bars, limit=(report.memory_bytes, f"the device has {capacity}")),
        page.legend({f"m-{name}": _MEMORY_NAMES[name] for name in kinds}),
        page.table(
            ("GiB", *(memory.rank for memory in columns)),
            table,
            numbers=range(1, len(columns) + 1),
        ),
    )


def step_section(report: PlanReport) -> Markup:
    """Return the terms of the step time for the best choices."""
    best = report.plan.best[0]
    shown = report.plan.best[:_MAX_STEP_BARS]
    bars = []
    for index, choice in enumerate(shown):
        segments = []
        for name, seconds in choice.terms.items():
            title = f"{TERMS[name]}: {seconds:.4g} s, {seconds / choice.seconds:.1%}"
            segments.append(charts.BarSegment(f"t-{name}", title, seconds))
        bars.append(
            charts.Bar(
                f"{index + 1}: {describe(choice.layout)}",
                tuple(segments),
                f"{choice.seconds:.4g} s",
                low=choice.seconds_low,
                high=choice.seconds_high,
            )
        )

    used = [name for name in TERMS if any(choice.terms[name] > 0 for choice in shown)]
    table = []
    for name in used:
        seconds = best.terms[name]
        if seconds >= _MIN_SHARE * best.seconds:
            table.append([TERMS[name], f"{seconds:.4g} s", f"{seconds / best.seconds:.1%}"])
    remainder = sum(size for size in best.terms.values() if size < _MIN_SHARE * best.seconds)
    if remainder > 0:
        table.append(["all else", f"{remainder:.4g} s", f"{remainder / best.seconds:.1%}"])
    table.append(["step", f"{best.seconds:.4g} s", "100.0%"])
    return page.join(
        page.note(
            "Seconds of an optimizer step by purpose, for the best layouts; the whisker is the"
            " 90 % interval of their sum."
        ),
        charts.bars(bars),
        page.legend({f"t-{name}": TERMS[name] for name in used}),
        page.table(("1: the step", "seconds", "share"), table, numbers=(1, 2)),
    )


def timeline_section(report: PlanReport) -> Markup:
    """Return the timeline of a step, or nothing without a pipeline."""
    best = report.plan.best[0]
    if int(best.layout["pp"]) == 1:
        return Markup("")
    timeline = report.timeline
    if isinstance(timeline, str):
        return page.note(f"Not drawn: {timeline}.")

    other_terms = ", ".join(
        f"{meaning} {seconds:.3g} s"
        for meaning, seconds in detail.terms_outside_pipeline(best, timeline).items()
    )
    lines = [
        f"The {timeline.total:.4g} s of a step in which micro-batches pass through the pipeline;"
        " hover over a computation for its stage, micro-batch and seconds. The other terms of the"
        f" {best.seconds:.4g} s are: {other_terms}."
    ]
    counts = [len(spans) for spans in timeline.ranks]
    windows: list[tuple[float, float]] = [(0.0, timeline.total)]
    share = min(_MAX_ACTIONS / sum(counts), _MAX_ACTIONS_OF_RANK / max(counts))
    if share < 1:
        length = timeline.total * share / 2
        windows = [(0.0, length), (timeline.total - length, timeline.total)]
        lines.append(
            f"{sum(counts):,} computations are too many to draw: the first and the last"
            f" {length:.4g} s are drawn. --trace writes all of them."
        )

    elements = [page.note(line) for line in lines]
    for window in windows:
        drawing = Markup(timeline_svg(timeline, window=window, unit=" s"))
        elements.append(Markup('<div class="wide schedule">{}</div>\n').format(drawing))
    return page.join(*elements)


def ranks_section(report: PlanReport) -> Markup:
    """Return the drawing of the ranks on the machines."""
    degrees = report.plan.best[0].layout
    cluster = report.plan.request.cluster
    layout = Layout(**{axis: int(degrees[axis]) for axis in AXES})
    per_node = min(cluster.devices, int(cluster.device.devices_per_node))
    nodes = tuple(Node(f"machine {index}", per_node) for index in range(cluster.nodes))
    return rank_grid(layout, Topology(nodes, accelerator.NAME))


def candidates_section(report: PlanReport) -> Markup:
    """Return the plot of step time against memory, coloured by the largest cost of a candidate."""
    plan = report.plan
    sample = detail.sample(plan.request, fixed=report.fixed, calibration=report.calibration)
    if not sample.points:
        return Markup("")

    colours = {name: f"c-{name.split()[0]}" for name in detail.COSTS}
    dots = []
    for point in sample.points:
        colour = "c-memory"
        cost = "does not fit"
        if point.fits:
            colour = colours[point.cost]
            cost = f"{point.cost} {point.cost_share:.1%} of the step"
        title = f"{describe(point.layout)}: {point.seconds:.4g} s, {_format_gib(point.needed)}"
        dots.append(charts.Dot(point.needed / GIB, point.seconds, colour, f"{title}; {cost}"))
    # Marked choices come last, so that their discs are drawn over all other points.
    for mark, choice in report.marks.items():
        colour = "c-best" if mark == "1" else "c-chosen"
        size = _format_gib(choice.needed)
        title = f"{mark}: {describe(choice.layout)}: {choice.seconds:.4g} s, {size}"
        dots.append(charts.Dot(choice.needed / GIB, choice.seconds, colour, title, mark))

    costs = {point.cost for point in sample.points if point.fits}
    legend = {colours[name]: name for name in detail.COSTS if name in costs}
    legend["c-memory"] = "does not fit in memory"
    if plan.best:
        legend["c-best"] = "1: the plan"
    marks = []
    if "2" in report.marks:
        marks.append("2, 3, ..: the next best")
    if "a" in report.marks:
        marks.append("a, b, ..: requested with --why")
    if marks:
        legend["c-chosen"] = "; ".join(marks)

    capacity = report.memory_bytes
    return page.join(
        page.note(
            f"The fastest of {sample.candidates:,} candidates in each of {len(sample.points):,}"
            f" cells of memory and time; {sample.outside:,} need more memory or time than is drawn."
            " The colour is what a step spends most on besides the computation of the model itself."
            " The idle time of discs comes from the table of the schedule, and that of other points"
            " from closed forms."
        ),
        charts.plane(
            dots,
            x_name="memory needed on the fullest rank, GiB",
            y_name="seconds of a step (logarithmic)",
            x_limit=(capacity / GIB, f"{_format_gib(capacity)} of the device"),
            title="Step time against memory of all candidates",
        ),
        page.legend(legend),
    )


def why_section(report: PlanReport) -> Markup:
    """Return a row for every comparison of --why, and the terms that differ."""
    rows: list[list[str | Markup]] = []
    term_tables: list[Markup] = []
    for reason in report.reasons:
        other = reason.other
        # The query of a comparison can describe the plan itself.
        if other is None or other is reason.winner:
            rows.append(["", reason.query, "", "", "", "", reason.reason])
            continue
        rows.append(
            [
                report.mark_of(other),
                reason.query,
                _format_layout(other),
                f"{other.seconds:.4g} s",
                f"{other.seconds / reason.winner.seconds - 1:+.1%}",
                _format_gib(other.needed),
                reason.reason,
            ]
        )
        terms = [
            [TERMS[name], f"{ours:.3g} s", f"{theirs:.3g} s", f"{theirs - ours:+.3g} s"]
            for name, ours, theirs in reason.differences
            if abs(ours - theirs) > 1e-4
        ]
        heads = ("term", "the plan", reason.query, "difference")
        table = page.table(heads, terms, numbers=(1, 2, 3))
        term_tables.append(page.folded(f"{reason.query}, term by term", table))
    columns = ("", "query", "best layout with it", "step", "against the plan", "memory", "because")
    return page.join(page.table(columns, rows, numbers=(3, 4, 5)), *term_tables)


def sensitivity_section(report: PlanReport) -> Markup:
    """Return the best plans for other hardware, or nothing without --sensitivity."""
    rows = []
    for change in report.changes:
        seconds = f"{change.seconds:.4g} s" if change.seconds else ""
        throughput = ""
        if change.tokens_per_second:
            throughput = format_count(change.tokens_per_second)
        rows.append([change.what, seconds, throughput, change.layout or change.note])
    return page.table(("change", "step", "tokens/s", "best layout"), rows, numbers=(1, 2))


def left_out_section(report: PlanReport) -> Markup:
    """Return the regions that a rule excludes, and those in which no layout fits."""
    rules = page.table(("region", "rule"), [[e.region, e.rule] for e in report.plan.excluded])
    rows = []
    for shortage in sorted(report.plan.shortages, key=lambda shortage: shortage.needed):
        largest = [f"{MEMORY_TERMS[name]} {size / GIB:.1f}" for name, size in shortage.parts]
        rows.append(
            [
                shortage.region,
                f"{shortage.candidates:,}",
                f"{shortage.needed / GIB:.1f}",
                f"{(shortage.needed - shortage.room) / GIB:.1f}",
                ", ".join(largest),
            ]
        )
    columns = ("region", "candidates", "smallest needs, GiB", "too much, GiB", "mostly, GiB")
    elements = []
    if rules:
        elements += [Markup("<h3>By a rule</h3>\n"), rules]
    if rows:
        elements += [
            Markup("<h3>Does not fit into {}</h3>\n").format(_format_gib(report.memory_bytes)),
            page.table(columns, rows, numbers=(1, 2, 3)),
        ]
    return page.join(*elements)


def _format_layout(choice: LayoutChoice) -> Markup:
    return Markup('<span class="layout">{}</span>').format(describe(choice.layout))


def _format_gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _format_seconds_interval(choice: LayoutChoice) -> str:
    return f"{choice.seconds_low:.3g} to {choice.seconds_high:.3g} s"


def _format_memory_interval(choice: LayoutChoice) -> str:
    low = lower_end(choice.needed, choice.needed_high)
    return f"{low / GIB:.1f} to {_format_gib(choice.needed_high)}"
