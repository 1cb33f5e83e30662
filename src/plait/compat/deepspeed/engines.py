"""Registry of the engines of this process.

DeepSpeed's functions for parameters receive only a parameter, and the registry finds its engine.
"""

from __future__ import annotations

import weakref

from torch import nn

from plait._torch.units import has_unreduced
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.errors import InputError
from plait.parallel.techniques.data_parallel import free_gathered

_ENGINES: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def register_engine(engine: DeepSpeedEngine) -> None:
    """Add an engine to the registry."""
    _ENGINES.add(engine)


def find_parameter(parameter: nn.Parameter) -> tuple[DeepSpeedEngine, nn.Parameter] | None:
    """Find the engine of a parameter, and free the gathered parameters of its model.

    Args:
        parameter: A parameter of the model, or a gathered copy of one.

    Returns:
        The engine and the parameter that its optimizer updates, which is the shard of a gathered
        copy. None if no engine has the parameter.

    Raises:
        InputError: The call is between the micro-batches of a step.
    """
    for engine in list(_ENGINES):
        names = [
            name for name, candidate in engine.module.named_parameters() if candidate is parameter
        ]
        if not names and id(parameter) not in engine.plait.sharded.guard.known:
            continue
        if has_unreduced(engine.module):
            raise InputError(
                f"a parameter of shape {tuple(parameter.shape)} is asked for between the"
                " micro-batches of a step, whose gradients are not reduced yet; ask after"
                " engine.step(), or after the backward of the step's last micro-batch"
            )
        free_gathered(engine.module)
        if names:
            # The name now refers to the shard.
            return engine, engine.module.get_parameter(names[0])
        return engine, parameter
    return None


def require_parameter(parameter: nn.Parameter) -> tuple[DeepSpeedEngine, nn.Parameter]:
    """Find the engine of a parameter. See `find_parameter`.

    Raises:
        InputError: No engine has the parameter.
    """
    match = find_parameter(parameter)
    if match is None:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} is in no model that"
            " deepspeed.initialize was given; take it from engine.module"
        )
    return match


def refuse_in_step(engine: DeepSpeedEngine, call: str) -> None:
    """Raise InputError if a call would change weights between a backward and its step."""
    if engine.plait.sharded.guard.backwards:
        raise InputError(
            f"{call} changes weights between a backward and its engine.step(), so gradients would"
            " be of others; change them after"
        )
