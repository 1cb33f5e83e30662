"""Options of torchrun in environment variables, such as `PET_NNODES` for `--nnodes`.

Kubeflow sets them in every pod. Options on the command line take precedence, as in torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem

_WHOLE = ("node_rank", "master_port", "max_restarts")
_BY_ENDPOINT = ("rdzv_endpoint", "rdzv_id", "rdzv_backend")
_BY_ADDRESS = (
    "node_rank",
    "master_addr",
    "master_port",
)


def with_variables(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return options of a launch, completed from the variables that torchrun reads.

    Args:
        options: Values by torchrun's names, with underscores. None stands for an option that was
            not given.
        environment: The environment's variables.

    Returns:
        All of `options`. Machines meet either at an endpoint or at a master address. If the command
        line has one of the two, variables of the other are ignored. If only variables have them,
        the endpoint takes precedence, as in torchrun.

    Raises:
        ConfigError: A variable is not the number that it has to be.
    """
    variables = {
        name: environment[_variable(name)] for name in options if environment.get(_variable(name))
    }
    by_address = any(options.get(name) is not None for name in _BY_ADDRESS)
    by_endpoint = options.get("rdzv_endpoint") is not None or (
        not by_address and "rdzv_endpoint" in variables
    )
    ignored: tuple[str, ...] = ()
    if by_endpoint:
        ignored = _BY_ADDRESS
    elif by_address:
        ignored = _BY_ENDPOINT
    for name in ignored:
        variables.pop(name, None)
    return {
        name: _value(name, variables.get(name)) if given is None else given
        for name, given in options.items()
    }


def names_machines(environment: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE count machines: Kubeflow sets them for each pod, beside
    `PET_NNODES`.
    """
    return _variable("nnodes") in environment and "LOCAL_RANK" not in environment


def _variable(name: str) -> str:
    return f"PET_{name.upper()}"


def _value(name: str, text: str | None) -> Any:
    if text is None or name not in _WHOLE:
        return text
    if not text.strip().isdecimal():
        raise ConfigError(
            Problem(
                _variable(name), text, "not a whole number of at least 0", "correct it, or unset it"
            )
        )
    return int(text)
