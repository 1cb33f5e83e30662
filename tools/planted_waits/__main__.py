"""Take every wait for a device out, one at a time, and report which test of `tests/simulated_device` notices.

python -m tools.planted_waits                  all of them; writes waits.md and waits.json in docs/development
python -m tools.planted_waits --only buffers   those whose place contains this
python -m tools.planted_waits --missed         those that nothing noticed, and those that have not run
python -m tools.planted_waits --list           what would be taken out, and what is left out for what reason
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict

from benchmarks.common.machine import today
from tools.planted_waits.page import page
from tools.planted_waits.places import ROOT, waits
from tools.planted_waits.session import Found, run

PAGE, NUMBERS = (
    ROOT / "docs" / "development" / "waits.md",
    ROOT / "docs" / "development" / "waits.json",
)


def main() -> None:
    """See the module."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the place")
    parser.add_argument("--missed", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("SIMULATED_DEVICE_TIMEOUT", "20")
    recorded = json.loads(NUMBERS.read_text())["waits"] if NUMBERS.exists() else []
    results = {entry["place"]: Found(**entry) for entry in recorded}
    every = waits()
    chosen = [wait for wait in every if given.only in wait.place]
    if given.list:
        for wait in chosen:
            print(
                f"{wait.file}:{wait.line}: {wait.code}"
                + (f"   (left out: {wait.reason})" if wait.reason else "")
            )
        return

    def found(one: Found) -> None:
        results[one.place] = one
        print(
            f"{one.place}: {one.noticed or 'NOT NOTICED'}, reached by {one.reached}   {one.told}",
            flush=True,
        )
        here = {wait.place for wait in every}
        kept = [asdict(each) for place, each in sorted(results.items()) if place in here]
        NUMBERS.write_text(json.dumps({"date": today(), "waits": kept}, indent=1) + "\n")
        PAGE.write_text(page(results, today()))

    due = [
        wait
        for wait in chosen
        if not wait.reason
        and not (given.missed and wait.place in results and results[wait.place].noticed)
    ]
    run(due, found)


if __name__ == "__main__":
    main()
