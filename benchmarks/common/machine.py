"""Facts about the machine and the software that a number must never be printed without."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata

import psutil

from plait.cluster.topology import processor_name


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def today() -> str:
    """Return the date in UTC, as in ISO 8601."""
    return datetime.now(UTC).date().isoformat()


def facts(*packages: str) -> dict[str, object]:
    """Processor, cores, memory in bytes, operating system, Python, the versions of `packages`, and the time (UTC, ISO 8601)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
    }
