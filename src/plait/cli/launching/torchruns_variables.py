"""Options of torchrun in environment variables, `PET_NNODES` for `--nnodes`: Kubeflow sets them in every pod.

What the command line gives goes before them, as in torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem

_WHOLE = ("node_rank", "master_port", "max_restarts")
_BY_ENDPOINT, _BY_ADDRESS = ("rdzv_endpoint", "rdzv_id", "rdzv_backend"), ("node_rank", "master_addr", "master_port")


def with_variables(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return options of a launch, completed from the variables that torchrun reads.

    Args:
        options: Values by torchrun's names, with underscores. None was not given.
        environment: The environment's variables.

    Returns:
        All of `options`. Where machines meet is taken from one source: an endpoint on the command
        line leaves out variables that give an address, and the other way around; of variables
        alone, the endpoint counts, as in torchrun.

    Raises:
        ConfigError: A variable is not the number that it has to be.
    """
    variables = {name: environment[_variable(name)] for name in options if environment.get(_variable(name))}
    by_address = any(options.get(name) is not None for name in _BY_ADDRESS)
    by_endpoint = options.get("rdzv_endpoint") is not None or (not by_address and "rdzv_endpoint" in variables)
    for name in _BY_ENDPOINT if by_address and not by_endpoint else _BY_ADDRESS if by_endpoint else ():
        variables.pop(name, None)
    return {name: _value(name, variables.get(name)) if given is None else given for name, given in options.items()}


def names_machines(environment: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE count machines: Kubeflow sets them for each pod, beside `PET_NNODES`."""
    return _variable("nnodes") in environment and "LOCAL_RANK" not in environment


def _variable(name: str) -> str:
    return f"PET_{name.upper()}"


def _value(name: str, text: str | None) -> Any:
    if text is None or name not in _WHOLE:
        return text
    if not text.strip().isdecimal():
        raise ConfigError(Problem(_variable(name), text, "not a whole number of at least 0", "correct it, or unset it"))
    return int(text)
