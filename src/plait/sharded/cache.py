"""KV caches: the type that a model supports, and an empty cache of that type.

Transformers' sliding-window layers keep their last tokens as a view of all tokens of a forward, so
after a long prompt every layer would hold the full prompt in memory until the next token. The
caches that are created here copy the window instead (`_copy_windows`).
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from plait.cluster import accelerator
from plait.model.adapters import without_wrapper
from plait.parallel.micro_batches import CACHES
from plait.parallel.pipeline.stage import StageCaches, StagedModel


def new_cache(model: nn.Module, staged: StagedModel | None, *, on_host: bool = False) -> Any:
    """Return an empty cache for a model, or None if the model does not support one.

    It is Transformers' `DynamicCache` with one layer (full or sliding-window) per layer of the
    model.

    Args:
        model: The model.
        staged: The pipeline stages of this rank. With a pipeline there is one cache per stage.
        on_host: Keep layers in pinned host memory. Each is copied to the GPU while the layer before
            it computes. Not supported with a pipeline.

    Raises:
        ModelError: A pipeline stage cannot keep a cache.
    """
    if not supports_cache(model):
        return None
    from transformers import DynamicCache

    config: Any = model.config

    def empty(*, offloading: bool = False) -> Any:
        cache = DynamicCache(config=config, offloading=offloading)
        for layer in cache.layers:
            _copy_windows(layer)
        return cache

    if staged is None:
        return empty(offloading=on_host)
    return StageCaches(staged, empty)


_COPYING_CLASSES: dict[type, type] = {}
"""Classes of layers that copy their window, keyed by Transformers' class.

There is one per class, because pipeline stages compare the classes of layers.
"""


def _copy_windows(layer: Any) -> None:
    """Make a sliding-window layer copy its last tokens if they are a view of a larger tensor."""
    if getattr(layer, "is_sliding", False):
        layer_class = type(layer)
        if layer_class not in _COPYING_CLASSES:
            _COPYING_CLASSES[layer_class] = _copying_subclass(layer_class)
        layer.__class__ = _COPYING_CLASSES[layer_class]


def _copying_subclass(layer_class: Any) -> type:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = layer_class.update(self, *args, **kwargs)
        # Some models share one tensor for keys and values. It must stay one.
        is_shared = self.values is self.keys
        self.keys = _without_larger_storage(self.keys)
        self.values = self.keys if is_shared else _without_larger_storage(self.values)
        return result

    members = {"update": update, "__module__": layer_class.__module__}
    return type(layer_class.__name__, (layer_class,), members)


def _without_larger_storage(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def supports_cache(model: nn.Module) -> bool:
    """Return True if a model supports Transformers' `DynamicCache`.

    Other models have a cache class of their own, or keep a state in their modules.
    """
    if cache_argument(model) is None or getattr(model, "config", None) is None:
        return False
    supports_default: Any = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    return supports_default() and not any(
        hasattr(module, "_setup_cache") for module in model.modules()
    )


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument for a KV cache, or None if the model's forward has none."""
    old, new = CACHES
    arguments = arguments_of(model)
    if old in arguments:
        return old
    if new in arguments and _is_output_field(new):
        return new
    return None


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that a model's forward accepts.

    A PEFT model passes unknown arguments on to its base model, so the arguments of the base model
    are included.
    """
    arguments = frozenset(inspect.signature(type(model).forward).parameters)
    base = without_wrapper(model)
    return arguments if base is model else arguments | arguments_of(base)


@functools.cache
def _is_output_field(argument: str) -> bool:
    """Return whether models of the installed Transformers return a KV cache under this name.

    Before 5.24 some models (XLM) have an argument `cache` that is not a KV cache.
    """
    if find_spec("transformers") is None:
        return False
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return argument in {field.name for field in fields(CausalLMOutputWithPast)}


def requires_single_prefill(model: nn.Module) -> bool:
    """Return True if a model has to read a prompt in one forward.

    This applies to models with recurrent states, and to models whose tokens attend to later ones.
    """
    return attends_to_later_tokens(model) or has_recurrent_state(model)


def attends_to_later_tokens(model: nn.Module) -> bool:
    """Return True if every token attends to later tokens, as in BERT with `is_decoder=False`.

    This is the case if attention has `is_causal=False`, if a field of the model's configuration
    says so, or if `is_decoder=False` and no attention has `is_causal=True`.
    """
    config = getattr(model, "config", None)
    if (
        getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", None) is False
    ):
        return True
    # XLM and XLNet have fields of their own.
    if getattr(config, "causal", None) is False or getattr(config, "attn_type", None) == "bi":
        return True
    causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}
    return True not in causal and (False in causal or getattr(config, "is_decoder", True) is False)


def has_recurrent_state(model: nn.Module) -> bool:
    """Return True if some layers keep a recurrent state, with or without keys and values.

    Every token changes the state. Once they have a state, some of these layers (Jamba, Zamba) take
    one token per forward only. None of these layers can drop requests from a batch.
    """
    return any(map(_has_state, _layers(model)))


def counts_tokens(model: nn.Module) -> bool:
    """Return True if every layer of a model's cache counts the tokens that it has seen.

    If only some layers count them, a pipeline stage may have no such layer.
    """
    return all(hasattr(layer, "get_seq_length") for layer in _layers(model))


def _layers(model: nn.Module) -> list[Any]:
    """Return the layers of an empty cache, or an empty list if the model does not support one."""
    if not supports_cache(model):
        return []
    from transformers import DynamicCache

    config: Any = model.config
    return list(DynamicCache(config=config).layers)


def _has_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def keep_rows(cache: Any, rows: torch.Tensor) -> bool:
    """Drop all requests of a cache except for some rows.

    Args:
        cache: The cache.
        rows: Indices of the rows to keep, [rows], int64.

    Returns:
        True if the requests were dropped. False if a layer of the cache does not support this. The
        cache is then unchanged.
    """
    if isinstance(cache, StageCaches):
        layers = cache.own_layers()
    else:
        layers = list(cache.layers)
    for layer in layers:
        if _has_state(layer) or not hasattr(layer, "batch_select_indices"):
            return False
    wait_for_layers(cache)
    for layer in layers:
        layer.batch_select_indices(rows.to(layer.keys.device) if layer.is_initialized else rows)
    return True


def wait_for_layers(cache: Any) -> None:
    """Wait until no layer of a cache in host memory is being copied to or from the device."""
    filled = [layer for layer in getattr(cache, "layers", ()) if layer.is_initialized]
    if getattr(cache, "offloading", False) and filled:
        accelerator.synchronize(filled[0].device)
