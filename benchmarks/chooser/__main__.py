"""The command: `python -m benchmarks.chooser`. Scenes of ranks and links; each is measured as a run does it at its start, and its choice
for messages of a size that was not measured is refined as a run does it. Then it is checked: every all-reduce algorithm is timed again,
interleaved, and the selected one is compared with the best.

Prints a table and writes it with every number. Exit code 0, 1 when fewer than 90 % of the points are within 5 % of the best, 2 where
nothing could be measured. Scenes on two nodes need root and iproute2 and are left out without, with a note.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chooser.worker import start
from benchmarks.common.command import command
from benchmarks.common.load import ForeignMeter
from benchmarks.common.report import aligned, facts, markdown, say, write
from benchmarks.common.workers import WorkerGroup
from benchmarks.two_nodes.network import Lab, NoLab, lab
from plait.comm.choose import AlgorithmChoice, GroupLinks, Level, choose_all_reduce, refined
from plait.sizes import KIB, MIB, format_bytes

SIZES = (32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB, 48 * MIB)
"""None is a size of the measurement (`comm.measure.SIZES`)."""
CLOSE, SHARE = 1.05, 0.9
"""Within 5 % of the best, in 90 % of the points."""
RESULTS = Path(__file__).parents[1] / "results"
HEADER = ("scene", "size", "chosen", "ms", "best", "ms", "of the best", "one call of the best")


@dataclass(frozen=True)
class Scene:
    """Ranks and the links between them."""

    title: str
    ranks: int
    nodes: int = 1
    rate: str | None = None
    largest: int = SIZES[-1]
    shared: bool = False
    """Whether memory that the ranks share is among the ways."""

    @property
    def worker_group(self) -> tuple[int, int]:
        """Scenes with the same ranks and nodes are the same processes."""
        return self.ranks, self.nodes


SCENES = (
    Scene("2 ranks, loopback", 2),
    Scene("2 ranks, shared memory", 2, shared=True),
    Scene("4 ranks, loopback", 4),
    Scene("4 ranks, shared memory", 4, shared=True),
    Scene("2 nodes of 1, 1 Gbit/s", 2, nodes=2, rate="1gbit", largest=32 * MIB),
    Scene("2 nodes of 2, 1 Gbit/s", 4, nodes=2, rate="1gbit", largest=32 * MIB),
    Scene("2 nodes of 1, 100 Mbit/s", 2, nodes=2, rate="100mbit", largest=2 * MIB),
    Scene("2 nodes of 2, 100 Mbit/s", 4, nodes=2, rate="100mbit", largest=2 * MIB),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chooser_")))
        try:
            found: Lab | None = stack.enter_context(lab())
        except NoLab as error:
            found = None
            say(f"scenes on two nodes are left out: {error}")
        scenes = [scene for scene in SCENES if options.only in scene.title]
        for ranks, nodes in dict.fromkeys(scene.worker_group for scene in scenes):
            if nodes > 1 and found is None:
                continue
            with _team(ranks, nodes, found, logs) as worker_group:
                for rate in dict.fromkeys(
                    scene.rate for scene in scenes if scene.worker_group == (ranks, nodes)
                ):
                    if rate is not None and found is not None:
                        found.shape(rate)
                    views = [
                        scene
                        for scene in scenes
                        if scene.worker_group == (ranks, nodes) and scene.rate == rate
                    ]
                    points += _points(worker_group, views, options)
    if not points:
        return 2
    for point in points:
        point["ratio"] = point["chosen_seconds"] / point["best_seconds"]
    right, links, plain = (
        sum(point[taken] <= CLOSE * point["best_seconds"] for point in points) / len(points)
        for taken in ("chosen_seconds", "by_links_seconds", "one_call_seconds")
    )
    conclusion = (
        f"{right:.0%} of {len(points)} points within 5 % of the best (wanted: {SHARE:.0%}); by the links alone {links:.0%}; "
        f"always one call of the backend {plain:.0%}. "
        f"Worst {max(point['ratio'] for point in points):.2f}."
    )
    rows = [_row(point) for point in points]
    print(aligned(HEADER, rows))
    print(f"\n{conclusion}")
    if options.quick or options.only:
        say("--quick and --only write nothing")
        return 0
    # The times of all algorithms stay out of the file. The table needs the selected one, the best one and one call of the backend.
    stored = [
        {name: value for name, value in point.items() if name != "seconds"} for point in points
    ]
    write(
        RESULTS / "chooser.json",
        {"machine": facts("torch", "plait"), "share_within_5_percent": right, "points": stored},
    )
    (RESULTS / "chooser.md").write_text(
        f"# The adaptive choice against the best way\n\n{conclusion}\n\n{markdown(HEADER, rows)}"
    )
    say(f"written: {RESULTS / 'chooser.json'} and chooser.md")
    return 0 if right >= SHARE else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command("chooser", __doc__)
    parser.add_argument(
        "--fit-seconds",
        type=float,
        default=2.0,
        help="how long links are measured in a scene (default: 2)",
    )
    parser.add_argument(
        "--refine-seconds",
        type=float,
        default=1.0,
        help="how long near ways are compared at a size (default: 1)",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="how long a size is timed (default: 2)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        nargs=2,
        default=(7, 60),
        metavar=("LEAST", "MOST"),
        help="rounds of a size (default: 7 60)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only the scenes whose title has the text; writes nothing",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.fit_seconds, options.refine_seconds, options.seconds, options.rounds = (
            0.5,
            0.1,
            0.2,
            (2, 5),
        )
    return options


@contextmanager
def _team(ranks: int, nodes: int, found: Lab | None, logs: Path) -> Iterator[WorkerGroup]:
    worker_group = WorkerGroup(
        f"{ranks}-{nodes}",
        ranks=ranks,
        start=start,
        argument=(ranks // nodes, found.nodes if nodes > 1 and found is not None else None),
        logs=logs,
        environment={"OMP_NUM_THREADS": "1"},
    )
    try:
        worker_group.ready(timeout_seconds=120)
        yield worker_group
    finally:
        worker_group.stop()


def _points(
    worker_group: WorkerGroup, views: Sequence[Scene], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The scenes of one worker group at one rate: one measurement and one check, of which each scene sees its algorithms."""
    say(f"{views[-1].title}: measuring")
    fitted: GroupLinks = worker_group.ask(
        ("fit", {"seconds": options.fit_seconds}), timeout_seconds=120
    )[0]
    points = []
    for nbytes in (size for size in SIZES if size <= views[0].largest):
        choices = [_chosen(worker_group, scene, nbytes, fitted, options) for scene in views]
        meter = ForeignMeter(worker_group.pids)
        meter.start()
        message = {"nbytes": nbytes, "seconds": options.seconds, "rounds": tuple(options.rounds)}
        answers = worker_group.ask(("time_all", message), timeout_seconds=300)
        foreign = meter.stop()
        # A round lasts as long as its slowest rank.
        times = {
            way: median(map(max, zip(*(answer[way] for answer in answers), strict=True)))
            for way in answers[0]
        }
        points += [
            _point(scene, nbytes, *found, times) | {"foreign": foreign}
            for scene, found in zip(views, choices, strict=True)
        ]
    return points


def _chosen(
    worker_group: WorkerGroup,
    scene: Scene,
    nbytes: int,
    fitted: GroupLinks,
    options: argparse.Namespace,
) -> tuple[AlgorithmChoice, AlgorithmChoice]:
    """What the links say, and the choice after timing the algorithms that come near it."""
    costs = {
        way: cost
        for way, cost in fitted.whole.costs.items()
        if scene.shared or way != "shared-memory"
    }
    links = GroupLinks(fitted.axis, fitted.machines, fitted.per_machine, Level(fitted.ranks, costs))
    first = choose_all_reduce(nbytes, links)
    if len(first.near) < 2:
        return first, first
    message = {"names": first.near, "nbytes": nbytes, "seconds": options.refine_seconds}
    return first, refined(
        first, links, worker_group.ask(("compare", message), timeout_seconds=120)[0]
    )


def _point(
    scene: Scene,
    nbytes: int,
    first: AlgorithmChoice,
    choice: AlgorithmChoice,
    times: dict[str, float],
) -> dict[str, Any]:
    seen = {
        way: seconds for way, seconds in times.items() if scene.shared or way != "shared-memory"
    }
    best = min(seen, key=lambda way: seen[way])
    return {
        "scene": scene.title,
        "bytes": nbytes,
        "chosen": choice.algorithm,
        "chosen_by_links": first.algorithm,
        "by_links_seconds": seen[first.algorithm],
        "expected_seconds": choice.seconds,
        "chosen_seconds": seen[choice.algorithm],
        "best": best,
        "best_seconds": seen[best],
        "one_call_seconds": seen["all-reduce"],
        "seconds": seen,
    }


def _row(point: dict[str, Any]) -> tuple[str, ...]:
    return (
        point["scene"],
        format_bytes(point["bytes"]),
        point["chosen"],
        f"{point['chosen_seconds'] * 1e3:.3g}",
        point["best"],
        f"{point['best_seconds'] * 1e3:.3g}",
        f"{point['ratio']:.2f}",
        f"{point['one_call_seconds'] / point['best_seconds']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
