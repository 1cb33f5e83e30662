"""One process of a cell: python -m tools.pains.worker LIBRARY NUMBER FOLDER SAVED. Rank 0 writes FOLDER/found.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tools.pains.scenarios import run_cell


def main(library: str, number: str, folder: str, saved: str) -> None:
    """The largest number of all ranks counts."""
    found = run_cell(library, int(number), Path(folder), Path(saved))
    rank = os.environ["RANK"]
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
