"""Refusal of calls that would treat the shards of a model as its full weights.

torch pickles a DTensor as the local shard with the full shape. The names and shapes in a file of
`torch.save(model.state_dict())` look complete, although the file has one rank's part of every
weight. `copy.deepcopy(model)` and `torch.save(model)` fail with errors that name no remedy. Unless
full weights are passed to it, Transformers' `save_pretrained` would write one process's shards, or
fail with an error about storages. `resize_token_embeddings` would fail with an error about
operators.
"""

from __future__ import annotations

import copyreg
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from plait._torch.tensors import local_tensor
from plait.errors import InputError
from plait.model.adapters import with_full_prompts
from plait.parallel.pipeline.stage import refuse_forward_of_copy
from plait.parallel.techniques.tiled_mlp import Tiles

FULL_STATE = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) on every process, and save it in one"
)
"""Remedy for callers without an engine or a ParallelModel: a call that returns full weights."""


_TORCH_CHECKPOINT = "torch.distributed.checkpoint"


_HOOKS: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""Hooks that refuse shards, one per model.

A later hook replaces an earlier one, because its caller knows a better remedy.
"""


_REMEDIES: weakref.WeakKeyDictionary[DeviceMesh, str] = weakref.WeakKeyDictionary()
"""Remedies for pickling a parameter, keyed by its device mesh."""


_REMEDY = (
    "trainer.save_model(folder) on every process, or pass"
    " state_dict=accelerator.get_state_dict(model)"
)


def refuse_shards_as_weights(model: nn.Module, *, remedy: str, is_partial: bool = False) -> None:
    """Make `model.state_dict()` raise InputError if it would return shards to the user's code.

    If every rank holds all of the weights, `state_dict` returns plain tensors. Pickling a shard
    raises InputError too.

    Args:
        model: A sharded model.
        remedy: What to call instead, for the message.
        is_partial: Whether the model lacks layers that other ranks have, as a pipeline stage does.
    """

    def refuse(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        sharded = {name: value for name, value in state.items() if isinstance(value, DTensor)}
        if not (sharded or is_partial) or _is_called_from("plait", _TORCH_CHECKPOINT):
            return
        if is_partial or not all(map(is_full_here, sharded.values())):
            raise InputError(
                "state_dict() of the model: each process holds a part of the weights; call"
                f" {remedy}, or use ZeRO stage 0{' without a pipeline' if is_partial else ''}"
            )
        state.update({name: local_tensor(value) for name, value in sharded.items()})

    if is_partial or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        earlier = _HOOKS.pop(model, None)
        if earlier is not None:
            earlier.remove()
        # Only if needed: the hook is a local function, with which the model cannot be pickled.
        _HOOKS[model] = model.register_state_dict_post_hook(refuse)
    refuse_pickled_shards(model, remedy=remedy)


def refuse_pickled_shards(model: nn.Module, *, remedy: str = FULL_STATE) -> None:
    """Make `torch.save` and other uses of pickle raise InputError for shards of the model.

    Args:
        model: A sharded model.
        remedy: What to call instead, for the message.
    """
    meshes = {
        parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)
    }
    _REMEDIES.update((mesh, remedy) for mesh in meshes)
    if meshes:
        copyreg.pickle(DTensor, _reduce_shard)


def _reduce_shard(tensor: DTensor) -> Any:
    """Return how pickle stores a DTensor. Raise InputError if it would store only a shard."""
    if tensor.device_mesh not in _REMEDIES or _is_called_from("copy", _TORCH_CHECKPOINT):
        return tensor.__reduce_ex__(2)
    if is_full_here(tensor):
        return local_tensor(tensor).__reduce_ex__(2)
    raise InputError(
        f"a sharded tensor of shape {tuple(tensor.shape)} cannot be pickled: this process has only "
        "its own shard, so the shards of other processes would be missing; call "
        f"{_REMEDIES[tensor.device_mesh]}"
    )


def is_full_here(tensor: DTensor) -> bool:
    """Return True if every rank holds the full tensor, as at ZeRO stage 0."""
    sizes = (tensor.device_mesh.size(axis) for axis in range(tensor.device_mesh.ndim))
    return all(
        placement.is_replicate() or size == 1
        for placement, size in zip(tensor.placements, sizes, strict=True)
    )


def _is_called_from(*packages: str) -> bool:
    """Return True if a module of one of the packages is on the stack.

    The search starts at the caller, and ends at the first module outside torch.
    """
    # Two frames up: the caller of the function that calls this one.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            return True
        if name.partition(".")[0] not in ("torch", "copyreg", "pickle"):
            return False
        frame = frame.f_back
    return False


def refuse_copies(model: nn.Module, *, is_split: bool) -> None:
    """Make `copy.deepcopy` and pickle of a model, and of its sharded modules, raise InputError.

    A module that ZeRO does not shard may be copied. The copy of a module that computes with other
    ranks has the parameters, but its forward raises InputError.

    Args:
        model: A model with its layout.
        is_split: Whether tensor or pipeline parallelism leaves this process only a part of the
            model. If so, pickling `model` is refused even if ZeRO does not shard it.
    """
    for module in model.modules():
        is_sharded = isinstance(module, FSDPModule)
        if not is_sharded and _is_replacement(vars(module).get("forward")):
            reduce = types.MethodType(_reduce_without_replacement, module)
            object.__setattr__(module, "__reduce_ex__", reduce)
        if is_sharded:
            object.__setattr__(module, "__deepcopy__", types.MethodType(_refuse_copy, module))
        if is_sharded or (is_split and module is model):
            object.__setattr__(module, "__reduce_ex__", types.MethodType(_refuse_pickle, module))


def _is_replacement(forward: Any) -> bool:
    """Return True if a technique has replaced the forward of a module."""
    namespace = getattr(forward, "__globals__", {"__name__": type(forward).__module__})
    return str(namespace["__name__"]).startswith("plait.parallel.")


def _reduce_without_replacement(self: Any, protocol: Any) -> Any:
    """Return how `copy` and pickle rebuild a module whose forward was replaced.

    The replacement computes with the parameters of this module, and would do so in a copy too.
    """
    kind: Any = type(self)
    function, arguments, state, *rest = kind.__reduce_ex__(self, protocol)
    state = {name: value for name, value in state.items() if name != "__reduce_ex__"}
    forward = state.get("forward")
    while _is_replacement(forward) and forward is not refuse_forward_of_copy:
        if isinstance(forward, Tiles):
            forward = forward.original
        else:
            # Recomputation, and the check of hooks around a layer, name the forward that they call.
            forward = getattr(forward, "__wrapped__", refuse_forward_of_copy)
    state["forward"] = forward
    return function, arguments, state, *rest


def _refuse_pickle(self: Any, protocol: Any) -> Any:
    if _is_called_from("copy"):
        kind: Any = type(self)
        return kind.__reduce_ex__(self, protocol)
    raise InputError(
        f"{type(self).__name__.removeprefix('FSDP')} cannot be pickled (by torch.save(model), for"
        " example): it was split or wrapped for its layout, and this process may have only a part"
        " of the weights; save a checkpoint (engine.save_checkpoint(folder),"
        " trainer.save_model(folder)), or call plait.iterate_weights(engine.sharded) on every"
        " process and save its tensors (without an engine, pass the result of plait.parallelize)"
    )


def _refuse_copy(self: Any, memo: dict[int, Any]) -> Any:
    raise InputError(
        f"copy.deepcopy of {type(self).__name__.removeprefix('FSDP')}: its parameters are sharded"
        " over processes (ZeRO), and a copy would share their collectives; copy the model before"
        " plait.initialize or the Trainer, or save it (trainer.save_model(folder),"
        " engine.save_checkpoint(folder)) and load another model from there"
    )


def refuse_partial_folders(model: nn.Module, *, pp: int, tp: int = 1) -> None:
    """Make `save_pretrained` of a model and of its modules raise InputError without full weights.

    `push_to_hub` calls `save_pretrained` and raises the same error. `resize_token_embeddings`
    always raises InputError. With tensor parallelism, so do PEFT's methods that merge adapters.

    Args:
        model: A model with its layout.
        pp: Number of pipeline stages.
        tp: Degree of tensor parallelism.
    """
    if pp == 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    for module in model.modules():
        _replace_method(module, "save_pretrained", _save_full_weights)
        _replace_method(module, "resize_token_embeddings", _refuse_resize)
        if tp > 1:
            _replace_method(module, "merge_and_unload", _refuse_merge)
            _replace_method(module, "merge_adapter", _refuse_merge)


def _replace_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of a module, if its class has the method."""
    if callable(getattr(type(module), name, None)):
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
    with own_classes(self), with_full_prompts(self, weights):
        return type(self).save_pretrained(self, *args, **settings)


def _refuse_resize(
    self: Any, new_num_tokens: int | None = None, *args: Any, **settings: Any
) -> Any:
    if new_num_tokens is None and not args and not settings:
        # Without arguments the call only returns the embedding.
        return type(self).resize_token_embeddings(self)
    raise InputError(
        f"{type(self).__name__}.resize_token_embeddings({new_num_tokens}): each process holds a"
        " part of the embedding, and the optimizer holds states of the old shape; load the model,"
        " resize it, and then train it or pass it to plait.initialize"
    )


def _refuse_merge(self: Any, *_: Any, **__: Any) -> Any:
    raise InputError(
        "merge_and_unload, or merge_adapter: with parallel.tp each process holds a part of the "
        "weights and of the adapter; save the adapter (trainer.save_model(folder), or the tensors "
        "of plait.iterate_weights(engine.sharded, trained_only=True)) and merge it in one "
        "process: PeftModel.from_pretrained(model, folder).merge_and_unload()"
    )


def refuse_given_shards(call: str, weights: Any, *, remedy: str) -> None:
    """Raise InputError if the weights that a call is to write are shards.

    Args:
        call: The call, for the message.
        weights: Tensors by name, or None.
        remedy: What to pass instead, for the message.
    """
    shards = [
        name
        for name, value in (weights or {}).items()
        if isinstance(value, DTensor) and not is_full_here(value)
    ]
    if shards:
        raise InputError(
            f"{call} was given {len(shards)} sharded weights, first {shards[0]}: the shards of "
            f"other processes would be missing; {remedy}"
        )


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Restore the classes that modules had before they were sharded, inside the context.

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


def class_before_sharding(kind: type) -> type:
    """Return the class that a module had before `fully_shard`.

    Args:
        kind: The class now, such as FSDPLlamaModel for LlamaModel.
    """
    while issubclass(kind, FSDPModule):
        kind = kind.__bases__[-1]
    return kind
