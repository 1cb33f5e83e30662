"""The page of a plan: the query, the chosen layout and the reasons, its memory and time by part,
its ranks on the machines, the layouts that were left out.

Every figure is the planner's. A section is one function from the story to markup, and is left out
where it is empty.
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
from plait.observe.schedule import svg
from plait.parallel.schedules.timeline import Timeline
from plait.planner import detail
from plait.planner.calibrate import Calibration
from plait.planner.choice import Choice
from plait.planner.constants import coverage_of_intervals
from plait.planner.estimate import lower_end
from plait.planner.explain import Change, Comparison, describe
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.search import Plan
from plait.planner.step import TERMS
from plait.units import GIB, format_count

_MEMORY_NAMES = MEMORY_TERMS | {
    "slack": "reserved by the allocator beyond that",
    "context": "outside the allocator: context and communicators",
}
_MOST_DRAWN = 2400
_MOST_IN_A_ROW = 180
"""Actions of a timeline on the page, of all ranks and of one; of longer ones the start and the end
are drawn.
"""
_MOST_POINTS_OF_BEST = 5
_LEAST_SHARE = 0.0005
"""Of a step: smaller terms would read 0.0 %, and are one row together."""


@dataclass(frozen=True)
class Story:
    """A plan with all that a user asked about it."""

    plan: Plan
    notes: Sequence[str] = ()
    reasons: Sequence[Comparison] = ()
    changes: Sequence[Change] = ()
    fixed: Mapping[str, int] | None = None
    calibration: Calibration | None = None

    @property
    def room(self) -> float:
        """Bytes of a device."""
        return float(self.plan.request.cluster.device.memory_bytes)

    @cached_property
    def marks(self) -> dict[str, Choice]:
        """The choices that are talked about: 1, 2, .. the best ones, a, b, .. others that were
        asked for.
        """
        marks = {str(index + 1): choice for index, choice in enumerate(self.plan.best)}
        letters = iter(ascii_lowercase + ascii_uppercase)
        for reason in self.reasons:
            other = reason.other
            if other is not None and all(other.layout != known.layout for known in marks.values()):
                marks[next(letters, "*")] = other
        return marks

    def mark_of(self, choice: Choice) -> str:
        """Its mark; none for more choices than there are letters."""
        return next(
            (mark for mark, known in self.marks.items() if known.layout == choice.layout), ""
        )

    @cached_property
    def timeline(self) -> Timeline | str:
        """Of the best choice; or why there is none."""
        try:
            return detail.timeline(
                self.plan.request, self.plan.best[0], calibration=self.calibration
            )
        except InputError as error:
            return str(error)


def plan_page(story: Story) -> str:
    """The whole page."""
    request = story.plan.request
    model = request.model.architecture
    title = f"Plan: {model.name} on {request.cluster}"
    subtitle = (
        f"{format_count(float(model.parameters))} parameters; a step is {request.global_batch:,}"
        f" samples of {request.sequence:,} tokens,"
        f" {request.precision}{', compiled' if request.compile else ''}. {story.plan.candidates:,}"
        f" layouts priced, {story.plan.fitting:,} fit."
    )
    sections = [("chosen", "Nothing fits", nothing_section(story))]
    if story.plan.best:
        sections = [
            ("chosen", "The plan", chosen_section(story)),
            ("memory", "Memory of a rank", memory_section(story)),
            ("step", "Time of a step", step_section(story)),
            ("timeline", "Pipeline timeline", timeline_section(story)),
            ("ranks", "Ranks on machines", ranks_section(story)),
        ]
    sections += [
        ("candidates", "All candidates", candidates_section(story)),
        ("why", "Why not another", why_section(story)),
        ("sensitivity", "If the machines were others", sensitivity_section(story)),
        ("left-out", "Left out", left_out_section(story)),
    ]
    return page.page(title, subtitle, sections)


def chosen_section(story: Story) -> Markup:
    """The best choice in figures, next to the others."""
    best = story.plan.best[0]
    request = story.plan.request
    tokens = request.global_batch * request.sequence
    per_mfu = best.mfu * best.seconds
    figures = [
        ("step", f"{best.seconds:.4g} s", _from_to(best.seconds_low, best.seconds_high, "s")),
        (
            "tokens/s",
            format_count(best.tokens_per_second),
            (
                f"{format_count(tokens / best.seconds_high)} to"
                f" {format_count(tokens / best.seconds_low)}"
            ),
        ),
        (
            "MFU",
            f"{best.mfu:.1%}",
            f"{per_mfu / best.seconds_high:.1%} to {per_mfu / best.seconds_low:.1%}",
        ),
        (
            "memory of a rank",
            _gib(best.needed),
            (
                f"{lower_end(best.needed, best.needed_high) / GIB:.1f} to {_gib(best.needed_high)},"
                f" of {_gib(story.room)}"
            ),
        ),
        ("fits with probability", f"{best.fit_probability:.1%}", "of that memory"),
    ]
    rows = [
        [
            str(index + 1),
            _layout(choice),
            f"{choice.seconds:.4g} s",
            _from_to(choice.seconds_low, choice.seconds_high, "s"),
            format_count(choice.tokens_per_second),
            f"{choice.mfu:.1%}",
            _gib(choice.needed),
            (
                f"{lower_end(choice.needed, choice.needed_high) / GIB:.1f} to"
                f" {_gib(choice.needed_high)}"
            ),
        ]
        for index, choice in enumerate(story.plan.best)
    ]
    columns = ("", "layout", "step", "90 % interval", "tokens/s", "MFU", "memory", "90 % interval")
    return page.join(
        Markup('<p class="lead">{}</p>\n').format(describe(best.layout)),
        page.tiles(figures),
        page.note(
            "Predicted, not measured."
            f" {coverage_of_intervals(experts=bool(request.model.architecture.experts))}."
        ),
        *(page.note(text) for text in story.notes),
        page.table(columns, rows, numbers=(2, 3, 4, 5, 6, 7), marked=0),
    )


def nothing_section(story: Story) -> Markup:
    """What was priced, where no layout fits."""
    margin = (
        f"{story.plan.fitting:,} would fit by a margin smaller than the uncertainty of their"
        " memory. "
        if story.plan.fitting
        else ""
    )
    return page.warning(
        f"None of {story.plan.candidates:,} layouts fits into {_gib(story.room)} with enough"
        f" certainty. {margin}Use more GPUs, GPUs with more memory, shorter samples, or a smaller"
        " model."
    )


def memory_section(story: Story) -> Markup:
    """A bar for every pipeline rank, by kind, against the device's memory."""
    best = story.plan.best[0]
    ranks = detail.rank_memory(story.plan.request, best, calibration=story.calibration)
    rows = [
        charts.Bar(
            one.rank,
            tuple(
                charts.Part(f"m-{name}", f"{_MEMORY_NAMES[name]}: {_gib(size)}", size)
                for name, size in one.terms.items()
            ),
            f"{_gib(one.needed)} ({one.needed_low / GIB:.1f} to {_gib(one.needed_high)})",
            low=one.needed_low,
            high=one.needed_high,
        )
        for one in ranks
    ]
    fullest = max(ranks, key=lambda one: one.needed)
    most = f"Bytes on a device, the same on every rank, at the peak: {fullest.moment}."
    if len(ranks) > 1:
        most = (
            f"Bytes on one device of each pipeline rank at its peak; the fullest is {fullest.rank},"
            f" at its peak in: {fullest.moment}."
        )
    used = [name for name in _MEMORY_NAMES if any(one.terms[name] > 0 for one in ranks)]
    numbers = [
        [_MEMORY_NAMES[name], *(f"{one.terms[name] / GIB:.2f}" for one in _ends(ranks))]
        for name in used
    ]
    numbers += [["needed", *(f"{one.needed / GIB:.2f}" for one in _ends(ranks))]]
    numbers += [
        [
            "90 % interval",
            *(f"{one.needed_low / GIB:.2f} to {one.needed_high / GIB:.2f}" for one in _ends(ranks)),
        ]
    ]
    numbers += [["peak at the", *(one.moment for one in _ends(ranks))]]
    return page.join(
        page.note(
            f"{most} The line is the device's {_gib(story.room)}; the whisker is the 90 % interval."
        ),
        charts.bars(rows, limit=(story.room, f"the device has {_gib(story.room)}")),
        page.legend({f"m-{name}": _MEMORY_NAMES[name] for name in used}),
        page.table(
            ("GiB", *(one.rank for one in _ends(ranks))),
            numbers,
            numbers=range(1, len(_ends(ranks)) + 1),
        ),
    )


def _ends(ranks: Sequence[detail.RankMemory]) -> Sequence[detail.RankMemory]:
    """The first, the second and the last: those between are like the second."""
    return ranks if len(ranks) <= 3 else (ranks[0], ranks[1], ranks[-1])


def step_section(story: Story) -> Markup:
    """What the step of the best few choices consists of."""
    best = story.plan.best[0]
    shown = story.plan.best[:_MOST_POINTS_OF_BEST]
    rows = [
        charts.Bar(
            f"{index + 1}: {describe(choice.layout)}",
            tuple(
                charts.Part(
                    f"t-{name}", f"{TERMS[name]}: {size:.4g} s, {size / choice.seconds:.1%}", size
                )
                for name, size in choice.terms.items()
            ),
            f"{choice.seconds:.4g} s",
            low=choice.seconds_low,
            high=choice.seconds_high,
        )
        for index, choice in enumerate(shown)
    ]
    used = [name for name in TERMS if any(choice.terms[name] > 0 for choice in shown)]
    numbers = [
        [TERMS[name], f"{best.terms[name]:.4g} s", f"{best.terms[name] / best.seconds:.1%}"]
        for name in used
        if best.terms[name] >= _LEAST_SHARE * best.seconds
    ]
    rest = sum(size for size in best.terms.values() if size < _LEAST_SHARE * best.seconds)
    if rest > 0:
        numbers += [["all else", f"{rest:.4g} s", f"{rest / best.seconds:.1%}"]]
    numbers += [["step", f"{best.seconds:.4g} s", "100.0%"]]
    return page.join(
        page.note(
            "Seconds of an optimizer step by what they go to, for the best layouts; the whisker is"
            " the 90 % interval of the whole."
        ),
        charts.bars(rows),
        page.legend({f"t-{name}": TERMS[name] for name in used}),
        page.table(("1: the step", "seconds", "share"), numbers, numbers=(1, 2)),
    )


def timeline_section(story: Story) -> Markup:
    """The timeline of a step. Empty without a pipeline."""
    best = story.plan.best[0]
    if int(best.layout["pp"]) == 1:
        return Markup("")
    timeline = story.timeline
    if isinstance(timeline, str):
        return page.note(f"Not drawn: {timeline}.")
    rest = ", ".join(
        f"{meaning} {seconds:.3g} s" for meaning, seconds in detail.beyond(best, timeline).items()
    )
    lines = [
        f"The {timeline.total:.4g} s of a step in which micro-batches pass through the pipeline;"
        " hover over a computation for its stage, micro-batch and seconds. On top of it, to"
        f" {best.seconds:.4g} s, come: {rest}."
    ]
    actions = sum(len(row) for row in timeline.ranks)
    windows: list[tuple[float, float]] = [(0.0, timeline.total)]
    share = min(_MOST_DRAWN / actions, _MOST_IN_A_ROW / max(len(row) for row in timeline.ranks))
    if share < 1:
        part = timeline.total * share / 2
        windows = [(0.0, part), (timeline.total - part, timeline.total)]
        lines.append(
            f"{actions:,} computations are too many to draw: the first and the last {part:.4g} s"
            " are drawn. --trace writes all of them."
        )
    drawing = Markup('<div class="wide schedule">{}</div>\n')
    return page.join(
        *(page.note(line) for line in lines),
        *(drawing.format(Markup(svg(timeline, window=w, unit=" s"))) for w in windows),
    )


def ranks_section(story: Story) -> Markup:
    """Which rank sits where."""
    at = story.plan.best[0].layout
    cluster = story.plan.request.cluster
    layout = Layout(**{axis: int(at[axis]) for axis in AXES})
    per_node = min(cluster.devices, int(cluster.device.devices_per_node))
    nodes = tuple(Node(f"machine {index}", per_node) for index in range(cluster.nodes))
    return rank_grid(layout, Topology(nodes, accelerator.NAME))


def candidates_section(story: Story) -> Markup:
    """Step time against memory of all candidates, coloured by what each loses most by."""
    plan = story.plan
    found = detail.sample(plan.request, fixed=story.fixed, calibration=story.calibration)
    if not found.points:
        return Markup("")
    colours = {name: f"c-{name.split()[0]}" for name in detail.COSTS}
    dots = [
        charts.Dot(
            point.needed / GIB,
            point.seconds,
            colours[point.cost] if point.fits else "c-memory",
            f"{describe(point.layout)}: {point.seconds:.4g} s, {_gib(point.needed)}; "
            + (
                f"{point.cost} {point.cost_share:.1%} of the step" if point.fits else "does not fit"
            ),
        )
        for point in found.points
    ]
    dots += [
        charts.Dot(
            choice.needed / GIB,
            choice.seconds,
            "c-best" if mark == "1" else "c-chosen",
            f"{mark}: {describe(choice.layout)}: {choice.seconds:.4g} s, {_gib(choice.needed)}",
            mark,
        )
        for mark, choice in story.marks.items()
    ]
    used = {point.cost for point in found.points if point.fits}
    keys = {colours[name]: name for name in detail.COSTS if name in used} | {
        "c-memory": "does not fit in memory"
    }
    keys |= {"c-best": "1: the plan"} if plan.best else {}
    others = [
        words
        for mark, words in (("2", "2, 3, ..: the next best"), ("a", "a, b, ..: asked with --why"))
        if mark in story.marks
    ]
    keys |= {"c-chosen": "; ".join(others)} if others else {}
    return page.join(
        page.note(
            f"The fastest of {found.candidates:,} candidates in each of {len(found.points):,} cells"
            f" of memory and time; {found.outside:,} need more memory or time than is drawn. The"
            " colour is what a step spends most on besides the computation of the model itself."
            " Discs have their idle time from the schedule's table; the other points are closed"
            " forms."
        ),
        charts.plane(
            dots,
            x_name="memory needed on the fullest rank, GiB",
            y_name="seconds of a step (logarithmic)",
            x_limit=(story.room / GIB, f"{_gib(story.room)} of the device"),
            title="Step time against memory of all candidates",
        ),
        page.legend(keys),
    )


def why_section(story: Story) -> Markup:
    """What was asked with --why: a row each, and the terms that differ."""
    rows: list[list[str | Markup]] = []
    terms: list[Markup] = []
    for reason in story.reasons:
        other = reason.other if reason.other is not reason.winner else None
        seconds = (
            [
                f"{other.seconds:.4g} s",
                f"{other.seconds / reason.winner.seconds - 1:+.1%}",
                _gib(other.needed),
            ]
            if other
            else [""] * 3
        )
        rows.append(
            [
                story.mark_of(other) if other else "",
                reason.query,
                _layout(other) if other else "",
                *seconds,
                reason.reason,
            ]
        )
        if other is not None:
            entries = [
                [TERMS[name], f"{ours:.3g} s", f"{theirs:.3g} s", f"{theirs - ours:+.3g} s"]
                for name, ours, theirs in reason.differences
                if abs(ours - theirs) > 1e-4
            ]
            compared = page.table(
                ("term", "the plan", reason.query, "difference"), entries, numbers=(1, 2, 3)
            )
            terms.append(page.folded(f"{reason.query}, term by term", compared))
    columns = ("", "asked", "best layout with it", "step", "against the plan", "memory", "because")
    return page.join(page.table(columns, rows, numbers=(3, 4, 5)), *terms)


def sensitivity_section(story: Story) -> Markup:
    """The best plan under other circumstances, where --sensitivity asked."""
    rows = [
        [
            change.what,
            f"{change.seconds:.4g} s" if change.seconds else "",
            format_count(change.tokens_per_second) if change.tokens_per_second else "",
            change.layout or change.note,
        ]
        for change in story.changes
    ]
    return page.table(("if it had", "step", "tokens/s", "best layout"), rows, numbers=(1, 2))


def left_out_section(story: Story) -> Markup:
    """Regions that cannot be, and those of which nothing fits, with their numbers."""
    rules = page.table(("region", "rule"), [[e.region, e.rule] for e in story.plan.excluded])
    smallest = [
        [
            s.region,
            f"{s.candidates:,}",
            f"{s.needed / GIB:.1f}",
            f"{(s.needed - s.room) / GIB:.1f}",
            ", ".join(f"{MEMORY_TERMS[name]} {size / GIB:.1f}" for name, size in s.parts),
        ]
        for s in sorted(story.plan.shortages, key=lambda s: s.needed)
    ]
    columns = ("region", "candidates", "smallest needs, GiB", "too much, GiB", "mostly, GiB")
    parts = []
    if rules:
        parts += [Markup("<h3>By a rule</h3>\n"), rules]
    if smallest:
        parts += [
            Markup("<h3>Does not fit into {}</h3>\n").format(_gib(story.room)),
            page.table(columns, smallest, numbers=(1, 2, 3)),
        ]
    return page.join(*parts)


def _layout(choice: Choice) -> Markup:
    return Markup('<span class="layout">{}</span>').format(describe(choice.layout))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _from_to(low: float, high: float, unit: str) -> str:
    return f"{low:.3g} to {high:.3g} {unit}"
