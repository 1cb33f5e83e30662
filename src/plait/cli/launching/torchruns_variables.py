"""Options of torchrun in environment variables, such as `PET_NNODES` for `--nnodes`.

Kubeflow sets them in every pod. Options on the command line take precedence, as in torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem

_INTEGERS = ("node_rank", "master_port", "max_restarts")
_ENDPOINT_OPTIONS = ("rdzv_endpoint", "rdzv_id", "rdzv_backend")
_ADDRESS_OPTIONS = ("node_rank", "master_addr", "master_port")


def with_variables(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return options of a launch, completed from the variables that torchrun reads.

    Args:
        options: Values by torchrun's names, with underscores. None stands for an option that is not
            used.
        environment: Variables of the environment.

    Returns:
        All of `options`. Machines meet either at an endpoint or at a master address. If the command
        line has one of the two, variables of the other are ignored. If only variables have them,
        the endpoint takes precedence, as in torchrun.

    Raises:
        ConfigError: A variable must be a number and is not.
    """
    variables = {
        name: environment[_variable(name)] for name in options if environment.get(_variable(name))
    }
    has_address = any(options.get(name) is not None for name in _ADDRESS_OPTIONS)
    has_endpoint = options.get("rdzv_endpoint") is not None or (
        not has_address and "rdzv_endpoint" in variables
    )
    ignored: tuple[str, ...] = ()
    if has_endpoint:
        ignored = _ADDRESS_OPTIONS
    elif has_address:
        ignored = _ENDPOINT_OPTIONS
    for name in ignored:
        variables.pop(name, None)

    completed = dict(options)
    for name, text in variables.items():
        if completed[name] is None:
            completed[name] = _parse(name, text)
    return completed


def names_machines(environment: Mapping[str, str]) -> bool:
    """Return True if RANK and WORLD_SIZE count machines.

    Kubeflow sets them for each pod, in addition to `PET_NNODES`.
    """
    return _variable("nnodes") in environment and "LOCAL_RANK" not in environment


def _variable(name: str) -> str:
    return f"PET_{name.upper()}"


def _parse(name: str, text: str) -> Any:
    if name not in _INTEGERS:
        return text
    if not text.strip().isdecimal():
        raise ConfigError(
            Problem(
                _variable(name), text, "not a whole number of at least 0", "correct it, or unset it"
            )
        )
    return int(text)
