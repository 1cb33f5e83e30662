"""From a parameter that a script holds to the engine that has it."""

from __future__ import annotations

import weakref

from torch import nn

from plait._torch.units import has_unreduced
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.errors import InputError
from plait.parallel.data.data_parallel import free_gathered

_ENGINES: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()
"""Those of the process: DeepSpeed's functions are given a parameter alone."""


def remember(engine: DeepSpeedEngine) -> None:
    """So that `find` knows it."""
    _ENGINES.add(engine)


def find(parameter: nn.Parameter) -> tuple[DeepSpeedEngine, nn.Parameter] | None:
    """The engine whose model has it, and the parameter that the optimizer has: the shard, where
    `parameter` is its gathered copy. Frees what is gathered. None where no engine has it. Raises
    InputError between the micro-batches of a step.
    """
    for engine in list(_ENGINES):
        names = [name for name, own in engine.module.named_parameters() if own is parameter]
        if not names and id(parameter) not in engine.plait.sharded.guard.known:
            continue
        if has_unreduced(engine.module):
            raise InputError(
                f"a parameter of shape {tuple(parameter.shape)} is asked for between the"
                " micro-batches of a step, whose gradients are not reduced yet; ask after"
                " engine.step(), or after the backward of the step's last micro-batch"
            )
        free_gathered(engine.module)
        return engine, engine.module.get_parameter(names[0]) if names else parameter
    return None


def found(parameter: nn.Parameter) -> tuple[DeepSpeedEngine, nn.Parameter]:
    """As `find`. Raises InputError where no engine has it."""
    known = find(parameter)
    if known is None:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} is in no model that"
            " deepspeed.initialize was given; take it from engine.module"
        )
    return known


def refuse_in_step(engine: DeepSpeedEngine, what: str) -> None:
    """Raise InputError for a change between a backward and its step."""
    if engine.plait.sharded.guard.backwards:
        raise InputError(
            f"{what} changes weights between a backward and its engine.step(), so gradients would"
            " be of others; change them after"
        )
