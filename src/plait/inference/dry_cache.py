"""What a model keeps of the tokens that it has seen, found by running it: on meta, without weights
or data, over two and then one token.

Nothing is read from names or configurations of families: the tensors are those that the model's own
code puts into the cache that generation gives it, a window is that of the cache's layer, and which
heads a rank has is what its tensor parallel plan says.
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
from plait.inference.kept import Kept, Layer, Tensor
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.layer_sizes import sizes_of_layers
from plait.model.plans import make_plan
from plait.parallel.pipeline.balance import cut, forward_costs
from plait.sharded.cache import arguments_of, cache_argument, takes_cache

_DTYPE = torch.bfloat16
"""That the model is run in: what is of this dtype then is of the dtype that it computes in."""
_BY_TOKEN = (2, 1)
"""Tokens of the forwards. States have their full size from the first token on."""
_BY_MANY = (1023, 1024)
"""The same where a layer is of a kind that a family brings itself: it may add to what it keeps only
once in many tokens.
"""


def kept_of(model: nn.Module, *, plan: Mapping[str, str] | None = None) -> Kept:
    """What `model` keeps, on any device and layout: a bare copy is run. Nothing of a model that is
    given no cache. Where its class cannot be built of its configuration alone, or its code looks at
    values, what the configuration says of heads. `plan`: the user's own of tensor parallelism
    (`parallel.plan`).
    """
    base = _base(model)
    if not takes_cache(base):
        return Kept()
    config: Any = base.config
    kind: Any = next(one for one in type(base).__mro__ if not issubclass(one, FSDPModule))
    rules = None if plan is None else tuple(plan.items())
    return _kept(
        _Described(kind, json.dumps(config.to_dict(), sort_keys=True, default=str), rules, config)
    )


def _base(model: nn.Module) -> nn.Module:
    """Without what PEFT puts around it."""
    find: Any = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    found: nn.Module = find() if callable(find) else model
    return found


@dataclass(frozen=True)
class _Described:
    """A model, as its class and configuration make it."""

    kind: type[nn.Module]
    text: str
    plan: tuple[tuple[str, str], ...] | None
    config: Any = field(compare=False)


@lru_cache(maxsize=16)
def _kept(described: _Described) -> Kept:
    try:
        twin = _bare(described)
    except Exception as error:  # whatever a class raises that is not Transformers' own
        return Kept(tuple(_by_configuration(described.config)), guessed=_named(error))
    guessed = ""
    user = None if described.plan is None else dict(described.plan)
    try:
        layers = _layers(twin)
    except Exception as error:  # whatever a model's code raises that looks at values
        layers = _by_configuration(twin.config)
        guessed = _named(error)
    blocks = find_blocks(twin)
    written = [_written(twin.get_submodule(name)) for name in blocks]
    if not any(written) and len(blocks) == len(layers):
        written = [(index,) for index in range(len(blocks))]
    written = [tuple(index for index in own if index < len(layers)) for own in written]

    @lru_cache(maxsize=16)
    def divided(tp: int) -> frozenset[int]:
        try:
            plan = make_plan(twin, tp=tp, user=user, blocks=blocks)
        except PlaitError:  # the layout is refused, in its own words
            return frozenset()
        names = tuple(f"{name}." for name in blocks)
        found = {
            next((at for at, prefix in enumerate(names) if name.startswith(prefix)), -1)
            for name in plan.heads
        }
        return frozenset(layer for block in found if block >= 0 for layer in written[block])

    @lru_cache(maxsize=16)
    def stages(pp: int) -> tuple[int, ...]:
        try:
            costs = forward_costs(model_facts(twin, blocks))
            return cut(costs.blocks, pp, first=costs.first, last=costs.last)
        except PlaitError:
            return ()  # it cannot be cut

    return Kept(tuple(layers), dict(zip(blocks, written, strict=True)), divided, stages, guessed)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:200]


def _bare(described: _Described) -> nn.Module:
    """On meta. Products that are made expert by expert look at which of them tokens go to."""
    make: Any = described.kind
    with torch.device("meta"):
        twin: Any = make._from_config(
            copy.deepcopy(described.config), dtype=_DTYPE, attn_implementation="eager"
        )
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("batched_mm")
    found: nn.Module = twin.eval()
    return found


def _layers(twin: nn.Module) -> list[Layer]:
    from transformers import DynamicCache

    config: Any = twin.config
    cache = DynamicCache(config=config)
    argument = cache_argument(twin)
    assert argument is not None
    usual = all(type(layer).__module__ == DynamicCache.__module__ for layer in cache.layers)
    windows = [_without_window(layer) for layer in cache.layers]
    counted: list[list[dict[str, int]]] = []
    lengths = _BY_TOKEN if usual else _BY_MANY
    with torch.no_grad(), torch.device("meta"), _WithoutValues():
        for length in lengths:
            given: dict[str, Any] = {
                "input_ids": torch.zeros(1, length, dtype=torch.long),
                argument: cache,
            }
            if "use_cache" in arguments_of(twin):
                given["use_cache"] = True
            twin(**given)
            counted.append(
                [
                    {name: tensor.numel() for name, tensor in _tensors(layer)}
                    for layer in cache.layers
                ]
            )
    return [
        Layer(
            tuple(
                _tensor(
                    name,
                    tensor,
                    before.get(name, 0),
                    after[name],
                    lengths,
                    window if name in ("keys", "values") else None,
                )
                for name, tensor in _tensors(layer)
            ),
            stays=cache.is_linear[index],
        )
        for index, (layer, window, before, after) in enumerate(
            zip(cache.layers, windows, *counted, strict=True)
        )
    ]


def _tensor(
    name: str,
    tensor: torch.Tensor,
    before: int,
    after: int,
    lengths: tuple[int, int],
    window: int | None,
) -> Tensor:
    token = (after - before) / lengths[1]
    fixed = max(before - token * lengths[0], after - token * sum(lengths), 0)
    itemsize = None if tensor.dtype == _DTYPE else tensor.element_size()
    return Tensor(
        fixed,
        token,
        itemsize,
        window,
        tensor.shape[1] if name in ("keys", "values") and tensor.ndim == 4 else 1,
    )


def _without_window(layer: Any) -> int | None:
    """The most tokens that a layer keeps for the next one; None: all. Its window is opened, so that
    a short one does not hide what a token adds.
    """
    if not getattr(layer, "is_sliding", False):
        return None
    window = int(layer.sliding_window)
    layer.sliding_window = 1 << 40
    return window - 1 if window > 1 else None


def _tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a layer keeps, each once; those of several states by their places."""
    seen: set[int] = set()
    for name, value in vars(layer).items():
        entries = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list | tuple)
            else [("", value)]
        )
        for at, tensor in entries:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{name}{at}", tensor


def _written(block: nn.Module) -> tuple[int, ...]:
    """The layers of a cache that a block writes to."""
    found = (getattr(module, "layer_idx", None) for module in block.modules())
    return tuple(sorted({index for index in found if isinstance(index, int)}))


def _by_configuration(config: Any) -> list[Layer]:
    """Keys and values of every head; nothing where it does not say how many there are."""
    config = config.get_text_config(decoder=True)
    queries = sizes_of_layers(config, "num_attention_heads")
    count = getattr(config, "num_hidden_layers", None) or 0
    heads = sizes_of_layers(config, "num_key_value_heads") or queries
    widths = sizes_of_layers(config, "head_dim") or [config.hidden_size // one for one in queries]
    if not heads or not widths:
        return []

    def each(sizes: list[int]) -> list[int]:
        return sizes if len(sizes) == count else sizes[:1] * count

    return [
        Layer((Tensor(0, own * width, heads=own), Tensor(0, own * width, heads=own)))
        for own, width in zip(each(heads), each(widths), strict=True)
    ]


_ANSWERS = {
    torch.Tensor.__bool__: True,
    torch.Tensor.item: 1,
    torch.Tensor.__int__: 1,
    torch.Tensor.__float__: 1.0,
    torch.Tensor.__contains__: False,
}
_CHOOSE = (torch.nonzero, torch.Tensor.nonzero)


class _WithoutValues(TorchFunctionMode):
    """Answers where code asks a tensor on meta for values: yes, as a mask over tokens of which none
    is padding says; no token is one of padding; and nothing is chosen, as experts add nothing to
    what is kept.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func in _ANSWERS:
                return _ANSWERS[func]
            if func in _CHOOSE and not kwargs.get("as_tuple", False):
                return torch.empty((0, args[0].ndim), dtype=torch.long, device="meta")
        return func(*args, **kwargs)
