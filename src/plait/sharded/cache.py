"""An empty cache of the kind that a model takes."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from plait.cluster import accelerator
from plait.parallel.micro_batches import CACHES
from plait.parallel.pipeline.stage import StagedModel
from plait.parallel.pipeline.stage_cache import StageCaches
from plait.sharded.window_layers import without_rests


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Names of the arguments that a model's class takes. A model of PEFT's hands what it does not
    name on to the one in it.
    """
    own = frozenset(inspect.signature(type(model).forward).parameters)
    find: Any = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    base = find() if callable(find) else model
    return own if base is model else own | arguments_of(base)


def keep_rows(cache: Any, rows: torch.Tensor) -> bool:
    """Drop what a cache keeps of other requests than `rows` (int64); False, and nothing done, where
    one of its layers cannot.
    """
    layers = cache.own_layers() if isinstance(cache, StageCaches) else list(cache.layers)
    if not all(
        callable(getattr(layer, "batch_select_indices", None)) and not _has_state(layer)
        for layer in layers
    ):
        return False
    wait_for_layers(cache)
    for layer in layers:
        layer.batch_select_indices(rows.to(layer.keys.device) if layer.is_initialized else rows)
    return True


def wait_for_layers(cache: Any) -> None:
    """Of a cache whose layers wait on the host: until none is on its way there or back."""
    filled = [layer for layer in getattr(cache, "layers", ()) if layer.is_initialized]
    if getattr(cache, "offloading", False) and filled:
        accelerator.synchronize(filled[0].device)


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument for a KV cache, or None if the model's forward has none."""
    old, new = CACHES
    arguments = arguments_of(model)
    if old in arguments:
        return old
    if new in arguments and _outputs_name(new):
        return new
    return None


@functools.cache
def _outputs_name(argument: str) -> bool:
    """Return whether models of the installed Transformers return a KV cache under this name.

    Before 5.24 some models (XLM) have an argument `cache` that is not a KV cache.
    """
    if find_spec("transformers") is None:
        return False
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return argument in {field.name for field in fields(CausalLMOutputWithPast)}


def takes_cache(model: nn.Module) -> bool:
    """Whether a model can be given what it keeps of earlier tokens. Some have a cache of their own
    kind, or keep a state in themselves.
    """
    if cache_argument(model) is None or getattr(model, "config", None) is None:
        return False
    usual: Any = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    return usual() and not any(hasattr(module, "_setup_cache") for module in model.modules())


def has_recurrent_state(model: nn.Module) -> bool:
    """Whether some of its layers keep a state that every token changes, beside keys and values or
    in place of them. Not all of them go on from it by more than one token (Jamba, Zamba), and none
    drops requests.
    """
    return any(map(_has_state, _layers(model)))


def reads_prompts_whole(model: nn.Module) -> bool:
    """Return whether a model has to read a prompt in one piece.

    Models with recurrent states do, and models whose tokens attend to later ones.
    """
    return attends_to_later_tokens(model) or has_recurrent_state(model)


def attends_to_later_tokens(model: nn.Module) -> bool:
    """Return whether every token attends to later tokens, as in BERT with `is_decoder=False`.

    Such models have attention with `is_causal=False`, a field of their configuration that says so,
    or `is_decoder=False` and no attention with `is_causal=True`.
    """
    config = getattr(model, "config", None)
    if (
        getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", None) is False
    ):
        return True
    # XLM, XLNet
    if getattr(config, "causal", None) is False or getattr(config, "attn_type", None) == "bi":
        return True
    causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}
    return True not in causal and (False in causal or getattr(config, "is_decoder", True) is False)


def counts_tokens(model: nn.Module) -> bool:
    """Whether every layer of its cache tells how many tokens it has seen. A stage of a pipeline may
    have none of those that do.
    """
    return all(hasattr(layer, "get_seq_length") for layer in _layers(model))


def _layers(model: nn.Module) -> list[Any]:
    """Of an empty cache; none where the model takes none."""
    if not takes_cache(model):
        return []
    from transformers import DynamicCache

    config: Any = model.config
    return list(DynamicCache(config=config).layers)


def _has_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def new_cache(model: nn.Module, staged: StagedModel | None, *, on_host: bool = False) -> Any:
    """Transformers' `DynamicCache`, with a layer for each of the model's (full, or with a sliding
    window); under a pipeline one for each of this rank's stages. None for a model that takes none.
    `on_host`: layers wait in pinned host memory, and come while the one before them computes; for a
    GPU, without a pipeline.
    """
    if not takes_cache(model):
        return None
    from transformers import DynamicCache

    config: Any = model.config

    def empty(*, offloading: bool = False) -> Any:
        made = DynamicCache(config=config, offloading=offloading)
        for layer in made.layers:
            without_rests(layer)
        return made

    return empty(offloading=on_host) if staged is None else StageCaches(staged, empty)
