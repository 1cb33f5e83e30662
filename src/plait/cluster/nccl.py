"""NCCL's own variables for the algorithm and protocol of a collective, and their documentation. It
reads them when a communicator is made, so they are set before the process group.

Which algorithm NCCL takes for a call is not predicted here: its tuning model has constants of the
release, the architecture and the transport, a tuner plugin may replace it, and its authors say that
there is no easy rule (NVIDIA/nccl issue 754). NCCL logs it for every call with NCCL_DEBUG=INFO
NCCL_DEBUG_SUBSYS=TUNING.
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
"""Of a configuration file."""
NOT_READ = "parallel.nccl_*: not used; on the CPU there is no NCCL"
VARIABLES = {
    "NCCL_ALGO": f"algorithms that NCCL may use ({FIELDS[0]})",
    "NCCL_PROTO": f"protocols that NCCL may use ({FIELDS[1]})",
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
            raise ValueError(
                f"{unknown[0]!r} is none of NCCL's {', '.join(known)}; list some with commas, or"
                " after ^ those to leave out"
            )
        if value is None:
            return None
        return ("^" if value.startswith("^") else "") + ",".join(
            names[name.strip().lower()] for name in listed
        )

    return AfterValidator(check)


Algorithms = Annotated[str | None, _among(ALGORITHMS)]
Protocols = Annotated[str | None, _among(PROTOCOLS)]


class Library(Policy):
    """Settings of the accelerator's library of collectives; None leaves it to NCCL."""

    algorithm: str | None = None
    """NCCL_ALGO."""
    protocol: str | None = None
    """NCCL_PROTO."""

    def export(
        self, environment: MutableMapping[str, str], *, device_type: str, group_exists: bool
    ) -> None:
        """Set the variables. Raises ConfigError where they would not be read: without NCCL, or too
        late.
        """
        for key, variable, value in (
            (FIELDS[0], "NCCL_ALGO", self.algorithm),
            (FIELDS[1], "NCCL_PROTO", self.protocol),
        ):
            if value is None:
                continue
            said = environment.get(variable)
            if device_type == "cpu":
                rule = (
                    f"the processes run on the {device_type} and talk through gloo, which does"
                    f" not read {variable}"
                )
                remedy = "leave it out"
            elif group_exists:
                rule = f"the process group exists, and NCCL reads {variable} when it is made"
                remedy = f"set {variable} before that, or let plait make the group"
            elif said is not None and said.lower() != value.lower():
                rule = f"the environment sets {variable}={said}"
                remedy = "set it in one place"
            else:
                environment[variable] = value
                continue
            raise ConfigError(Problem(key, value, rule, remedy))

    def explained(self) -> dict[str, str]:
        """Its fields, as a file names them."""
        return {
            key: value or "NCCL decides"
            for key, value in zip(FIELDS, (self.algorithm, self.protocol), strict=True)
        }


def version() -> tuple[int, ...] | None:
    """Of the NCCL in this torch."""
    import torch

    return tuple(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else None


def report(environment: Mapping[str, str], *, version: tuple[int, ...] | None) -> list[str]:
    """What is set, as lines for a person. `version` is that of the NCCL in this torch; None where
    it has none.
    """
    have = (
        f"NCCL {'.'.join(map(str, version))}"
        if version
        else "this torch has no NCCL, and nothing below is read"
    )
    lines = [have] + [
        f"{name:<18} {environment.get(name, 'not set'):<16} {meaning}"
        for name, meaning in VARIABLES.items()
    ]
    lines += [
        "",
        (
            "Which algorithm NCCL selects for a call cannot be predicted (see"
            " docs/communication.md). NCCL logs it with:"
        ),
    ]
    return [*lines, "  NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING plait train FILE"]
