"""Shows that checkpoints beside the training hold the state of their call: a thousand saves, and planted defects that a few saves notice.

    python -m tools.stale_saves               both; writes benchmarks/results/stale_saves.json (an hour on two busy cores)
    python -m tools.stale_saves --saves       the thousand saves only
    python -m tools.stale_saves --defects     the defects of tools/mutants/defects/stale.yaml only, or those of them that are named after it

The saves are those of `tests/parity/test_stale_saves.py`: every ZeRO stage, updates in the backward, fused, compression, states in files
and in shared memory, tp and pp. A defect counts as noticed when the saves that `make test` takes fail with it, and they pass without.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

from tools.mutants.catalogue import ROOT, load
from tools.mutants.runner import Copy, run_mutant

RESULT = ROOT / "benchmarks" / "results" / "stale_saves.json"
BUILD = ROOT / "build" / "stale_saves"
TESTS = ["tests/parity/test_stale_saves.py"]
SAVES = 90
"""Of each kind."""


def thousand() -> dict[str, int]:
    """Kind to how many saves of it held the state of their call; raises where one does not."""
    from tests.parity.saved_states import KINDS, saves
    from tests.pool import Pool

    found, pool = {}, Pool()
    try:
        for kind, (ranks, _) in KINDS.items():
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                counts = pool.run(ranks, saves, kind, folder, SAVES, timeout=1800)
            found[kind] = counts[0]
            print(f"{kind}: {counts[0]} saves, {time.perf_counter() - began:.0f} s", flush=True)
    finally:
        pool.close()
    return found


def defects(only: list[str]) -> dict[str, str]:
    """Defect to the test that noticed it; empty where none did. `only`: of these names; all where it is empty."""
    BUILD.mkdir(parents=True, exist_ok=True)
    copy = Copy(BUILD / "copy")
    copy.make()
    code, output = copy.pytest(*TESTS, limit=900, log=BUILD / "without.log")
    if code != 0:
        raise SystemExit(f"the tests fail without a defect:\n{output[-3000:]}")
    found = {}
    for mutant in load():
        if mutant.author == "stale" and (not only or mutant.id in only):
            result = run_mutant(mutant, copy, TESTS, limit=900, log=BUILD / f"{mutant.id}.log")
            found[mutant.id] = result.caught_by
            print(
                f"{mutant.id}: {result.caught_by or 'NOT NOTICED'} ({result.seconds:.0f} s)",
                flush=True,
            )
    return found


def main(arguments: list[str]) -> int:
    """Exit code 1 where a defect was not noticed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "--defects" not in arguments:
        saved = thousand()
        known |= {"saves": sum(saved.values()), "stale": 0, "by_kind": saved}
    if "--saves" not in arguments:
        noticed = known.get("noticed_by", {}) | defects(
            [name for name in arguments if not name.startswith("--")]
        )
        known |= {
            "defects": len(noticed),
            "noticed": sum(map(bool, noticed.values())),
            "noticed_by": noticed,
        }
    RESULT.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps({name: value for name, value in known.items() if not isinstance(value, dict)}))
    return 0 if known.get("noticed") == known.get("defects") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
