"""A machine with GPUs, and launches that do what their rows say.

One process without torch stands for the ranks.
"""

from __future__ import annotations

import sys
from typing import Any

from plait.validation.rows import Row

GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 80 * 2**30,
    "compute_capability": "9.0",
    "multiprocessors": 132,
}
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
    "installed": {"transformers": True, "deepspeed": False, "liger_kernel": False},
    "variables": {},
}
SCRIPT = """
import json, os, sys, time
folder = sys.argv[1]
rows = json.load(open(folder + "/rows.json"))["rows"]
def write(**event):
    with open(folder + "/events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\\n")
position = 0
while True:
    turns = open(folder + "/turns.txt").read().split("\\n")[:-1]
    if position == len(turns):
        time.sleep(0.01)
        continue
    if turns[position] == "end":
        break
    row = rows[int(turns[position])]
    position += 1
    action = row["settings"].get("action", "pass")
    if action == "never":
        time.sleep(100)
    write(event="began", row=row["name"])
    write(event="progress", row=row["name"], numbers={"rounds": 1})
    if action == "raise":
        print("[rank0]:[W1123 03:08:48.709 ProcessGroupGloo.cpp:7] Warning: none", flush=True)
        raise ValueError("a tensor was wrong")
    if action == "hang":
        time.sleep(100)
    if action == "die":
        os.kill(os.getpid(), 9)
    if action == "leave":
        sys.exit(0)
    outcomes = {"fail": ("failed", "too large"), "refuse": ("not run", "no links")}
    outcome, reason = outcomes.get(action, ("passed", ""))
    numbers = {"ratio": 1.0, "error": float("nan"), "process": os.getpid()}
    write(event="ended", row=row["name"], outcome=outcome, reason=reason, numbers=numbers)
"""


def command(ranks, folder):
    """Return the command that stands for `plait launch`."""
    return [sys.executable, "-c", SCRIPT, str(folder)]


def row(name, action="pass", *, planned=1.0, ranks=1, own_process=False, least_limit=60.0):
    """Return a row whose process takes this action."""
    return Row(
        name,
        f"what {name} shows",
        "none:none",
        ranks,
        planned,
        {"action": action},
        own_process,
        least_limit_seconds=least_limit,
    )


def unavailable_row(name, reason):
    return Row(name, f"what {name} shows", "none:none", 1, 1.0, {}, unavailable=reason)
