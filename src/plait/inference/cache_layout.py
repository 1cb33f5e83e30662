"""Sizes of a model's KV cache, layer by layer, and its bytes on a rank of a layout.

The sizes are those of the tensors that the model's own code writes to its cache, which
`inference.dry_cache` measures. There is therefore no rule for any family of models here: there may
be keys of every head or of a single one, latent keys, windows, and states of fixed size. This
module only computes; it runs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil

LAYERS_ON_DEVICE = 3
"""Largest number of layers of an offloaded cache that are on the device at the same time.

They are the layer to which a token is added, before and after, and the next layer.
"""


@dataclass(frozen=True)
class CacheTensor:
    """Size of a tensor that a layer keeps for one request, in elements."""

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

    def nbytes(self, *, requests: int, tokens: int, itemsize: int, parts: int) -> int:
        """Return the bytes of the tensor on one rank.

        Args:
            requests: Number of requests.
            tokens: Number of tokens of each.
            itemsize: Bytes per element of the dtype that the model computes in.
            parts: Number of ranks that share the heads.
        """
        if self.window is not None:
            tokens = min(tokens, self.window)
        count = ceil(requests * (self.fixed + self.token * tokens))
        # Ranks have complete heads, so the rank with most heads has this many.
        local_heads = -(-self.heads // parts)
        return local_heads * (count // self.heads) * (self.itemsize or itemsize)


@dataclass(frozen=True)
class CacheLayer:
    """Tensors of one layer of a cache."""

    tensors: tuple[CacheTensor, ...] = ()
    stays: bool = False
    """True if the layer, e.g. a recurrent state, stays on the device of an offloaded cache."""


@dataclass(frozen=True)
class CacheLayout:
    """Layers of a model's cache, and how a layout of ranks divides them."""

    layers: tuple[CacheLayer, ...] = ()
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers that each block of the model writes to, by the block's name, in model order."""
    divided: Callable[[int], frozenset[int]] = lambda tp: frozenset()
    """Return the layers whose heads a degree of tensor parallelism divides.

    Every rank has all heads of the other layers.
    """
    stages: Callable[[int], tuple[int, ...]] = lambda pp: ()
    """Return the number of blocks of each stage for a number of pipeline stages.

    It is empty if the model cannot be cut.
    """
    guessed: str = ""
    """Reason why the sizes are computed from the configuration, because the model could not run.

    It is empty if the sizes were measured.
    """


@dataclass(frozen=True)
class CacheDemand:
    """Requests that a cache must hold."""

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
    """Return the bytes of a cache on the rank with the largest part.

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
    """Return the size of the layers in some groups. Each layer counts once."""
    layers: set[int] = set()
    for group in groups:
        layers.update(group)
    return sum(sizes[layer] for layer in layers)


def growing_bytes(layout: CacheLayout, demand: CacheDemand, *, tp: int = 1) -> int:
    """Return the additional bytes while a token is added.

    A tensor is copied into a longer one before it is freed, one tensor at a time.
    """
    sizes = _tensor_sizes(layout, demand, tp)
    return max((size for tensors in sizes for size in tensors), default=0)


@dataclass(frozen=True)
class OffloadedCache:
    """Bytes of one rank whose keys and values are in host memory."""

    device: int
    """Memory of the device."""
    pinned: int
    """Pinned host memory. torch rounds the size of a pinned tensor up to a power of two."""
    copied: int
    """Bytes that are copied to the device for every token, and back."""


def offloaded_cache(layout: CacheLayout, demand: CacheDemand, *, tp: int = 1) -> OffloadedCache:
    """Return the sizes of an offloaded cache of a model without pipeline stages.

    The device has `LAYERS_ON_DEVICE` layers at a time, and the layers that stay.
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
        sizes.append([_tensor_size(tensor, demand, parts) for tensor in layer.tensors])
    return sizes


def _tensor_size(tensor: CacheTensor, demand: CacheDemand, parts: int) -> int:
    return tensor.nbytes(
        requests=demand.requests, tokens=demand.tokens, itemsize=demand.itemsize, parts=parts
    )
