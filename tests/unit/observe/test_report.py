"""The page of a plan: every section with the planner's figures, nothing from elsewhere, small for any number of GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from plait.cluster.layout import Layout
from plait.cluster.machines import Node, Topology
from plait.observe.report import charts, page
from plait.observe.report.plan import PlanReport, plan_page
from plait.observe.report.ranks import machine_rows, rank_grid
from plait.planner import detail, explain
from plait.planner.estimate import lower_end
from plait.planner.explain import describe
from plait.planner.hardware import cluster
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import Plan, plan
from plait.planner.step import TERMS
from plait.units import GIB


class Page(HTMLParser):
    """What is on a page: tags with attributes, the text of each section, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.sections: dict[str, str] = {}
        self.parts: dict[str, list[list[dict[str, str]]]] = {}
        self.open: list[str] = []
        self.section = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.tags.append((tag, found))
        if tag != "meta":
            self.open.append(tag)
        if tag == "section":
            self.section = found["id"]
        if found.get("class") == "bar":
            self.parts.setdefault(self.section, []).append([])
        if found.get("class", "").startswith("part "):
            self.parts[self.section][-1].append(found)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if self.section:
            self.sections[self.section] = self.sections.get(self.section, "") + data


@cache
def planned(
    model: str = "llama-3-8b",
    gpus: int = 32,
    batch: int = 32,
    sequence: int = 4096,
    fixed: str = "pp=4",
) -> Plan:
    """A plan with a pipeline."""
    name, _, value = fixed.partition("=")
    request = Request(find_model(model, sequence=sequence), cluster("h100", gpus), batch, sequence)
    return plan(request, fixed={name: int(value)} if name else {})


@cache
def told() -> tuple[PlanReport, str, Page]:
    """A story with everything that can be asked, its page, and what is on it."""
    found = planned("llama-3-70b", 64, 72)
    other = 4 if found.best[0].layout["tp"] == 8 else 8  # one that the plan did not choose
    reasons = [
        explain.why(found, {"tp": other}, f"tp={other}"),
        explain.why(found, {"tp": 3}, "tp=3"),
    ]
    changes = [
        explain.LayoutChange("twice the <memory>", 1.25, 4e6, "dp 32"),
        explain.LayoutChange("half the links", None, None, "", "nothing fits"),
    ]
    story = PlanReport(found, ["batch 72: a note"], reasons, changes, {"pp": 4})
    text = plan_page(story)
    return story, text, Page(text)


def test_every_section_is_there_and_every_tag_closed() -> None:
    """And the links lead to them."""
    _, _, shown = told()
    assert list(shown.sections) == [
        "chosen",
        "memory",
        "step",
        "timeline",
        "ranks",
        "candidates",
        "why",
        "sensitivity",
        "left-out",
    ]
    assert shown.open == []
    assert [a["href"] for tag, a in shown.tags if tag == "a"] == [
        f"#{name}" for name in shown.sections
    ]


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No address of another file anywhere; the only one is the name space of SVG."""
    _, text, shown = told()
    for tag, attributes in shown.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "srcset", "data", "background"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style
    assert text.replace('xmlns="http://www.w3.org/2000/svg"', "").count("://") == 0


def test_the_chosen_layout_and_its_figures() -> None:
    """With intervals; and those of the others."""
    story, _, shown = told()
    best = story.plan.best[0]
    text = shown.sections["chosen"]
    for expected in (
        describe(best.layout),
        f"{best.seconds:.4g} s",
        f"{best.seconds_low:.3g} to {best.seconds_high:.3g} s",
        f"{best.mfu:.1%}",
        f"{best.needed / GIB:.1f} GiB",
        f"{lower_end(best.needed, best.needed_high) / GIB:.1f} to {best.needed_high / GIB:.1f} GiB, of 79.1 GiB",
        f"{best.fit_probability:.1%}",
        "batch 72: a note",
        *(describe(choice.layout) for choice in story.plan.best),
        *(f"{choice.seconds:.4g} s" for choice in story.plan.best),
    ):
        assert expected in text, expected


def test_memory_bars_are_the_planners_bytes() -> None:
    """A bar a rank; parts sum to what it needs, widths are in proportion, the largest is the choice's figure."""
    story, _, shown = told()
    ranks = detail.rank_memory(story.plan.request, story.plan.best[0])
    found = shown.parts["memory"]
    assert len(found) == len(ranks) >= 4
    for parts, rank in zip(found, ranks, strict=True):
        sizes = [float(part["data-size"]) for part in parts]
        assert sum(sizes) == pytest.approx(rank.needed)
        assert sizes == [size for size in rank.terms.values() if size > 0]
        widths = [float(part["style"].removeprefix("width:").removesuffix("%")) for part in parts]
        assert [w / sum(widths) for w in widths] == pytest.approx(
            [s / sum(sizes) for s in sizes], abs=1e-3
        )
    assert max(sum(float(part["data-size"]) for part in parts) for parts in found) == pytest.approx(
        story.plan.best[0].needed
    )
    assert all(
        MEMORY_TERMS[name] in shown.sections["memory"]
        for name, size in story.plan.best[0].memory_terms.items()
        if size > 0
    )
    limits = [a["title"] for tag, a in shown.tags if tag == "span" and a.get("class") == "limit"]
    assert limits == ["the device has 79.1 GiB"] * len(ranks)


def test_step_bars_are_the_planners_seconds() -> None:
    """A bar for each of the best, and a table of the first."""
    story, _, shown = told()
    found = shown.parts["step"]
    assert len(found) == len(story.plan.best)
    for parts, choice in zip(found, story.plan.best, strict=True):
        assert [float(part["data-size"]) for part in parts] == [
            choice.terms[name] for name in TERMS if choice.terms[name] > 0
        ]
        assert sum(float(part["data-size"]) for part in parts) == pytest.approx(choice.seconds)
    best = story.plan.best[0]
    for name, size in best.terms.items():
        assert size == 0 or (
            TERMS[name] in shown.sections["step"] and f"{size:.4g} s" in shown.sections["step"]
        )


def test_the_timeline_is_drawn_or_its_ends_are() -> None:
    """Every computation where they are few, with its seconds."""
    story, _, _ = told()
    (fewest,) = _fewest(story.plan)
    few = replace(
        story.plan,
        best=(replace(fewest, layout={**fewest.layout, "accumulation": 2 * fewest.layout["pp"]}),),
    )
    whole = Page(plan_page(PlanReport(few)))
    actions = [a for tag, a in whole.tags if tag == "rect" and a.get("class") == "action"]
    walked = detail.timeline(few.request, few.best[0])
    assert len(actions) == sum(len(row) for row in walked.ranks)
    assert (
        f"The {walked.total:.4g} s of a step" in whole.sections["timeline"]
        and "too many to draw" not in whole.sections["timeline"]
    )

    longer = replace(few.best[0], layout={**few.best[0].layout, "accumulation": 512})
    ends = Page(plan_page(PlanReport(replace(few, best=(longer,)))))
    actions = [a for tag, a in ends.tags if tag == "rect" and a.get("class") == "action"]
    assert (
        "computations are too many to draw" in ends.sections["timeline"]
        and 300 < len(actions) < 2600
    )


def _fewest(found: Plan) -> list[object]:
    return sorted(
        found.best, key=lambda choice: choice.layout["accumulation"] * choice.layout["vpp"]
    )[:1]


def test_no_pipeline_no_timeline() -> None:
    """The section is left out, and so is its link."""
    shown = Page(plan_page(PlanReport(planned(fixed="pp=1"))))
    assert (
        "timeline" not in shown.sections
        and "why" not in shown.sections
        and "memory" in shown.sections
    )


def test_candidates_are_a_point_each_and_the_chosen_are_discs() -> None:
    """Coloured by what they lose most by; the others asked for have letters."""
    story, _, shown = told()
    found = detail.sample(story.plan.request, fixed={"pp": 4})
    circles = [a for tag, a in shown.tags if tag == "circle"]
    plain = [a["class"] for a in circles if a["r"] == "4"]
    expected = [f"c-{p.cost.split()[0]}" if p.fits else "c-memory" for p in found.points]
    assert sorted(plain) == sorted(expected)
    discs = [a["class"] for a in circles if a["r"] == "10"]
    assert discs.count("c-best") == 1 and len(discs) == len(story.marks)
    assert f"{found.candidates:,} candidates" in shown.sections["candidates"]
    for mark in story.marks:
        assert f"{mark}: {describe(story.marks[mark].layout)}" in shown.sections["candidates"]


def test_why_and_what_was_left_out() -> None:
    """Each reason, each term that differs, each region with its numbers."""
    story, _, shown = told()
    for reason in story.reasons:
        assert reason.reason in shown.sections["why"]
    other = story.reasons[0].other
    assert other is not None and f"{other.seconds:.4g} s" in shown.sections["why"]
    assert f"{story.reasons[0].differences[0][2]:.3g} s" in shown.sections["why"]
    assert story.plan.excluded
    for excluded in story.plan.excluded:
        assert (
            excluded.region in shown.sections["left-out"]
            and excluded.rule in shown.sections["left-out"]
        )
    assert story.plan.shortages
    for shortage in story.plan.shortages:
        assert (
            f"{shortage.needed / GIB:.1f}" in shown.sections["left-out"]
            and shortage.region in shown.sections["left-out"]
        )


def test_nothing_from_a_file_becomes_a_tag() -> None:
    """A model may be called anything."""
    found = planned()
    model = replace(
        found.request.model,
        architecture=replace(found.request.model.architecture, name="<script>alert(1)</script>"),
    )
    text = plan_page(
        PlanReport(replace(found, request=replace(found.request, model=model)), ["<b>note</b>"])
    )
    assert "<script" not in text and "&lt;script&gt;" in text and "<b>note" not in text
    assert "twice the &lt;memory&gt;" in told()[1]


def test_nothing_fits_has_a_page_too() -> None:
    """What was priced and what the smallest lack."""
    request = Request(find_model("llama-3-405b", sequence=4096), cluster("h100", 8), 8, 4096)
    found = plan(request)
    assert not found.best
    shown = Page(plan_page(PlanReport(found)))
    assert next(iter(shown.sections)) == "chosen" and "None of" in shown.sections["chosen"]
    assert (
        "memory" not in shown.sections and found.shortages[0].region in shown.sections["left-out"]
    )


def test_16384_gpus_are_a_small_page() -> None:
    """Machines that hold the same stages are one row."""
    found = planned("llama-3-405b", 16384, 2048, 8192, "")
    text = plan_page(PlanReport(found))
    assert len(text.encode()) < 2e6
    shown = Page(text)
    cells = [a for tag, a in shown.tags if tag == "span" and a.get("class", "").startswith("rank ")]
    pp = int(found.best[0].layout["pp"])
    assert pp > 1 and len(cells) == 8 * pp
    assert f"machines 0 to {2048 // pp - 1}" in shown.sections["ranks"]


def machines(count: int, devices: int = 8) -> Topology:
    """Alike."""
    return Topology(tuple(Node(f"n{index}", devices) for index in range(count)), "cuda")


def test_runs_of_machines() -> None:
    """Few machines are drawn one by one, many are joined where they hold the same stages."""
    layout = Layout(pp=2, dp_shard=8, tp=4)
    assert [(run.first_node, run.last_node) for run in machine_rows(layout, machines(8))] == [
        (index, index) for index in range(8)
    ]
    layout = Layout(pp=4, dp_shard=64, tp=2)
    found = machine_rows(layout, machines(64))
    assert [(run.first_node, run.last_node) for run in found] == [
        (0, 15),
        (16, 31),
        (32, 47),
        (48, 63),
    ]
    assert [run.ranks.start for run in found] == [0, 128, 256, 384]
    inside = machine_rows(Layout(pp=8, dp_shard=20), machines(20))  # a stage ends inside a machine
    assert inside[0].last_node == 1 and inside[1] == replace(inside[1], first_node=2, last_node=2)
    assert sum(run.last_node - run.first_node + 1 for run in inside) == 20


def test_the_grid_names_every_rank_and_frames_tensor_groups() -> None:
    """16 ranks on two machines, tp 4 inside them."""
    shown = Page(
        f'<section id="r">{rank_grid(Layout(pp=2, dp_shard=2, tp=4), machines(2))}</section>'
    )
    titles = [a["title"] for _, a in shown.tags if a.get("class", "").startswith("rank ")]
    assert (
        titles[0] == "rank 0: pp 0, shard 0, tp 0"
        and titles[13] == "rank 13: pp 1, shard 1, tp 1"
        and len(titles) == 16
    )
    assert sum(a.get("class") == "group framed" for _, a in shown.tags) == 4
    assert "pp (8 of 8 groups); all others stay inside one" in shown.sections["r"]


def test_tensor_groups_over_machines_are_warned_of() -> None:
    """With the numbers of `placement`."""
    assert "span nodes" in rank_grid(Layout(dp_shard=1, tp=16), machines(2))
    assert "warning" not in rank_grid(Layout(dp_shard=2, tp=8), machines(2))


def test_marked_points_never_lie_over_each_other() -> None:
    """Discs of points in one place move apart, inside the picture."""
    dots = [charts.Dot(70.0, 5.0, "c", "t", str(index)) for index in range(12)] + [
        charts.Dot(1.0, 9.0, "c", "t")
    ]
    shown = Page(charts.plane(dots, x_name="x", y_name="y", x_limit=(80.0, "limit"), title="t"))
    at = [
        (float(a["cx"]), float(a["cy"]))
        for tag, a in shown.tags
        if tag == "circle" and a["r"] == "10"
    ]
    assert len(at) == 12
    assert all(
        (x - p) ** 2 + (y - q) ** 2 >= 20.5**2 for i, (x, y) in enumerate(at) for p, q in at[:i]
    )
    assert all(70 < x < 1000 and 0 < y < 460 for x, y in at)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 120.0, [1, 2, 5, 10, 20, 50, 100]),
        (7, 30, [7, 10, 15, 20, 30]),
        (40, 60, [40, 50, 60]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    """Round, inside, not crowded."""
    assert charts.log_ticks(low, high) == expected


def test_sections_without_content_are_left_out() -> None:
    """And so are their links; a table without rows is no table."""
    text = page.page("t", "s", [("a", "A", page.note("<")), ("b", "B", Markup(""))])
    shown = Page(text)
    assert list(shown.sections) == ["a"] and '#b"' not in text and "&lt;" in text
    assert page.table(("x",), []) == "" and page.folded("x", Markup("")) == ""


def test_every_colour_of_a_chart_has_a_rule() -> None:
    """E12: a class without one is a white gap in a bar."""
    css = Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")
    named = [f".m-{name} " for name in (*MEMORY_TERMS, "slack", "context")] + [
        f".t-{name} " for name in TERMS
    ]
    assert [name for name in named if name not in css] == []
