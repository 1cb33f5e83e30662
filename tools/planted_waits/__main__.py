"""Take every wait for a device out, one at a time, and report which test notices.

    python -m tools.planted_waits                  all of them
    python -m tools.planted_waits --only buffers   those whose place contains this
    python -m tools.planted_waits --missed         those that nothing noticed or that have not run
    python -m tools.planted_waits --list           print the waits, and which are left out and why

The tests are those of tests/simulated_device. The command writes waits.md and waits.json in
docs/development.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter

from tools.planted.project import ROOT
from tools.planted_waits import report
from tools.planted_waits.places import waits
from tools.planted_waits.session import Outcome, run


def main() -> None:
    parser = ArgumentParser(
        prog="python -m tools.planted_waits",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="a part of the place")
    parser.add_argument("--missed", action="store_true", help="not those that a test noticed")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("SIMULATED_DEVICE_TIMEOUT", "20")
    places = waits()
    selected = [wait for wait in places if options.only in wait.place]
    if options.list:
        for wait in selected:
            reason = f"   (left out: {wait.reason})" if wait.reason else ""
            print(f"{wait.file}:{wait.line}: {wait.code}{reason}")
        return

    outcomes, _ = report.load()

    def record(outcome: Outcome) -> None:
        outcomes[outcome.place] = outcome
        by = outcome.noticed or "NOT NOTICED"
        print(f"{outcome.place}: {by}, reached by {outcome.reached}   {outcome.told}", flush=True)
        report.store(outcomes, places)

    planted = [wait for wait in selected if not wait.reason]
    if options.missed:
        noticed = {place for place, outcome in outcomes.items() if outcome.noticed}
        planted = [wait for wait in planted if wait.place not in noticed]
    run(planted, record)
    report.PAGE.write_text(report.page(places, *report.load()), encoding="utf-8")


if __name__ == "__main__":
    main()
