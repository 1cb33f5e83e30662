"""Measurement of a model's KV cache by a run on the meta device.

Note [Dry runs]
    A copy of the model without weights processes two tokens, and then one token more, with
    Transformers' own cache. The sizes of the cache's tensors after both forwards give the fixed
    size and the size per token.

    Nothing is read from names or configurations of families: the tensors are those that the model's
    own code writes to its cache, a window is that of the cache's layer, and the heads of a rank
    follow from the tensor-parallel plan. If a model cannot run without values, its number of heads
    is read from its configuration instead.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.operators import TorchFunctionMode
from plait.errors import PlaitError, first_line
from plait.inference.cache_layout import CacheLayer, CacheLayout, CacheTensor
from plait.model.adapters import without_wrapper
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.layer_sizes import sizes_of_layers
from plait.model.plans import make_plan
from plait.parallel.pipeline.balance import cut, forward_costs
from plait.sharded.cache import arguments_of, cache_argument, supports_cache

_COMPUTE_DTYPE = torch.bfloat16
"""Dtype of the run. Tensors of this dtype then have the dtype that the model computes in."""
_LENGTHS = (2, 1)
"""Tokens of the two forwards. States have their full size after the first token."""
_LONG_LENGTHS = (1023, 1024)
"""Tokens of the two forwards of a model whose cache has layers of custom classes.

Such a layer may grow only once in many tokens.
"""


def cache_layout_of(model: nn.Module, *, plan: Mapping[str, str] | None = None) -> CacheLayout:
    """Measure the KV cache of a model. See Note [Dry runs].

    Args:
        model: The model, on any device and layout. It is not changed.
        plan: The user's tensor-parallel plan (`parallel.plan`).

    Returns:
        The layers of its cache; none for a model that takes no cache.
    """
    base = without_wrapper(model)
    if not supports_cache(base):
        return CacheLayout()
    config: Any = base.config
    # `fully_shard` replaces the class by a subclass, which cannot be built from a configuration.
    model_class: Any = next(c for c in type(base).__mro__ if not issubclass(c, FSDPModule))
    rules = None if plan is None else tuple(plan.items())
    fields = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return _measure(_ModelDescription(model_class, fields, rules, config))


@dataclass(frozen=True)
class _ModelDescription:
    """Class and configuration of a model, as key of the cache of measurements."""

    model_class: type[nn.Module]
    fields: str
    """Fields of the configuration as JSON. They represent `config`, which is not hashable."""
    plan: tuple[tuple[str, str], ...] | None
    config: Any = field(compare=False)


@lru_cache(maxsize=16)
def _measure(description: _ModelDescription) -> CacheLayout:
    try:
        twin = _build_twin(description)
    except Exception as error:  # a class that is not Transformers' own may raise anything
        layers = _layers_of_config(description.config)
        return CacheLayout(tuple(layers), guessed=_error_text(error))
    guessed = ""
    try:
        layers = _run_twin(twin)
    except Exception as error:  # the model's code may raise anything without values
        layers = _layers_of_config(twin.config)
        guessed = _error_text(error)

    blocks = find_blocks(twin)
    layers_of_blocks = _layers_of_blocks(twin, blocks, len(layers))
    user = None if description.plan is None else dict(description.plan)

    @lru_cache(maxsize=16)
    def divided(tp: int) -> frozenset[int]:
        try:
            plan = make_plan(twin, tp=tp, user=user, blocks=blocks)
        except PlaitError:  # whoever uses this layout gets the error
            return frozenset()
        prefixes = tuple(f"{name}." for name in blocks)
        indices: set[int] = set()
        for attention in plan.heads:
            for index, prefix in enumerate(prefixes):
                if attention.startswith(prefix):
                    indices.update(layers_of_blocks[index])
                    break
        return frozenset(indices)

    @lru_cache(maxsize=16)
    def stages(pp: int) -> tuple[int, ...]:
        try:
            costs = forward_costs(model_facts(twin, blocks))
            return cut(costs.blocks, pp, first=costs.first, last=costs.last)
        except PlaitError:  # it cannot be cut
            return ()

    named_layers = dict(zip(blocks, layers_of_blocks, strict=True))
    return CacheLayout(tuple(layers), named_layers, divided, stages, guessed)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:200]


def _build_twin(description: _ModelDescription) -> nn.Module:
    """Build a copy of the model from its configuration, on the meta device."""
    model_class: Any = description.model_class
    with torch.device("meta"):
        twin: Any = model_class._from_config(
            copy.deepcopy(description.config), dtype=_COMPUTE_DTYPE, attn_implementation="eager"
        )
    if hasattr(twin, "set_experts_implementation"):
        # The default implementation reads from values which experts the tokens go to.
        twin.set_experts_implementation("batched_mm")
    evaluated: nn.Module = twin.eval()
    return evaluated


def _layers_of_blocks(
    twin: nn.Module, blocks: tuple[str, ...], layers: int
) -> list[tuple[int, ...]]:
    """Return the layers of the cache that each block writes to."""
    indices = [_layer_indices(twin.get_submodule(name)) for name in blocks]
    if not any(indices) and len(blocks) == layers:
        # Without indices on the modules, each block is taken to write to its own layer.
        return [(index,) for index in range(len(blocks))]
    return [tuple(index for index in block if index < layers) for block in indices]


def _layer_indices(block: nn.Module) -> tuple[int, ...]:
    indices = set()
    for module in block.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            indices.add(index)
    return tuple(sorted(indices))


def _run_twin(twin: nn.Module) -> list[CacheLayer]:
    """Run the copy of a model, and return the layers of its cache. See Note [Dry runs]."""
    from transformers import DynamicCache

    config: Any = twin.config
    cache = DynamicCache(config=config)
    argument = cache_argument(twin)
    assert argument is not None
    lengths = _LENGTHS
    if any(type(layer).__module__ != DynamicCache.__module__ for layer in cache.layers):
        lengths = _LONG_LENGTHS
    windows = [_open_window(layer) for layer in cache.layers]

    sizes: list[list[dict[str, int]]] = []
    with torch.no_grad(), torch.device("meta"), _AnswersWithoutValues():
        for length in lengths:
            inputs: dict[str, Any] = {
                "input_ids": torch.zeros(1, length, dtype=torch.long),
                argument: cache,
            }
            if "use_cache" in arguments_of(twin):
                inputs["use_cache"] = True
            twin(**inputs)
            sizes.append([_sizes_of_tensors(layer) for layer in cache.layers])

    before, after = sizes
    layers = []
    for index, layer in enumerate(cache.layers):
        tensors = []
        for name, tensor in _named_tensors(layer):
            window = windows[index] if name in ("keys", "values") else None
            size_before = before[index].get(name, 0)
            size_after = after[index][name]
            tensors.append(_cache_tensor(name, tensor, size_before, size_after, lengths, window))
        layers.append(CacheLayer(tuple(tensors), stays=cache.is_linear[index]))
    return layers


def _sizes_of_tensors(layer: Any) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in _named_tensors(layer)}


def _cache_tensor(
    name: str,
    tensor: torch.Tensor,
    before: int,
    after: int,
    lengths: tuple[int, int],
    window: int | None,
) -> CacheTensor:
    """Return the size of a tensor from its numbers of elements after both forwards."""
    # The size is a linear function of the number of tokens, known at two points.
    token = (after - before) / lengths[1]
    fixed = max(before - token * lengths[0], after - token * sum(lengths), 0)
    itemsize = None if tensor.dtype == _COMPUTE_DTYPE else tensor.element_size()
    heads = 1
    if name in ("keys", "values") and tensor.ndim == 4:
        heads = tensor.shape[1]  # [batch, heads, tokens, head_dim]
    return CacheTensor(fixed, token, itemsize, window, heads)


def _open_window(layer: Any) -> int | None:
    """Return how many tokens a layer keeps for the next one, or None if it keeps all.

    The window is removed, so that a short one does not hide the size per token.
    """
    if not getattr(layer, "is_sliding", False):
        return None
    window = int(layer.sliding_window)
    layer.sliding_window = 1 << 40
    return window - 1 if window > 1 else None


def _named_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a layer once. Several states of one attribute are numbered."""
    seen: set[int] = set()
    for name, value in vars(layer).items():
        entries: Any = [("", value)]
        if isinstance(value, dict):
            entries = value.items()
        elif isinstance(value, list | tuple):
            entries = enumerate(value)
        for key, tensor in entries:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{name}{key}", tensor


def _layers_of_config(config: Any) -> list[CacheLayer]:
    """Return keys and values of the heads that a configuration defines; no layers without heads."""
    config = config.get_text_config(decoder=True)
    queries = sizes_of_layers(config, "num_attention_heads")
    heads = sizes_of_layers(config, "num_key_value_heads") or queries
    widths = sizes_of_layers(config, "head_dim")
    if not widths:
        widths = [config.hidden_size // count for count in queries]
    if not heads or not widths:
        return []

    layers = getattr(config, "num_hidden_layers", None) or 0
    if len(heads) != layers:
        heads = heads[:1] * layers
    if len(widths) != layers:
        widths = widths[:1] * layers
    return [
        CacheLayer((CacheTensor(0, count * width, heads=count),) * 2)
        for count, width in zip(heads, widths, strict=True)
    ]


_ANSWERS = {
    torch.Tensor.__bool__: True,
    torch.Tensor.item: 1,
    torch.Tensor.__int__: 1,
    torch.Tensor.__float__: 1.0,
    torch.Tensor.__contains__: False,
}
"""Results of functions that read values of a tensor on the meta device."""
_SELECTIONS = (torch.nonzero, torch.Tensor.nonzero)


class _AnswersWithoutValues(TorchFunctionMode):
    """Function mode that answers reads of values on the meta device.

    `bool` of a tensor is True, as for a mask over tokens without padding. `in` is False, so no
    token is a padding token. `nonzero` returns nothing: only experts call it, and they add nothing
    to the cache.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func in _ANSWERS:
                return _ANSWERS[func]
            if func in _SELECTIONS and not kwargs.get("as_tuple", False):
                return torch.empty((0, args[0].ndim), dtype=torch.long, device="meta")
        return func(*args, **kwargs)
