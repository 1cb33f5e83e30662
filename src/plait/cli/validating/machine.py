"""Prints what a validation has to know of this machine as one JSON object: `python -m
plait.cli.validating.machine`.

In a process of its own, because a driver may hang or end whoever asks it, and because the command
itself keeps off the devices.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.cluster import accelerator
from plait.cluster.environment import facts
from plait.cluster.topology import device_count
from plait.validation.catalogue import PACKAGES_OF_PEERS
from plait.validation.context import SIMULATED

_OTHERS = ("OMP_NUM_THREADS", "GLOO_")
"""Beginnings of variables that change how the checks run besides those of the accelerator; others
stay out of what is sent in.
"""
_LEFT_OUT = ("interpreter", "free_bytes_here")
_SECONDS = 20


def main() -> None:
    """To standard output."""
    print(json.dumps(found()))


def found() -> dict[str, Any]:
    """Facts of the machine, its devices and the installed packages."""
    import torch

    known = facts(os.environ, folder=Path.cwd())
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = device_count()
    names = [accelerator.model_name(index) for index in range(count)]
    devices = [
        {"name": name, "memory_bytes": accelerator.capacity_bytes(index)}
        for index, name in enumerate(names)
    ]
    return {
        "plait": {"version": known["versions"].get("plait"), **_revision()},
        "versions": known["versions"],
        "built_for": known["gpus"]["built_for"],
        "communication": known["communication"],
        "machine": {
            name: value for name, value in known["machine"].items() if name not in _LEFT_OUT
        },
        "accelerator": kind.type if kind is not None else None,
        "devices": devices,
        "described": [known["gpus"][f"gpu {index}"] for index in range(count)],
        "driver": _driver(),
        "links_of_devices": _topology(),
        "simulated": any(SIMULATED in name for name in names),
        "installed": {
            name: find_spec(name) is not None for name in ("transformers", *PACKAGES_OF_PEERS)
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith((*accelerator.SETTINGS, *_OTHERS))
        },
    }


def _revision() -> dict[str, Any]:
    """Of the source that runs: a git revision where it is a working copy, else only the version
    counts.
    """
    folder = Path(__file__).resolve().parents[4]
    if not (folder / ".git").exists():
        return {"from": "a wheel", "revision": None, "changed": None}
    revision = _asked("git", "-C", str(folder), "rev-parse", "HEAD")
    return {
        "from": "a working copy",
        "revision": revision,
        "changed": bool(_asked("git", "-C", str(folder), "status", "--porcelain")),
    }


def _driver() -> str | None:
    said = _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0] if said else None


def _topology() -> list[str]:
    """How the devices of the machine are joined, as nvidia-smi draws it."""
    return [
        line.rstrip()
        for line in (_asked("nvidia-smi", "topo", "-m") or "").splitlines()
        if line.startswith(("GPU", "\t", " "))
    ]


def _asked(*command: str) -> str | None:
    """What a program says; None where there is none, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
    sys.stdout.flush()
