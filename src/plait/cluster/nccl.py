"""NCCL's own variables for the algorithm and protocol of a collective, and their documentation. It reads them when a communicator is made,
so they are set before the process group.

Which algorithm NCCL takes for a call is not predicted here: its tuning model has constants of the release, the architecture and the
transport, a tuner plugin may replace it, and its authors say that there is no easy rule (NVIDIA/nccl issue 754). NCCL logs it for every
call with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Annotated

from pydantic import AfterValidator

from plait.errors import ConfigError, Problem
from plait.policy import Policy

ALGORITHMS = ("Ring", "Tree", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
VARIABLES = {
    "NCCL_ALGO": "algorithms that NCCL may use (parallel.nccl_algorithm)",
    "NCCL_PROTO": "protocols that NCCL may use (parallel.nccl_protocol)",
    "NCCL_NVLS_ENABLE": "whether NVLink switches may reduce",
    "NCCL_TUNER_PLUGIN": "a plugin that chooses in its place",
    "NCCL_DEBUG": "INFO: NCCL logs what it does",
    "NCCL_DEBUG_SUBSYS": "TUNING: NCCL logs the algorithm and protocol of every call",
}


def _among(known: tuple[str, ...]) -> AfterValidator:
    def check(value: str | None) -> str | None:
        names = {name.lower(): name for name in known}
        listed = [] if value is None else value.removeprefix("^").split(",")
        unknown = [name for name in listed if name.strip().lower() not in names]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of NCCL's {', '.join(known)}; list some with commas, or after ^ those to leave out")
        if value is None:
            return None
        return ("^" if value.startswith("^") else "") + ",".join(names[name.strip().lower()] for name in listed)

    return AfterValidator(check)


Algorithms = Annotated[str | None, _among(ALGORITHMS)]
Protocols = Annotated[str | None, _among(PROTOCOLS)]


class Nccl(Policy):
    """NCCL's setting; None leaves it to NCCL."""

    algorithm: str | None = None
    """NCCL_ALGO."""
    protocol: str | None = None
    """NCCL_PROTO."""

    def export(self, environment: MutableMapping[str, str], *, device_type: str, group_exists: bool) -> None:
        """Set the variables. Raises ConfigError where they would not be read: without NCCL, or too late."""
        for key, variable, value in (
            ("parallel.nccl_algorithm", "NCCL_ALGO", self.algorithm),
            ("parallel.nccl_protocol", "NCCL_PROTO", self.protocol),
        ):
            if value is None:
                continue
            said = environment.get(variable)
            if device_type != "cuda":
                rule, remedy = (
                    f"the processes run on the {device_type} and talk through gloo, which does not read {variable}",
                    "leave it out",
                )
            elif group_exists:
                rule = f"the process group exists, and NCCL reads {variable} when it is made"
                remedy = f"set {variable} before that, or let plait make the group"
            elif said is not None and said.lower() != value.lower():
                rule, remedy = f"the environment sets {variable}={said}", "set it in one place"
            else:
                environment[variable] = value
                continue
            raise ConfigError(Problem(key, value, rule, remedy))


def report(environment: Mapping[str, str], *, version: tuple[int, ...] | None) -> list[str]:
    """What is set, as lines for a person. `version` is that of the NCCL in this torch; None where it has none."""
    have = f"NCCL {'.'.join(map(str, version))}" if version else "this torch has no NCCL, and nothing below is read"
    lines = [have] + [f"{name:<18} {environment.get(name, 'not set'):<16} {meaning}" for name, meaning in VARIABLES.items()]
    lines += ["", "Which algorithm NCCL selects for a call cannot be predicted (see docs/communication.md). NCCL logs it with:"]
    return [*lines, "  NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING plait train FILE"]
