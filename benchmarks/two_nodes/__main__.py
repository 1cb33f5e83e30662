"""The command: `python -m benchmarks.two_nodes`. For every rate of the link, rounds in which every baseline has a turn of a few steps.

Prints a table a rate (seconds a step, bytes a step that the kernel counted, ratios to DDP) and writes them as JSON. Exit code 0, 1 when a
baseline failed, 2 where the laboratory cannot be set up. It ends by itself and removes what it made.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import command
from benchmarks.common.report import aligned, facts, say, write
from benchmarks.common.workers import WorkerGroup, WorkerGroupError
from benchmarks.training_step import deepspeed_peer
from benchmarks.training_step.workload import Workload
from benchmarks.two_nodes.baselines import ALL, BY_NAME, Baseline, start
from benchmarks.two_nodes.network import Lab, NoLab, lab

RATES: dict[str, str | None] = {"100mbit": "100mbit", "1gbit": "1gbit", "unshaped": None}
WARM_STEPS = 29
"""Before the first clock: PowerSGD sends uncompressed gradients for ten steps, and autotuning has decided after 26."""
RESULT = Path(__file__).parents[1] / "results" / "two_nodes.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    workload = Workload(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=options.hidden * 11 // 4,
        heads=4,
        vocabulary=2048,
        sequence=options.sequence,
        micro_batch=options.micro_batch,
    )
    chosen = [BY_NAME[name] for name in options.baselines if not BY_NAME[name].missing]
    for name in options.baselines:
        if BY_NAME[name].missing:
            say(f"{name} is left out: {BY_NAME[name].requires} is not installed")
    try:
        with lab() as found, tempfile.TemporaryDirectory(prefix="two_nodes_") as logs:
            return _measure(found, chosen, workload, options, Path(logs))
    except NoLab as error:
        say(f"two_nodes: {error}")
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [one.name for one in ALL]
    usual = [one.name for one in ALL if not one.tensor]
    parser = command("two_nodes", __doc__)
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=names,
        default=usual,
        metavar="NAME",
        help="default: " + " ".join(usual),
    )
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn (default: 2)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = options.steps = 1
    return options


def _measure(
    found: Lab,
    chosen: Sequence[Baseline],
    workload: Workload,
    options: argparse.Namespace,
    logs: Path,
) -> int:
    worker_groups: dict[str, WorkerGroup] = {}
    failures: dict[str, str] = {}
    try:
        rates: dict[str, Any] = {}
        said: dict[str, dict[str, str]] = {}
        for rate in options.rates:
            found.shape(None)
            for one in chosen:
                if one.adapts:
                    found.shape(RATES[rate])
                if one.adapts and one.name in worker_groups:
                    worker_groups.pop(one.name).stop()
                if one.name not in worker_groups and one.name not in failures:
                    worker_groups[one.name] = WorkerGroup(
                        one.name,
                        ranks=2,
                        start=start,
                        argument=(one, workload, found.nodes),
                        logs=logs,
                        environment={**deepspeed_peer.ENVIRONMENT, "OMP_NUM_THREADS": "1"},
                    )
                    _warm(worker_groups[one.name], failures)
                found.shape(None)
            said[rate] = {
                one.name: _said(worker_groups[one.name])
                for one in chosen
                if one.adapts and one.name not in failures
            }
            found.shape(RATES[rate])
            if not set(worker_groups) - set(failures):
                return 1
            rates[rate] = _rounds(
                found,
                {n: t for n, t in worker_groups.items() if n not in failures},
                failures,
                options,
            )
            print(_table(rate, rates[rate], workload), flush=True)
            for name, words in said[rate].items():
                print(f"{name}: {words}", flush=True)
    finally:
        for worker_group in worker_groups.values():
            worker_group.stop()
        deepspeed_peer.clean(ports=[worker_group.port for worker_group in worker_groups.values()])
    document = {
        "machine": facts("torch", "transformers", "deepspeed", "plait"),
        "parameters": workload.parameters,
        "rounds": options.rounds,
        "rates": {rate: _medians(baselines) for rate, baselines in rates.items()},
        "said": said,
        "failures": failures,
    }
    if not options.quick:
        write(RESULT, document)
    return 1 if failures else 0


def _warm(worker_group: WorkerGroup, failures: dict[str, str]) -> None:
    try:
        worker_group.ready(timeout_seconds=300)
        worker_group.ask(("turn", {"warm": 0, "steps": WARM_STEPS}), timeout_seconds=300)
        say(f"{worker_group.name} is ready")
    except WorkerGroupError as error:
        failures[worker_group.name] = str(error)
        say(f"{worker_group.name} failed: {error}")


def _said(worker_group: WorkerGroup) -> str:
    """What the first rank printed of its decisions."""
    lines = worker_group.logs[0].read_text(errors="replace").splitlines()
    return " ".join(line for line in lines if line.startswith("gradients "))


def _rounds(
    found: Lab,
    worker_groups: Mapping[str, WorkerGroup],
    failures: dict[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Baseline to its turns: slowest rank's seconds a step, and bytes a step of the node that sent more. Turns rotate by one a round."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in worker_groups}
    order = list(worker_groups)
    for number in range(options.rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            if name in failures:
                continue
            try:
                worker_groups[name].ask(("turn", {"warm": 0, "steps": 1}), timeout_seconds=300)
                before = found.sent_bytes()
                answers = worker_groups[name].ask(
                    ("turn", {"warm": 0, "steps": options.steps}), timeout_seconds=600
                )
                after = found.sent_bytes()
            except WorkerGroupError as error:
                failures[name] = str(error)
                say(f"{name} failed: {error}")
                continue
            sent = max(now - then for now, then in zip(after, before, strict=True)) / options.steps
            turns[name].append(
                {
                    "seconds": max(a["seconds"] for a in answers),
                    "bytes": sent,
                    "loss": answers[0]["losses"][-1],
                }
            )
    return {
        name: {
            "seconds": statistics.median(t["seconds"] for t in own),
            "bytes": statistics.median(t["bytes"] for t in own),
            "turns": own,
        }
        for name, own in turns.items()
        if own
    }


def _of_ddp(own: Sequence[Mapping[str, float]], ddp: Sequence[Mapping[str, float]]) -> float:
    """The median of the ratios within each round: machines are faster in one minute than in the next."""
    return statistics.median(
        mine["seconds"] / theirs["seconds"] for mine, theirs in zip(own, ddp, strict=False)
    )


def _medians(found: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the numbers of the table for each baseline, without the single turns."""
    reference = found.get("ddp", {}).get("turns", [])
    return {
        name: {
            "seconds": one["seconds"],
            "bytes": one["bytes"],
            "of_ddp": _of_ddp(one["turns"], reference) if reference else None,
        }
        for name, one in found.items()
    }


def _table(rate: str, found: Mapping[str, Any], workload: Workload) -> str:
    reference = found.get("ddp", {}).get("turns", [])
    rows = [
        (
            BY_NAME[name].title,
            f"{one['seconds'] * 1e3:,.0f}",
            f"{one['bytes'] / 1e6:.2f}",
            f"{_of_ddp(one['turns'], reference):.2f}" if reference else "",
        )
        for name, one in sorted(found.items(), key=lambda item: item[1]["seconds"])
    ]
    title = f"link: {rate}; {workload.parameters / 1e6:.1f} M parameters, one rank a node; median of the turns"
    return f"\n{title}\n" + aligned(
        ("engine", "ms/step", "MB/step of a node", "of DDP's time"), rows
    )


if __name__ == "__main__":
    sys.exit(main())
