"""`copy.deepcopy` of a model whose parameters are sharded: torch raises an error that does not say
what to do.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait.errors import InputError


def refuse_copies(model: nn.Module) -> None:
    """Let `copy.deepcopy` of `model`, and of its sharded parts, raise InputError."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            object.__setattr__(module, "__deepcopy__", types.MethodType(_refused, module))


def _refused(self: Any, memo: dict[int, Any]) -> Any:
    raise InputError(
        f"copy.deepcopy of {type(self).__name__.removeprefix('FSDP')}: its parameters are sharded"
        " over processes (ZeRO), and a copy would share their collectives; copy the model before"
        " plait.initialize or the Trainer, or save it (trainer.save_model(folder),"
        " engine.save_checkpoint(folder)) and load a model of its own from there"
    )
