"""`model.save_pretrained(folder)` of a model whose weights are on several processes: without the full weights it would write one's part, or
raise an error about storages."""

from __future__ import annotations

import types
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from plait.errors import InputError
from plait.sharded.shards_as_weights import refuse_given_shards

_REMEDY = "trainer.save_model(folder) on every process, or pass state_dict=accelerator.get_state_dict(model)"


def refuse_partial_folders(model: nn.Module, *, pp: int) -> None:
    """Let `save_pretrained` of `model` and of its parts, which `push_to_hub` calls, raise InputError where it is not given full weights."""
    if pp == 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            object.__setattr__(module, "save_pretrained", types.MethodType(_with_full_weights, module))


def _with_full_weights(self: Any, *args: Any, **settings: Any) -> Any:
    given = next((one for one in (settings.get("state_dict"), *args) if isinstance(one, dict)), None)
    refuse_given_shards(f"{type(self).__name__}.save_pretrained", given, remedy=f"call {_REMEDY}")
    if given is None:
        raise InputError(f"{type(self).__name__}.save_pretrained, or push_to_hub: each process holds a part of the weights; call {_REMEDY}")
    return type(self).save_pretrained(self, *args, **settings)
