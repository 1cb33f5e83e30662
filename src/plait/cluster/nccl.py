"""NCCL's environment variables for the algorithm and the protocol of collectives.

NCCL reads them when it creates a communicator, so they are set before the process group exists.

The algorithm that NCCL selects for a call is not predicted here. NCCL's tuning model has constants
of the release, the architecture and the transport, a tuner plugin may replace it, and its authors
say that there is no easy rule (NVIDIA/nccl issue 754). NCCL logs the selection for every call with
NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Annotated

from pydantic import AfterValidator

from plait.errors import ConfigError, Problem
from plait.policy import Policy

ALGORITHMS = ("Ring", "Tree", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
FIELDS = ("parallel.nccl_algorithm", "parallel.nccl_protocol")
"""Keys of the configuration."""
NOT_READ = "parallel.nccl_*: not used; on the CPU there is no NCCL"
VARIABLES = {
    "NCCL_ALGO": f"algorithms that NCCL may use ({FIELDS[0]})",
    "NCCL_PROTO": f"protocols that NCCL may use ({FIELDS[1]})",
    "NCCL_NVLS_ENABLE": "whether NVLink switches may reduce",
    "NCCL_TUNER_PLUGIN": "a plugin that selects algorithm and protocol instead of NCCL",
    "NCCL_DEBUG": "INFO: NCCL logs what it does",
    "NCCL_DEBUG_SUBSYS": "TUNING: NCCL logs the algorithm and protocol of every call",
}


def _among(known: tuple[str, ...]) -> AfterValidator:
    """Return a validator of lists of known names, which also corrects their case."""
    known_by_lower_case = {name.lower(): name for name in known}

    def check(value: str | None) -> str | None:
        if value is None:
            return None
        # A list after `^` has the names that NCCL must not use.
        prefix = "^" if value.startswith("^") else ""
        names = []
        for name in value.removeprefix("^").split(","):
            known_name = known_by_lower_case.get(name.strip().lower())
            if known_name is None:
                raise ValueError(
                    f"{name!r} is none of NCCL's {', '.join(known)}; list some with commas, or"
                    " after ^ those to leave out"
                )
            names.append(known_name)
        return prefix + ",".join(names)

    return AfterValidator(check)


Algorithms = Annotated[str | None, _among(ALGORITHMS)]
Protocols = Annotated[str | None, _among(PROTOCOLS)]


class Library(Policy):
    """Settings of NCCL. None lets NCCL decide."""

    algorithm: str | None = None
    """Value of NCCL_ALGO."""
    protocol: str | None = None
    """Value of NCCL_PROTO."""

    def export(
        self, environment: MutableMapping[str, str], *, device_type: str, group_exists: bool
    ) -> None:
        """Set the environment variables.

        Args:
            environment: Environment of this process.
            device_type: Device type of the processes.
            group_exists: Whether the process group exists already.

        Raises:
            ConfigError: A setting would have no effect, or the environment has another value.
        """
        for key, variable, value in (
            (FIELDS[0], "NCCL_ALGO", self.algorithm),
            (FIELDS[1], "NCCL_PROTO", self.protocol),
        ):
            if value is None:
                continue
            current = environment.get(variable)
            if device_type == "cpu":
                rule = (
                    f"the processes run on the {device_type} and communicate through gloo, which"
                    f" does not read {variable}"
                )
                remedy = "leave it out"
            elif group_exists:
                rule = f"the process group exists, and NCCL reads {variable} when it is made"
                remedy = f"set {variable} before that, or let plait make the group"
            elif current is not None and current.lower() != value.lower():
                rule = f"the environment sets {variable}={current}"
                remedy = "set it in one place"
            else:
                environment[variable] = value
                continue
            raise ConfigError(Problem(key, value, rule, remedy))

    def explained(self) -> dict[str, str]:
        """Return the settings by their keys in the configuration, for the user."""
        values = (self.algorithm, self.protocol)
        return {key: value or "NCCL decides" for key, value in zip(FIELDS, values, strict=True)}


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
