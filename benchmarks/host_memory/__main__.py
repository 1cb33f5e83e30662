"""What the two settings of host memory are worth on a CPU: huge pages for weights, and freed memory that stays with the process.

    python -m benchmarks.host_memory     a minute; writes benchmarks/results/host_memory.json

Times are the process's own (user and system), so that other programs disturb them little. A setting that saves less than 2 % goes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import facts
from plait.cluster import host_memory

RESULT = Path(__file__).parents[1] / "results" / "host_memory.json"
WORTH = 0.02
ROUNDS = 60


def products() -> dict[str, float]:
    """One token's products with 24 matrices of 16 MiB, in memory of both kinds in turn: seconds, and the median of the ratios."""
    torch.set_num_threads(1)
    plain = [torch.empty(2048, 2048).normal_() for _ in range(24)]
    huge = [
        host_memory.empty_on_huge_pages((2048, 2048), torch.float32).copy_(weight)
        for weight in plain
    ]
    token = torch.randn(1, 2048)

    def seconds(weights: list[torch.Tensor]) -> float:
        began = time.process_time()
        for weight in weights:
            torch.nn.functional.linear(token, weight)
        return time.process_time() - began

    pairs = [(seconds(plain), seconds(huge)) for _ in range(ROUNDS)][3:]
    return {
        "plain_seconds": median(before for before, _ in pairs),
        "huge_seconds": median(after for _, after in pairs),
        "saved": 1 - 1 / median(before / after for before, after in pairs),
    }


def steps(keeps_freed: bool) -> dict[str, float]:
    """Training steps at ZeRO 2 on two ranks: seconds of a process, those of the kernel, and page faults per step."""
    # Plait leaves the allocator alone where the environment sets it; this value is glibc's default.
    environment = {**os.environ, **({} if keeps_freed else {"MALLOC_TOP_PAD_": "131072"})}
    command = [
        sys.executable,
        "-m",
        "plait",
        "launch",
        "--nproc-per-node",
        "2",
        "-m",
        "benchmarks.host_memory.steps",
    ]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    line = next(line for line in shown.splitlines() if "system_seconds" in line)
    found: dict[str, float] = json.loads(line[line.index("{") :])
    return found


def main() -> int:
    returned, kept = steps(keeps_freed=False), steps(keeps_freed=True)
    found: dict[str, Any] = {
        "machine": facts("torch", "transformers"),
        "huge_pages": products(),
        "freed_memory": {
            "returned": returned,
            "kept": kept,
            "saved": 1 - kept["seconds"] / returned["seconds"],
        },
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in ("huge_pages", "freed_memory"):
        saved = found[name]["saved"]
        print(
            f"{name}: {saved:.1%} of the time saved, {'worth it' if saved >= WORTH else 'less than 2 %'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
