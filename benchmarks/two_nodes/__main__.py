"""One optimizer step over a slow link, with and without compression of gradients.

python -m benchmarks.two_nodes [--quick] [--rates 100mbit] [--baselines ddp plait-0]

For every rate of the link, rounds in which every engine has a turn of a few steps. It prints
seconds per step, bytes per step that the kernel counted, and ratios to DDP. Exit code 1 if an
engine failed, 2 if the network namespaces cannot be made.
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
from benchmarks.common.report import RESULTS, aligned, facts, say, write
from benchmarks.common.workers import WorkerGroup, WorkerGroupError
from benchmarks.steps import deepspeed_peer
from benchmarks.steps.baselines import Baseline
from benchmarks.steps.command import PACKAGES, START_SECONDS, stop_groups, unavailable
from benchmarks.steps.workload import Workload
from benchmarks.two_nodes.baselines import ADAPTIVE, BY_NAME, SIZES, USUAL, start
from benchmarks.two_nodes.network import Lab, NoLab, lab

RATES: dict[str, str | None] = {"100mbit": "100mbit", "1gbit": "1gbit", "unshaped": None}
WARM_STEPS = 29
"""PowerSGD sends uncompressed gradients for ten steps, and autotuning decides within 26."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        with lab() as two_nodes, tempfile.TemporaryDirectory(prefix="two_nodes_") as logs:
            return _Measurement(two_nodes, options, Path(logs)).run()
    except NoLab as error:
        say(f"two_nodes: {error}")
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command("two_nodes", __doc__)
    parser.add_argument(
        "--baselines", nargs="+", choices=list(BY_NAME), default=USUAL, metavar="NAME"
    )
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn (default: 2)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = options.steps = 1
    return options


class _Measurement:
    """Workers of all baselines, and what failed."""

    def __init__(self, two_nodes: Lab, options: argparse.Namespace, logs: Path) -> None:
        self._lab = two_nodes
        self._options = options
        self._logs = logs
        self._groups: dict[str, WorkerGroup] = {}
        self._failures: dict[str, str] = {}

    def run(self) -> int:
        """Measure every rate, print the tables, write the result and return the exit code."""
        options = self._options
        baselines = [BY_NAME[name] for name in options.baselines]
        skipped = unavailable(baselines)
        rates: dict[str, Any] = {}
        decisions: dict[str, dict[str, str]] = {}
        try:
            for rate in options.rates:
                decisions[rate] = {}
                for baseline in baselines:
                    if baseline.name in skipped or baseline.name in self._failures:
                        continue
                    self._start(baseline, RATES[rate])
                    if baseline.name in ADAPTIVE and baseline.name in self._groups:
                        decisions[rate][baseline.name] = self._decision(baseline.name)
                if not self._groups:
                    return 1
                self._lab.shape(RATES[rate])
                rates[rate] = self._rounds()
                print(_table(rate, rates[rate]), flush=True)
                for name, text in decisions[rate].items():
                    print(f"{name}: {text}", flush=True)
        finally:
            stop_groups(self._groups)
        if not options.quick:
            content = {
                "machine": facts(*PACKAGES),
                "parameters": Workload(**SIZES).parameters,
                "rounds": options.rounds,
                "rates": rates,
                "said": decisions,
                "failures": self._failures,
            }
            write(RESULTS / "two_nodes.json", content)
        return 1 if self._failures else 0

    def _start(self, baseline: Baseline, rate: str | None) -> None:
        """Start and warm up a baseline that does not run yet, at full rate if it does not adapt."""
        name = baseline.name
        if name in ADAPTIVE and name in self._groups:
            self._groups.pop(name).stop()
        if name in self._groups:
            return
        self._lab.shape(rate if name in ADAPTIVE else None)
        slice_ranks = 2 if "tp" in baseline.options else 1
        group = WorkerGroup(
            name,
            ranks=2,
            start=start,
            argument=(baseline, Workload(**SIZES, ranks_per_slice=slice_ranks), self._lab.nodes),
            logs=self._logs,
            environment={**deepspeed_peer.ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        )
        self._groups[name] = group
        try:
            group.ready(timeout_seconds=START_SECONDS)
            self._turn(name, WARM_STEPS)
            say(f"{name} is ready")
        except WorkerGroupError as error:
            self._fail(name, error)

    def _turn(self, name: str, steps: int) -> list[Any]:
        message = ("turn", {"warm": 0, "steps": steps})
        return self._groups[name].ask(message, timeout_seconds=600)

    def _fail(self, name: str, error: WorkerGroupError) -> None:
        self._failures[name] = str(error)
        stop_groups({name: self._groups.pop(name)})
        say(f"{name} failed: {error}")

    def _decision(self, name: str) -> str:
        """Return what the first rank printed about its communication."""
        lines = self._groups[name].logs[0].read_text(errors="replace").splitlines()
        return " ".join(line for line in lines if line.startswith("gradients "))

    def _rounds(self) -> dict[str, dict[str, float]]:
        """Return the medians of each baseline: seconds and bytes per step, and ratio to DDP.

        Seconds are those of the slowest rank, and bytes those of the node that sent more.
        """
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in self._groups}
        names = list(turns)
        steps = self._options.steps
        for number in range(self._options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name in self._failures:
                    continue
                try:
                    self._turn(name, 1)
                    before = self._lab.sent_bytes()
                    answers = self._turn(name, steps)
                    after = self._lab.sent_bytes()
                except WorkerGroupError as error:
                    self._fail(name, error)
                    continue
                sent = max(now - then for now, then in zip(after, before, strict=True))
                seconds = max(answer["seconds"] for answer in answers)
                turns[name].append((seconds, sent / steps))
        reference = turns.get("ddp", [])
        medians = {}
        for name, measured in turns.items():
            # Within a round, because machines are faster in one minute than in the next.
            pairs = zip(measured, reference, strict=False)
            ratios = [seconds / ddp for (seconds, _), (ddp, _) in pairs]
            if measured:
                medians[name] = {
                    "seconds": statistics.median(seconds for seconds, _ in measured),
                    "bytes": statistics.median(sent for _, sent in measured),
                    "of_ddp": statistics.median(ratios) if ratios else None,
                }
        return medians


def _table(rate: str, medians: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (
            BY_NAME[name].title,
            f"{row['seconds'] * 1e3:,.0f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['of_ddp']:.2f}" if row["of_ddp"] else "",
        )
        for name, row in sorted(medians.items(), key=lambda item: item[1]["seconds"])
    ]
    header = ("engine", "ms/step", "MB/step of a node", "of DDP's time")
    return f"\nlink: {rate}; one rank per node; medians\n{aligned(header, rows)}"


if __name__ == "__main__":
    sys.exit(main())
