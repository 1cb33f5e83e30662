"""NCCL's version, and its environment variables for the algorithm and protocol of collectives.

NCCL reads them when it creates a communicator, so set them before the launch.

The algorithm that NCCL selects for a call is not predicted here. NCCL's tuning model has constants
of the release, the architecture and the transport, a tuner plugin may replace it, and its authors
say that there is no easy rule (NVIDIA/nccl issue 754). NCCL logs the selection for every call with
NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = {
    "NCCL_ALGO": "algorithms that NCCL may use, such as Ring or ^Tree",
    "NCCL_PROTO": "protocols that NCCL may use: LL, LL128, Simple",
    "NCCL_NVLS_ENABLE": "whether NVLink switches may reduce",
    "NCCL_TUNER_PLUGIN": "a plugin that selects algorithm and protocol instead of NCCL",
    "NCCL_DEBUG": "INFO: NCCL logs what it does",
    "NCCL_DEBUG_SUBSYS": "TUNING: NCCL logs the algorithm and protocol of every call",
}


def version() -> tuple[int, ...] | None:
    """Return the version of NCCL in this torch, or None if torch has no NCCL."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return tuple(torch.cuda.nccl.version())


def report(environment: Mapping[str, str], *, version: tuple[int, ...] | None) -> list[str]:
    """Return lines about the version and the variables of NCCL, for the user.

    Args:
        environment: Environment variables.
        version: Result of the function `version`.
    """
    if version:
        lines = [f"NCCL {'.'.join(map(str, version))}"]
    else:
        lines = ["this torch has no NCCL, and nothing below is read"]
    for name, meaning in VARIABLES.items():
        lines.append(f"{name:<18} {environment.get(name, 'not set'):<16} {meaning}")
    return [
        *lines,
        "",
        (
            "Which algorithm NCCL selects for a call cannot be predicted (see"
            " docs/explanation/communication.md). NCCL logs it with:"
        ),
        "  NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING plait train FILE",
    ]
