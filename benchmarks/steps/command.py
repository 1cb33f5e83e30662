"""The command of a benchmark of training steps. For each scene it starts the workers, runs the
rounds, and prints and writes the result.

Exit code 0 if every baseline was measured and agreed, 1 if one failed, disagreed or never had an
undisturbed turn, 2 for a wrong argument. A ratio above the target is reported and is no failure. A
scene that is measured alone replaces its own result only. With --beside nothing is written, because
a result does not say which checkout that was.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.command import command
from benchmarks.common.load import wait_for_quiet
from benchmarks.common.report import RESULTS, facts, read, say, write
from benchmarks.common.workers import WorkerGroup, WorkerGroupError
from benchmarks.steps import deepspeed_peer, report, rounds
from benchmarks.steps.baselines import Baseline, Benchmark, Scene, beside
from benchmarks.steps.rounds import Pace, Record
from benchmarks.steps.worker import start
from benchmarks.steps.workload import Workload

PACKAGES = ("torch", "transformers", "deepspeed", "plait")
START_SECONDS = 600.0
LIBRARIES_BYTES = 400 * 2**20
"""Memory of a worker before it has a model."""
COPIES = 7
"""Parameters, gradients, two moments, buckets or gathered parameters, and activations, in units of
the parameters' bytes."""
QUICK_SIZES = {"layers": 2, "hidden": 128, "intermediate": 352, "heads": 4}
QUICK_SIZES |= {"vocabulary": 512, "sequence": 64}
QUICK_PACE = Pace(rounds=2, steps=1, foreign_share=1.0, wait_seconds=0.0)
"""Nothing waits for a quiet machine, because the numbers mean nothing."""


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    options = _parse(benchmark, arguments)
    pace = QUICK_PACE if options.quick else Pace(rounds=options.rounds, steps=options.steps)
    names = set(options.baselines)
    if options.beside:
        benchmark = beside(benchmark, options.beside)
        names |= {f"beside-{name}" for name in names}
    scenes = [scene for scene in benchmark.scenes if scene.name in options.scenes]
    for scene in scenes:
        names.add(scene.baselines[0].name)
    skipped = unavailable([b for b in _baselines_of(scenes) if b.name in names])
    is_good = True
    with tempfile.TemporaryDirectory(prefix=f"{benchmark.name}_") as logs:
        for scene in scenes:
            sizes: dict[str, Any] = dict(scene.sizes)
            if options.quick:
                sizes |= QUICK_SIZES
            selected = {}
            skipped_of_scene = {}
            for baseline in scene.baselines:
                if baseline.name in skipped:
                    skipped_of_scene[baseline.name] = skipped[baseline.name]
                elif baseline.name in names:
                    selected[baseline.name] = baseline
            document = measure(
                benchmark,
                scene,
                selected,
                workload=Workload(**sizes),
                pace=pace,
                logs=Path(logs),
                skipped=skipped_of_scene,
            )
            is_good = is_good and document is not None and report.is_good(document)
            if document is None:
                continue
            print(report.terminal(document), flush=True)
            if not options.quick and not options.beside:
                _write(benchmark, options.output, document)
    return int(not is_good)


def _parse(benchmark: Benchmark, arguments: Sequence[str] | None) -> argparse.Namespace:
    scenes = [scene.name for scene in benchmark.scenes]
    # A baseline may be in several scenes.
    names = list(dict.fromkeys(b.name for b in _baselines_of(benchmark.scenes)))
    parser = command(benchmark.name, __doc__)
    parser.add_argument("--scenes", nargs="+", choices=scenes, default=scenes)
    parser.add_argument("--baselines", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=Pace.rounds)
    parser.add_argument("--steps", type=int, default=Pace.steps, help="timed steps of a turn")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--beside",
        type=_checkout,
        metavar="FOLDER",
        help="another checkout of Plait, which takes turns with this one",
    )
    return parser.parse_args(arguments)


def _checkout(text: str) -> Path:
    folder = Path(text).resolve()
    if not (folder / "src/plait/__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no src/plait; name a checkout of Plait")
    return folder


def _baselines_of(scenes: Sequence[Scene]) -> list[Baseline]:
    return [baseline for scene in scenes for baseline in scene.baselines]


def unavailable(baselines: Sequence[Baseline]) -> dict[str, str]:
    """Return the baselines that cannot run here, with the reason, and print them."""
    skipped = {}
    deepspeed = []
    for baseline in baselines:
        if baseline.is_missing:
            reason = f"{baseline.requires} is not installed (pip install '.[bench]')"
            skipped[baseline.name] = reason
        elif baseline.requires == "deepspeed":
            deepspeed.append(baseline.name)
    if deepspeed:
        say("compiling DeepSpeed's operators (a minute the first time)")
        problem = deepspeed_peer.prepare()
        if problem:
            skipped |= dict.fromkeys(deepspeed, problem)
    for name, reason in skipped.items():
        say(f"{name} is left out: {reason}")
    return skipped


def measure(
    benchmark: Benchmark,
    scene: Scene,
    baselines: Mapping[str, Baseline],
    *,
    workload: Workload,
    pace: Pace,
    logs: Path,
    skipped: Mapping[str, str],
) -> dict[str, Any] | None:
    """Run the rounds of a scene. Returns `report.document`, or None if nothing can be compared."""
    say(f"{scene.title}: {', '.join(baselines)}")
    problem = _too_large(len(baselines), workload)
    groups: dict[str, WorkerGroup] = {}
    try:
        failures = {}
        if not problem:
            failures = start_groups(baselines, groups, workload=workload, logs=logs)
            reference = scene.baselines[0].name
            if reference not in groups:
                problem = f"the reference, {reference}, did not start"
        if problem:
            say(f"{scene.title} is left out: {problem}")
            return None
        records = rounds.run(groups, baselines, pace=pace)
        for name, failure in failures.items():
            records[name] = Record(failure=failure)
        return report.document(
            benchmark,
            scene,
            machine=facts(*PACKAGES),
            workload=workload,
            pace=pace,
            records=records,
            phases=_phases(groups, records, pace=pace),
            skipped=skipped,
        )
    finally:
        stop_groups(groups)


def _too_large(groups: int, workload: Workload) -> str | None:
    needed = groups * workload.ranks * (LIBRARIES_BYTES + 4 * COPIES * workload.parameters)
    free = psutil.virtual_memory().available
    if needed <= free:
        return None
    return (
        f"{groups} worker groups of {workload.ranks} ranks need about {needed / 2**30:.1f} GiB of "
        f"memory, and {free / 2**30:.1f} GiB are free; name fewer --baselines"
    )


def start_groups(
    baselines: Mapping[str, Baseline],
    groups: dict[str, WorkerGroup],
    *,
    workload: Workload,
    logs: Path,
) -> dict[str, str]:
    """Start the workers one baseline after the other into `groups`, and return the failures."""
    failures = {}
    environment = {**deepspeed_peer.ENVIRONMENT, "OMP_NUM_THREADS": str(workload.threads)}
    for name, baseline in baselines.items():
        groups[name] = WorkerGroup(
            name,
            ranks=workload.ranks,
            start=start,
            argument=(baseline, workload),
            logs=logs,
            environment=environment,
        )
        try:
            groups[name].ready(timeout_seconds=START_SECONDS)
        except WorkerGroupError as error:
            failures[name] = f"did not start: {error}"
            stop_groups({name: groups.pop(name)})
            say(f"{name} {failures[name]}")
    return failures


def stop_groups(groups: Mapping[str, WorkerGroup]) -> None:
    """End all workers, and remove what DeepSpeed leaves behind."""
    for group in groups.values():
        group.stop()
    deepspeed_peer.clean(ports=[group.port for group in groups.values()])


def _phases(
    groups: Mapping[str, WorkerGroup], records: dict[str, Record], *, pace: Pace
) -> dict[str, list[dict[str, float]]]:
    """Return milliseconds per phase, by baseline and rank, of every group that still runs."""
    phases = {}
    for name, group in groups.items():
        if records[name].failure:
            continue
        wait_for_quiet(share=pace.foreign_share, longest_seconds=pace.wait_seconds)
        message = ("phases", {"warm": 1, "steps": pace.steps})
        try:
            phases[name] = group.ask(message, timeout_seconds=pace.turn_timeout_seconds)
        except WorkerGroupError as error:
            records[name].failure = str(error)
    return phases


def _write(benchmark: Benchmark, folder: Path, document: dict[str, Any]) -> None:
    results = folder / benchmark.name
    write(results / f"{document['scene']}.json", document, digits=7)
    measured = (read(results / f"{scene.name}.json") for scene in benchmark.scenes)
    text = report.page(benchmark, list(filter(None, measured)))
    (folder / f"{benchmark.name}.md").write_text(text)
