"""Refusals of methods of Transformers' models that need full weights, on a sharded model.

`save_pretrained` would write one process's part, or fail with an error about storages, unless it is
given the full weights. `resize_token_embeddings` would fail with an error about operators.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
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
    """Make `save_pretrained` of a model and of its parts raise InputError without full weights.

    `push_to_hub` calls it. `resize_token_embeddings` raises InputError too, and with tensor
    parallelism PEFT's calls that merge adapters.

    Args:
        model: A model with its layout.
        pp: Pipeline stages.
        tp: Degree of tensor parallelism.
    """
    if pp == 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            object.__setattr__(
                module, "save_pretrained", types.MethodType(_with_full_weights, module)
            )
        if callable(getattr(type(module), "resize_token_embeddings", None)):
            object.__setattr__(
                module, "resize_token_embeddings", types.MethodType(_refuse_resize, module)
            )
        if tp > 1 and callable(getattr(type(module), "merge_and_unload", None)):
            object.__setattr__(module, "merge_and_unload", types.MethodType(_refuse_merge, module))
            object.__setattr__(module, "merge_adapter", types.MethodType(_refuse_merge, module))


def _with_full_weights(self: Any, *args: Any, **settings: Any) -> Any:
    given = next(
        (one for one in (settings.get("state_dict"), *args) if isinstance(one, dict)), None
    )
    refuse_given_shards(f"{type(self).__name__}.save_pretrained", given, remedy=f"call {_REMEDY}")
    if given is None:
        raise InputError(
            f"{type(self).__name__}.save_pretrained, or push_to_hub: each process holds a part of"
            f" the weights; call {_REMEDY}"
        )
    with own_classes(self):
        return type(self).save_pretrained(self, *args, **settings)


def _refuse_resize(
    self: Any, new_num_tokens: int | None = None, *args: Any, **settings: Any
) -> Any:
    if new_num_tokens is None and not args and not settings:  # asks for the embedding alone
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
    """Return the class of a module of which `fully_shard` has made `kind`, as FSDPLlamaModel of
    LlamaModel.
    """
    while issubclass(kind, FSDPModule):
        kind = kind.__bases__[-1]
    return kind


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give modules the classes that they had before they were sharded.

    Transformers looks up by the class's name how the parameters are called in files (LLaVA,
    Qwen2-VL).
    """
    classes = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    for module, kind in classes:
        module.__class__ = class_before_sharding(kind)
    try:
        yield
    finally:
        for module, kind in classes:
            module.__class__ = kind
