"""Refusals of methods of Transformers' models that need full weights, on a sharded model.

`save_pretrained` would write one process's shards, or fail with an error about storages, unless the
full weights are passed. `resize_token_embeddings` would fail with an error about operators.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plait.errors import InputError
from plait.sharded.shards_as_weights import refuse_given_shards

_REMEDY = (
    "trainer.save_model(folder) on every process, or pass"
    " state_dict=accelerator.get_state_dict(model)"
)


def refuse_partial_folders(model: nn.Module, *, pp: int, tp: int = 1) -> None:
    """Make `save_pretrained` of a model and of its modules raise InputError without full weights.

    `push_to_hub` calls it. `resize_token_embeddings` raises InputError too, and with tensor
    parallelism PEFT's calls that merge adapters.

    Args:
        model: A model with its layout.
        pp: Number of pipeline stages.
        tp: Degree of tensor parallelism.
    """
    if pp == 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    for module in model.modules():
        if _has_method(module, "save_pretrained"):
            _replace_method(module, "save_pretrained", _save_full_weights)
        if _has_method(module, "resize_token_embeddings"):
            _replace_method(module, "resize_token_embeddings", _refuse_resize)
        if tp > 1 and _has_method(module, "merge_and_unload"):
            _replace_method(module, "merge_and_unload", _refuse_merge)
            _replace_method(module, "merge_adapter", _refuse_merge)


def _has_method(module: nn.Module, name: str) -> bool:
    return callable(getattr(type(module), name, None))


def _replace_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    # On the object, because its class may have other objects that are not sharded.
    object.__setattr__(module, name, types.MethodType(function, module))


def _save_full_weights(self: Any, *args: Any, **settings: Any) -> Any:
    candidates = (settings.get("state_dict"), *args)
    weights = next((value for value in candidates if isinstance(value, dict)), None)
    refuse_given_shards(f"{type(self).__name__}.save_pretrained", weights, remedy=f"call {_REMEDY}")
    if weights is None:
        raise InputError(
            f"{type(self).__name__}.save_pretrained, or push_to_hub: each process holds a part of"
            f" the weights; call {_REMEDY}"
        )
    with own_classes(self):
        return type(self).save_pretrained(self, *args, **settings)


def _refuse_resize(
    self: Any, new_num_tokens: int | None = None, *args: Any, **settings: Any
) -> Any:
    if new_num_tokens is None and not args and not settings:
        # Without arguments the call only returns the embedding.
        return type(self).resize_token_embeddings(self)
    raise InputError(
        f"{type(self).__name__}.resize_token_embeddings({new_num_tokens}): each process holds a"
        " part of the embedding, and the optimizer its states; load the model, resize it, and then"
        " train it or pass it to plait.initialize"
    )


def _refuse_merge(self: Any, *_: Any, **__: Any) -> Any:
    raise InputError(
        "merge_and_unload, or merge_adapter: with parallel.tp each process holds a part of the "
        "weights and of the adapter; save the adapter (trainer.save_model(folder), or the tensors "
        "of plait.iterate_weights(engine.sharded, trained_only=True)) and merge it in one "
        "process: PeftModel.from_pretrained(model, folder).merge_and_unload()"
    )


def class_before_sharding(kind: type) -> type:
    """Return the class that a module had before `fully_shard`.

    Args:
        kind: The class now, such as FSDPLlamaModel for LlamaModel.
    """
    while issubclass(kind, FSDPModule):
        kind = kind.__bases__[-1]
    return kind


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give modules the classes that they had before they were sharded, inside of the context.

    For some models (LLaVA, Qwen2-VL) Transformers looks up the names of parameters in files by the
    name of the class.
    """
    classes = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    for module, sharded_class in classes:
        module.__class__ = class_before_sharding(sharded_class)
    try:
        yield
    finally:
        for module, sharded_class in classes:
            module.__class__ = sharded_class
