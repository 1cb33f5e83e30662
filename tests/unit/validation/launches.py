"""A machine, and launches that do what their rows say, without torch: a process in place of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from plait.validation.rows import Row

GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "compute_capability": "9.0", "multiprocessors": 132}
FACTS: dict[str, Any] = {
    "plait": {"version": "0.1.0", "from": "a wheel", "revision": None, "changed": None},
    "versions": {"torch": "2.13.0+cu130", "plait": "0.1.0"},
    "built_for": "CUDA 13.0",
    "communication": {"nccl": "2.28.9"},
    "machine": {"processor": "a processor", "cores": 16},
    "accelerator": "cuda",
    "devices": [GPU, GPU],
    "driver": "580.95.05",
    "links_of_devices": [],
    "simulated": False,
    "installed": {"transformers": True, "deepspeed": False},
    "variables": {},
}

SCRIPT = """
import json, os, sys, time
folder = sys.argv[1]
rows = json.load(open(folder + "/rows.json"))["rows"]
def write(**event):
    with open(folder + "/events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\\n")
for row in rows:
    does = row["settings"].get("does", "pass")
    if does == "never":
        time.sleep(100)
    write(event="began", row=row["name"])
    if does == "raise":
        print("[rank0]:[W1123 03:08:48.709 ProcessGroupGloo.cpp:749] Warning: of no interest", flush=True)
        raise ValueError("a tensor was wrong")
    if does == "hang":
        time.sleep(100)
    if does == "die":
        os.kill(os.getpid(), 9)
    if does == "leave":
        sys.exit(0)
    outcome, reason = {"fail": ("failed", "too large"), "refuse": ("not run", "no links")}.get(does, ("passed", ""))
    write(event="ended", row=row["name"], outcome=outcome, reason=reason, numbers={"ratio": 1.0, "error": float("nan")})
"""


def command(ranks: int, folder: Path) -> list[str]:
    """In place of `plait launch`."""
    return [sys.executable, "-c", SCRIPT, str(folder)]


def row(name: str, does: str = "pass", *, seconds: float = 20.0, ranks: int = 1, apart: bool = False, without: str = "") -> Row:
    """A row that does so."""
    return Row(name, f"what {name} shows", "none:none", ranks, seconds, {"does": does}, apart, without)
