"""Memory and positions that a generation needs, checked before its first token.

Most of the memory is the KV cache. Model families store different things in it: keys of every head
or of one head, latent keys, sliding windows, or states of fixed size. `cache_layout_of` therefore
measures the tensors that the model's own code writes to its cache.

Note [Dry runs]
    A copy of the model without weights processes two tokens, and then one token more, with
    Transformers' own cache. The sizes of the cache's tensors after both forwards give the fixed
    size and the size per token.

    Window sizes are read from the layers of the cache, and the heads of a rank follow from the
    tensor-parallel plan. If a model cannot run without values, its number of heads is read from its
    configuration instead.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.operators import TorchFunctionMode
from plait._torch.units import sharded_modules, sharded_parameters
from plait.cluster.host_memory import free_host_bytes
from plait.errors import InputError, PlaitError, first_line
from plait.inference.rope_by_length import DYNAMIC, rope_of_config
from plait.model.adapters import without_wrapper
from plait.model.blocks import find_blocks
from plait.model.facts import largest_of_layers, model_facts, sizes_of_layers
from plait.model.plans import make_plan
from plait.parallel.pipeline.estimates import balance_stages, forward_costs
from plait.sharded.cache import arguments_of, cache_argument, supports_cache
from plait.sizes import format_bytes

USABLE_SHARE = 0.8
"""Share of the free memory that gathered parameters may take.

Activations and the allocator need the rest.
"""


LAYERS_ON_DEVICE = 3
"""Largest number of layers of an offloaded cache that are on the device at the same time.

They are the layer to which a token is added, its longer copy with that token, and the next layer.
"""


@dataclass(frozen=True)
class CacheTensor:
    """Size of one cache tensor of a layer, in elements per request."""

    fixed: float
    """Elements that do not depend on the number of tokens."""
    token: float
    """Elements per token."""
    itemsize: int | None = None
    """Bytes per element; None for the dtype that the model computes in."""
    window: int | None = None
    """Largest number of tokens that the tensor has; None if it has all."""
    heads: int = 1
    """Number of heads. They are divided if tensor parallelism divides the layer's heads."""

    def nbytes(self, demand: CacheDemand, parts: int) -> int:
        """Return the bytes of the tensor on one rank.

        Args:
            demand: The requests.
            parts: Number of ranks that share the heads.
        """
        tokens = demand.tokens
        if self.window is not None:
            tokens = min(tokens, self.window)
        count = ceil(demand.requests * (self.fixed + self.token * tokens))
        # Ranks have complete heads, so the rank with most heads has this many.
        local_heads = -(-self.heads // parts)
        return local_heads * (count // self.heads) * (self.itemsize or demand.itemsize)


@dataclass(frozen=True)
class CacheLayer:
    """Sizes of the tensors in one layer of a KV cache."""

    tensors: tuple[CacheTensor, ...] = ()
    stays: bool = False
    """True if an offloaded cache keeps the layer on the device, as it does a recurrent state."""


@dataclass(frozen=True)
class CacheLayout:
    """Layers of a model's KV cache, and how tp and pp divide them between ranks."""

    layers: tuple[CacheLayer, ...] = ()
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers that each block of the model writes to, by the block's name, in model order."""
    divided: Callable[[int], frozenset[int]] = lambda tp: frozenset()
    """Function from a degree of tensor parallelism to the layers whose heads it divides.

    Every rank has all heads of the other layers.
    """
    stages: Callable[[int], tuple[int, ...]] = lambda pp: ()
    """Function from a number of pipeline stages to the number of blocks of each stage.

    It is empty if the model has no pipeline stages.
    """
    guessed: str = ""
    """Reason why the sizes are computed from the configuration, because the model could not run.

    It is empty if the sizes were measured.
    """


@dataclass(frozen=True)
class CacheDemand:
    """Number and length of the requests that a KV cache must hold, and the cache's element size."""

    requests: int
    tokens: int
    """Tokens of each request."""
    itemsize: int
    """Bytes per element of the dtype that the model computes in."""


def cache_bytes(
    layout: CacheLayout,
    demand: CacheDemand,
    *,
    tp: int = 1,
    pp: int = 1,
    blocks: Collection[str] | None = None,
) -> int:
    """Return the bytes of the KV cache on the rank with the largest share.

    Args:
        layout: Layers of the model's cache.
        demand: The requests.
        tp: Degree of tensor parallelism.
        pp: Number of pipeline stages.
        blocks: Names of the blocks of a pipeline stage. If they are given, the result is for that
            stage, and `pp` is ignored.
    """
    sizes = [sum(tensors) for tensors in _tensor_sizes(layout, demand, tp)]
    layers_of_blocks = list(layout.blocks.values())
    if blocks is not None:
        # Names of a stage's blocks may have a prefix.
        stage = []
        for name, layers in layout.blocks.items():
            if any(f".{block}".endswith(f".{name}") for block in blocks):
                stage.append(layers)
        stages = [stage]
    else:
        ends = [0, *accumulate(layout.stages(pp) if pp > 1 else ())]
        stages = [layers_of_blocks[first:end] for first, end in pairwise(ends)]
        stages = stages or [layers_of_blocks]

    # Layers that no block writes to are counted on every rank.
    outside = sum(sizes) - _size_of_layers(sizes, layers_of_blocks)
    return outside + max(_size_of_layers(sizes, stage) for stage in stages)


def _size_of_layers(sizes: Sequence[int], groups: Iterable[tuple[int, ...]]) -> int:
    """Return the total size of the layers in `groups`. A layer in several groups counts once."""
    layers: set[int] = set()
    for group in groups:
        layers.update(group)
    return sum(sizes[layer] for layer in layers)


def growing_bytes(layout: CacheLayout, demand: CacheDemand, *, tp: int = 1) -> int:
    """Return the bytes of temporary memory that are needed to add a token to the cache.

    Each cache tensor is copied into a longer one and then freed, one tensor at a time.
    """
    return max(chain.from_iterable(_tensor_sizes(layout, demand, tp)), default=0)


@dataclass(frozen=True)
class OffloadedCache:
    """Bytes that an offloaded KV cache takes on the device and in host memory of one rank."""

    device: int
    """Memory of the device."""
    pinned: int
    """Pinned host memory. torch rounds the size of a pinned tensor up to a power of two."""
    copied: int
    """Bytes that are copied to the device for every token, and back."""


def offloaded_cache(layout: CacheLayout, demand: CacheDemand, *, tp: int = 1) -> OffloadedCache:
    """Return the sizes of an offloaded cache of a model without pipeline stages.

    The device holds the layers that are never offloaded, and `LAYERS_ON_DEVICE` of the other layers
    at a time.
    """
    staying = 0
    moved = []
    pinned = []
    for layer, tensors in zip(layout.layers, _tensor_sizes(layout, demand, tp), strict=True):
        if layer.stays:
            staying += sum(tensors)
            continue
        moved.append(sum(tensors))
        pinned.append(sum(1 << (size - 1).bit_length() for size in tensors if size))

    largest = sorted(moved, reverse=True)[:LAYERS_ON_DEVICE]
    # The largest layer counts twice: its old and its new copy can exist at the same time.
    return OffloadedCache(staying + sum(largest), sum(pinned) + max(pinned, default=0), sum(moved))


def _tensor_sizes(layout: CacheLayout, demand: CacheDemand, tp: int) -> list[list[int]]:
    """Return the bytes of every layer's tensors on one rank."""
    divided = layout.divided(tp) if tp > 1 else frozenset()
    sizes = []
    for index, layer in enumerate(layout.layers):
        parts = tp if index in divided else 1
        sizes.append([tensor.nbytes(demand, parts) for tensor in layer.tensors])
    return sizes


def activation_bytes(config: Any, *, tokens: int, requests: int, itemsize: int) -> int:
    """Return the size in bytes of the activations of one forward.

    These are the widest tensors of a block (hidden states, three tensors of the MLP, queries, keys
    and values), a mask, and the logits of the last position in float32 with the temporary tensors
    of sampling.

    Args:
        config: Configuration of the model, or None.
        tokens: Number of tokens of all requests.
        requests: Number of requests.
        itemsize: Size of an element in bytes.
    """
    if config is None:
        return 0
    config = config.get_text_config(decoder=True)
    hidden = getattr(config, "hidden_size", 0)
    inner = largest_of_layers(config, "intermediate_size") or 4 * hidden
    vocabulary = getattr(config, "vocab_size", 0)
    longest = -(-tokens // max(requests, 1))

    block = tokens * (6 * hidden + 3 * inner) * itemsize
    # 2 bytes per element of the mask [requests, longest, longest].
    mask = requests * longest * longest * 2
    # The logits, and three tensors of their size in float32.
    logits = requests * vocabulary * (itemsize + 3 * 4)
    return block + mask + logits


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in: that of its first floating-point weight."""
    return next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )


def gathered_bytes(model: nn.Module, compute: torch.dtype | None) -> int:
    """Return the size in bytes of all parameters of a sharded model after they are gathered.

    Args:
        model: The sharded model.
        compute: Dtype that the model computes in. None means the parameters' own dtypes.
    """
    total = 0
    for unit in sharded_modules(model):
        for entry in sharded_parameters(unit):
            parameter = entry.sharded_param
            total += parameter.numel() * (compute or parameter.dtype).itemsize
    return total


def free_bytes(device: torch.device, ranks: int) -> int | None:
    """Return the memory that is free for tensors of this rank, or None if it is unknown.

    Args:
        device: The rank's device.
        ranks: Number of ranks that share the memory of the CPU.
    """
    if device.type == "cpu":
        free_on_host = free_host_bytes()
        return None if free_on_host is None else free_on_host // ranks
    free, _ = torch.accelerator.get_memory_info(device)
    # The allocator reuses memory that it has reserved and not allocated.
    reserved = torch.accelerator.memory_reserved(device)
    unused = reserved - torch.accelerator.memory_allocated(device)
    return int(free + unused)


def check_cache(
    needed: int, free: int | None, requests: int, tokens: int, *, where: str = "on this rank"
) -> None:
    """Raise InputError if the KV cache does not fit into memory.

    Args:
        needed: Size of the keys and values in bytes.
        free: Size of the free memory in bytes. None means that it is unknown and not checked.
        requests: Number of requests, for the message.
        tokens: Length of the longest request, for the message.
        where: Place of the memory, for the message.
    """
    if free is not None and needed > free:
        raise InputError(
            f"the KV cache of {requests} requests of up to {tokens:,} tokens takes"
            f" {format_bytes(needed)} {where}, but {format_bytes(free)} are free; ask for fewer new"
            " tokens (max_new_tokens), or fewer requests at once (batch_size)"
        )


def check_positions(
    config: Any,
    longest: int,
    *,
    content: str = "its prompt and max_new_tokens",
    remedy: str = "ask for fewer new tokens, or shorten the prompt",
) -> None:
    """Raise InputError if a request may have more tokens than the model has positions.

    Args:
        config: Configuration of the model, or None.
        longest: Number of tokens of the longest request.
        content: Description of these tokens, for the message.
        remedy: Remedy, for the message.
    """
    if config is None:
        return
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    rope = rope_of_config(config)
    # Dynamic frequencies follow the length of the input.
    grows = rope is not None and DYNAMIC in rope.kind
    if isinstance(positions, int) and longest > positions and not grows:
        raise InputError(
            f"the longest request may have {longest:,} tokens ({content}), but the model's"
            f" positions end at {positions:,} (max_position_embeddings); {remedy}"
        )


def is_sharded(model: nn.Module) -> bool:
    """Return True if a forward of a model gathers parameters."""
    return isinstance(model, FSDPModule)


_COMPUTE_DTYPE = torch.bfloat16
"""Dtype of the copy of the model. It stands for the dtype that the model computes in."""
_LENGTHS = (2, 1)
"""Numbers of tokens of the two forwards. States have their full size after the first token."""
_LONG_LENGTHS = (1023, 1024)
"""Numbers of tokens of the two forwards of a model whose cache has layers of custom classes.

Such a layer may grow only once in many tokens.
"""


def cache_layout_of(model: nn.Module, *, plan: Mapping[str, str] | None = None) -> CacheLayout:
    """Measure the KV cache of a model. See Note [Dry runs].

    Args:
        model: The model, on any device and layout. It is not changed.
        plan: The user's tensor-parallel plan (`parallel.plan`).

    Returns:
        The layers of the model's cache. There are none for a model without a cache.
    """
    base = without_wrapper(model)
    if not supports_cache(base):
        return CacheLayout()
    config: Any = base.config
    # `fully_shard` replaces the class with a subclass, which cannot be built from a configuration.
    model_class: Any = next(c for c in type(base).__mro__ if not issubclass(c, FSDPModule))
    rules = None if plan is None else tuple(plan.items())
    fields = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return _measure(_ModelDescription(model_class, fields, rules, config))


@dataclass(frozen=True)
class _ModelDescription:
    """Class and configuration of a model: the key under which its cache layout is stored."""

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
            return balance_stages(costs.blocks, pp, first=costs.first, last=costs.last)
        except PlaitError:  # the model cannot be split into stages
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
    return twin.eval()


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
    """Return the size of a cache tensor from its numbers of elements after both forwards."""
    # The size is a linear function of the number of tokens, known at two points.
    token = (after - before) / lengths[1]
    fixed = max(before - token * lengths[0], after - token * sum(lengths), 0)
    itemsize = None if tensor.dtype == _COMPUTE_DTYPE else tensor.element_size()
    heads = 1
    if name in ("keys", "values") and tensor.ndim == 4:
        heads = tensor.shape[1]  # [batch, heads, tokens, head_dim]
    return CacheTensor(fixed, token, itemsize, window, heads)


def _open_window(layer: Any) -> int | None:
    """Remove a layer's sliding window, and return how many earlier tokens the window covers.

    The result is None if the layer keeps all tokens. The window is removed because a short window
    would hide the size per token.
    """
    if not getattr(layer, "is_sliding", False):
        return None
    window = int(layer.sliding_window)
    layer.sliding_window = 1 << 40
    return window - 1 if window > 1 else None


def _named_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor in a cache layer's attributes or in their entries."""
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
    """Return cache layers with ordinary keys and values, from the heads in a configuration.

    The result is empty if the configuration defines no heads.
    """
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
    """Function mode that returns placeholders when values of meta tensors are read.

    `bool` of a tensor is True, as for a mask over tokens without padding. `in` is False, so no
    token is a padding token. `nonzero` returns no indices: only experts call it, and they add
    nothing to the cache.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func in _ANSWERS:
                return _ANSWERS[func]
            if func in _SELECTIONS and not kwargs.get("as_tuple", False):
                return torch.empty((0, args[0].ndim), dtype=torch.long, device="meta")
        return func(*args, **kwargs)
