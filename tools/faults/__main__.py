"""Plants faults in runs of `plait launch` and checks what becomes of them: how soon they are told, in which words, with which exit code,
and that nothing is left.

    python -m tools.faults [small | nightly | release] [--only WORD] [--show] [--no-write]

`small` takes two minutes on two cores: every third fault, and one slow run. `nightly` is the matrix of faults, ranks and transports, and
`release` has it several times. Writes benchmarks/results/faults.json and the table of docs/faults.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from tools.faults.kinds import KINDS
from tools.faults.runs import ROOT, Outcome, run, run_slow
from tools.faults.table import PAGE, with_table

RESULT = ROOT / "benchmarks" / "results" / "faults.json"
TRANSPORTS = ("shared-memory", "torch")
SMALL = {
    "exception": (1, "torch"),
    "exit 0": (1, "shared-memory"),
    "SIGKILL": (0, "shared-memory"),
    "SIGSTOP": (1, "torch"),
    "interpreter's lock": (0, "shared-memory"),
    "sleep": (1, "shared-memory"),
}


def outcomes(size: str, only: str) -> Iterator[Outcome]:
    """Run after run."""
    for kind in KINDS:
        if only not in kind.name:
            continue
        if size == "small":
            if kind.name in SMALL:
                rank, transport = SMALL[kind.name]
                yield run(kind, rank=rank, ranks=2, transport=transport)
            continue
        for transport in TRANSPORTS:
            for rank in range(2):
                for _ in range(5 if size == "release" else 1):
                    yield run(kind, rank=rank, ranks=2, transport=transport)
    if only in "slow but healthy":
        count, seconds = {"small": (1, 10.0), "nightly": (4, 60.0), "release": (100, 60.0)}[size]
        for seed in range(count):
            yield run_slow(ranks=4, transport=TRANSPORTS[seed % 2], seconds=seconds, seed=seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("size", nargs="?", choices=("small", "nightly", "release"), default="small")
    parser.add_argument("--only", default="", metavar="WORD", help="Only faults with this word in their name.")
    parser.add_argument("--show", action="store_true", help="Print what each run said.")
    parser.add_argument("--no-write", action="store_true", help="Leave the result and the page as they are.")
    parser.add_argument("--table", action="store_true", help="Only write the page's table from the result that is there.")
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULT.read_text())))
        return 0
    found = []
    for outcome in outcomes(options.size, options.only):
        found.append(outcome)
        told = "" if outcome.told_seconds is None else f"told after {outcome.told_seconds:.1f} s, ended {outcome.ended_seconds:.1f} s later"
        where = "" if outcome.rank < 0 else f" on rank {outcome.rank}"
        state = "passed" if not outcome.wrong else "; ".join(outcome.wrong)
        print(f"{outcome.kind}{where}, {outcome.ranks} ranks, {outcome.transport}: {told} {state}", flush=True)
        for line in outcome.told if options.show or outcome.wrong else ():
            print(f"    {line}", flush=True)
    failed = sum(bool(outcome.wrong) for outcome in found)
    print(f"{len(found) - failed} of {len(found)} passed")
    if not options.no_write:
        content = {
            "size": options.size,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "runs": [outcome.plain() for outcome in found],
        }
        RESULT.write_text(json.dumps(content, indent=1) + "\n")
        if Path(PAGE).exists():
            PAGE.write_text(with_table(PAGE.read_text(), content))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
