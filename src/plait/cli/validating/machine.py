"""Program that prints the facts of this machine for a validation as one JSON object.

It runs in a separate process (`python -m plait.cli.validating.machine`), because a driver can hang
or end a process that queries it, and because the command itself must not touch the devices.
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

_VARIABLE_PREFIXES = ("OMP_NUM_THREADS", "GLOO_")
"""Prefixes of variables that change how the checks run, besides those of the accelerator.

Other variables are private to the user and are not part of the document.
"""
_PRIVATE_FACTS = ("interpreter", "free_bytes_here")
_TIMEOUT_SECONDS = 20


def main() -> None:
    """Print the facts to standard output."""
    print(json.dumps(validation_facts()))


def validation_facts() -> dict[str, Any]:
    """Return the facts of the machine, its devices and the installed packages."""
    import torch

    environment = facts(os.environ, folder=Path.cwd())
    kind = None
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
    count = device_count()
    names = [accelerator.model_name(index) for index in range(count)]
    devices = [
        {"name": name, "memory_bytes": accelerator.capacity_bytes(index)}
        for index, name in enumerate(names)
    ]
    return {
        "plait": {"version": environment["versions"].get("plait"), **_revision()},
        "versions": environment["versions"],
        "built_for": environment["gpus"]["built_for"],
        "communication": environment["communication"],
        "machine": {
            name: value
            for name, value in environment["machine"].items()
            if name not in _PRIVATE_FACTS
        },
        "accelerator": kind.type if kind is not None else None,
        "devices": devices,
        "described": [environment["gpus"][f"gpu {index}"] for index in range(count)],
        "driver": _driver(),
        "links_of_devices": _topology(),
        "simulated": any(SIMULATED in name for name in names),
        "installed": {
            name: find_spec(name) is not None for name in ("transformers", *PACKAGES_OF_PEERS)
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith((*accelerator.SETTINGS, *_VARIABLE_PREFIXES))
        },
    }


def _revision() -> dict[str, Any]:
    """Return the git revision of a working copy. A wheel has only its version."""
    folder = Path(__file__).resolve().parents[4]
    if not (folder / ".git").exists():
        return {"from": "a wheel", "revision": None, "changed": None}
    revision = _output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    return {
        "from": "a working copy",
        "revision": revision,
        "changed": bool(_output_of("git", "-C", str(folder), "status", "--porcelain")),
    }


def _driver() -> str | None:
    output = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _topology() -> list[str]:
    """Return the table of nvidia-smi about the links between the devices."""
    lines = (_output_of("nvidia-smi", "topo", "-m") or "").splitlines()
    # The legend below the table is left out.
    return [line.rstrip() for line in lines if line.startswith(("GPU", "\t", " "))]


def _output_of(*command: str) -> str | None:
    """Return the output of a program, or None if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


if __name__ == "__main__":
    main()
    sys.stdout.flush()
