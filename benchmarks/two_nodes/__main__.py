"""Optimizer step over a slow link, with and without compression of gradients.

python -m benchmarks.two_nodes [--quick] [--rates 100mbit] [--baselines ddp plait-0]

For every rate of the link, rounds in which every engine has a turn of a few steps. It prints
seconds per step, bytes per step that the kernel counted, and ratios to DDP. Exit code 1 if an
engine failed, 2 if the network namespaces cannot be made.
"""

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import sub
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
    parser = command("two_nodes", __doc__)
    names = list(BY_NAME)
    parser.add_argument("--baselines", nargs="+", choices=names, default=USUAL, metavar="NAME")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn (default: 2)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = options.steps = 1
    try:
        with lab() as two_nodes, tempfile.TemporaryDirectory(prefix="two_nodes_") as logs:
            engines = _Engines(two_nodes, Path(logs))
            try:
                content = engines.measure(options)
            finally:
                stop_groups(engines.groups)
    except NoLab as error:
        say(f"two_nodes: {error}")
        return 2
    if not options.quick and content["rates"]:
        write(RESULTS / "two_nodes.json", content)
    return int(bool(content["failures"]) or not content["rates"])


class _Engines:
    """Workers of all engines, and what failed."""

    def __init__(self, two_nodes: Lab, logs: Path) -> None:
        self.groups: dict[str, WorkerGroup] = {}
        self._lab = two_nodes
        self._logs = logs
        self._failures: dict[str, str] = {}

    def measure(self, options: Any) -> dict[str, Any]:
        """Measure every rate and print the tables. Returns the content of the result."""
        baselines = [BY_NAME[name] for name in options.baselines]
        skipped = unavailable(baselines)
        rates: dict[str, Any] = {}
        decisions: dict[str, dict[str, str]] = {}
        for rate in options.rates:
            for baseline in baselines:
                if baseline.name not in skipped and baseline.name not in self._failures:
                    self._start(baseline, RATES[rate])
            if not self.groups:
                break
            decisions[rate] = {}
            for name in ADAPTIVE:
                if name in self.groups:
                    decisions[rate][name] = self._decision(name)
            self._lab.shape(RATES[rate])
            rates[rate] = self._medians(options.rounds, options.steps)
            print(_table(rate, rates[rate]), flush=True)
            for name, text in decisions[rate].items():
                print(f"{name}: {text}", flush=True)
        parameters = Workload(**SIZES).parameters
        content = {"machine": facts(*PACKAGES), "parameters": parameters, "rounds": options.rounds}
        return content | {"rates": rates, "said": decisions, "failures": self._failures}

    def _start(self, baseline: Baseline, rate: str | None) -> None:
        """Start and warm up a baseline that does not run yet, at full rate if it does not adapt."""
        name = baseline.name
        if name in ADAPTIVE and name in self.groups:
            self.groups.pop(name).stop()
        if name in self.groups:
            return
        self._lab.shape(rate if name in ADAPTIVE else None)
        workload = Workload(**SIZES, ranks_per_slice=2 if "tp" in baseline.options else 1)
        self.groups[name] = WorkerGroup(
            name,
            ranks=2,
            start=start,
            argument=(baseline, workload, self._lab.nodes),
            logs=self._logs,
            environment={**deepspeed_peer.ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        )
        try:
            self.groups[name].ready(timeout_seconds=START_SECONDS)
            self._turn(name, WARM_STEPS)
            say(f"{name} is ready")
        except WorkerGroupError as error:
            self._fail(name, error)

    def _turn(self, name: str, steps: int) -> list[Any]:
        message = ("turn", {"warm": 0, "steps": steps})
        return self.groups[name].ask(message, timeout_seconds=600)

    def _fail(self, name: str, error: WorkerGroupError) -> None:
        self._failures[name] = str(error)
        stop_groups({name: self.groups.pop(name)})
        say(f"{name} failed: {error}")

    def _decision(self, name: str) -> str:
        """Return what the first rank printed about its communication."""
        lines = self.groups[name].logs[0].read_text(errors="replace").splitlines()
        return " ".join(line for line in lines if line.startswith("gradients "))

    def _medians(self, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
        """Return the medians of each baseline: seconds and bytes per step, and ratio to DDP.

        Seconds are those of the slowest rank, and bytes those of the node that sent more.
        """
        names = list(self.groups)
        turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name in self._failures:
                    continue
                try:
                    self._turn(name, 1)
                    before = self._lab.sent_bytes()
                    answers = self._turn(name, steps)
                except WorkerGroupError as error:
                    self._fail(name, error)
                    continue
                after = self._lab.sent_bytes()
                sent = max(map(sub, after, before))
                turns[name].append((max(answer["seconds"] for answer in answers), sent / steps))
        medians = {}
        for name, measured in turns.items():
            # Within a round, because machines are faster in one minute than in the next.
            pairs = zip(measured, turns.get("ddp", []), strict=False)
            ratios = [seconds / ddp for (seconds, _), (ddp, _) in pairs]
            of_ddp = None
            if ratios:
                of_ddp = statistics.median(ratios)
            seconds, sent = map(statistics.median, zip(*measured, strict=True))
            medians[name] = {"seconds": seconds, "bytes": sent, "of_ddp": of_ddp}
        return medians


def _table(rate: str, medians: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, row in sorted(medians.items(), key=lambda item: item[1]["seconds"]):
        ratio = f"{row['of_ddp']:.2f}" if row["of_ddp"] else ""
        cells = [f"{row['seconds'] * 1e3:,.0f}", f"{row['bytes'] / 1e6:.2f}", ratio]
        rows.append([BY_NAME[name].title, *cells])
    header = ("engine", "ms/step", "MB/step of a node", "of DDP's time")
    return f"\nlink: {rate}; one rank per node; medians\n{aligned(header, rows)}"


if __name__ == "__main__":
    sys.exit(main())
