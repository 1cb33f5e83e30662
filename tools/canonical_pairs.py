"""Generate on one layout, score on another, canonical, and count log-probabilities that differ in a bit; the pairs of the proof tests.

Run: PYTHONPATH=src:. python -m tools.canonical_pairs [--requests 280]        two hours on two cores; tens of minutes with --requests 80

After every layout the counts, the revision and the time are written to benchmarks/results/canonical_pairs.json. A difference ends it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import facts
from tests.parity import cases
from tests.parity.canonical_pairs import PAIRS, check
from tests.pool import Pool
from tools.version_cover import revision

RESULT = Path(__file__).parents[1] / "benchmarks/results/canonical_pairs.json"
KINDS = ("llama, large", "gpt2, large, tied")
NEW = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=280, help="in a generation, of 60 new tokens each")
    requests = parser.parse_args().requests
    commit, rows, total = revision(), list[dict[str, Any]](), 0
    pool = Pool()
    try:
        for kind in KINDS:
            for one, others in PAIRS.items():
                tokens = check(pool, kind, torch.float32, one, others, count=requests, max_new_tokens=NEW)
                total += tokens
                scored_on = dict(others)
                rows.append({"model": kind, "generated on": one, "scored on, with batch size": scored_on, "tokens": tokens, "different": 0})
                print(f"{kind}: {one} to {', '.join(scored_on)}: {tokens:,} tokens, 0 mismatches; {total:,} in all", flush=True)
                pairs = sum(len(row["scored on, with batch size"]) for row in rows)
                found = {"commit": commit, "vocabulary": cases.VOCABULARY, "pairs": pairs, "tokens": total, "different": 0, "rows": rows}
                RESULT.write_text(json.dumps({"machine": facts("torch", "transformers"), **found}, indent=1) + "\n", encoding="utf-8")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
