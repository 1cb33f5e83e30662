"""Facts about this machine and its Python installation, for the user and for issue reports."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.launchers import claim
from plait.cluster.topology import cpu_count, device_count, processor_name
from plait.errors import ConfigError
from plait.version import __version__

# Packages, variables and prefixes of variables that affect a run.
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "torchao",
    "safetensors",
    "pydantic",
)
VARIABLES = (
    accelerator.VISIBLE_DEVICES_VARIABLE,
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PLAIT_CACHE",
    "PYTORCH_ALLOC_CONF",
)
PREFIXES = (*accelerator.PREFIXES, "GLOO_", "PLAIT_")


def facts(environment: Mapping[str, str], *, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the facts by section and name as JSON values, without changing or measuring anything.

    Args:
        environment: Environment variables.
        folder: Folder whose free space is reported.
    """
    variables = {}
    for name, value in sorted(environment.items()):
        if name in VARIABLES or name.startswith(PREFIXES):
            variables[name] = value
    return {
        "versions": {"python": platform.python_version(), "plait": __version__, **_installed()},
        "machine": _machine(folder),
        "gpus": _gpus(),
        "communication": _communication(),
        "launcher": _launcher(environment),
        "variables": variables,
    }


def _installed() -> dict[str, str]:
    """Return the versions of the installed packages among PACKAGES."""
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _machine(folder: Path) -> dict[str, Any]:
    memory_bytes = None
    if hasattr(os, "sysconf"):
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "interpreter": sys.executable,
        "processor": processor_name(),
        "cores": cpu_count(),
        "memory_bytes": memory_bytes,
        "free_bytes_here": shutil.disk_usage(folder).free,
    }


def _gpus() -> dict[str, Any]:
    gpus: dict[str, Any] = {"count": device_count(), "built_for": accelerator.built_for()}
    for index in range(device_count()):
        gpus[f"gpu {index}"] = accelerator.describe(index)
    return gpus


def _communication() -> dict[str, Any]:
    if not dist.is_available():
        return {"torch.distributed": "not in this torch"}
    version_numbers = accelerator.library_version()
    return {
        "gloo": dist.is_gloo_available(),
        accelerator.BACKEND: ".".join(map(str, version_numbers)) if version_numbers else False,
    }


def _launcher(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        claimed = claim(environment)
    except ConfigError as error:
        # A report about a broken environment is most useful if it shows what is broken.
        return {"name": None, "problem": str(error)}
    if claimed is None:
        return {"name": None}
    return {"name": claimed.launcher, "rank": claimed.rank, "world_size": claimed.world_size}
