"""What a model keeps of the tokens that it has seen, layer by layer, and the bytes of it on a rank
of a layout. Arithmetic alone.

The sizes are those of the tensors that the model's own code puts into its cache
(`inference.dry_cache`), so there is no rule here for any family: keys of every head or of one,
latent ones, windows, states that no token adds to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil

LAYERS_THERE = 3
"""Of keys and values on the host, the layers that are on the device at once: the one that a token
is added to, as it was and as it is then, and the next.
"""


@dataclass(frozen=True)
class Tensor:
    """One that a layer keeps, of one request; sizes are in elements."""

    fixed: float
    """Whatever the number of tokens."""
    token: float
    """That each token adds."""
    itemsize: int | None = None
    """None: of the dtype that the model computes in."""
    window: int | None = None
    """The most tokens that it has; None: all."""
    heads: int = 1
    """That tensor parallelism divides where it divides the layer's heads."""

    def nbytes(self, *, requests: int, tokens: int, itemsize: int, parts: int) -> int:
        """Of `requests` requests that have `tokens` tokens each, on a rank of `parts` that share
        the heads.
        """
        seen = tokens if self.window is None else min(tokens, self.window)
        count = ceil(requests * (self.fixed + self.token * seen))
        return -(-self.heads // parts) * (count // self.heads) * (self.itemsize or itemsize)


@dataclass(frozen=True)
class Layer:
    """Of a cache."""

    tensors: tuple[Tensor, ...] = ()
    stays: bool = False
    """Whether it is on the device where others wait on the host, as a recurrent state is."""


@dataclass(frozen=True)
class Kept:
    """By a model."""

    layers: tuple[Layer, ...] = ()
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Names of the model's blocks, in their order, to the layers that each writes to."""
    divided: Callable[[int], frozenset[int]] = lambda tp: frozenset()
    """Of a degree of tensor parallelism, the layers whose heads it divides; ranks have all heads of
    the others.
    """
    stages: Callable[[int], tuple[int, ...]] = lambda pp: ()
    """Of a number of pipeline stages, how many blocks each of them has; none where the model cannot
    be cut.
    """
    guessed: str = ""
    """Why sizes are those that the configuration's heads have, and not those of a model that was
    run; "" where it was.
    """


@dataclass(frozen=True)
class Asked:
    """Of a cache."""

    requests: int
    tokens: int
    """Of each."""
    itemsize: int
    """Of the dtype that the model computes in."""


def cache_bytes(
    kept: Kept, asked: Asked, *, tp: int = 1, pp: int = 1, blocks: Collection[str] | None = None
) -> int:
    """On the rank that keeps most; on the one of a pipeline that has these `blocks`, where they are
    given.
    """
    sizes = [sum(layer) for layer in _sizes(kept, asked, tp)]
    written = list(kept.blocks.values())
    if blocks is not None:
        cuts = [
            [
                own
                for name, own in kept.blocks.items()
                if any(f".{one}".endswith(f".{name}") for one in blocks)
            ]
        ]
    else:
        ends = [0, *accumulate(kept.stages(pp) if pp > 1 else ())]
        cuts = [written[first:end] for first, end in pairwise(ends)] or [written]
    outside = sum(sizes) - sum(
        sizes[layer] for layer in {layer for own in written for layer in own}
    )
    return outside + max(
        sum(sizes[layer] for layer in {layer for own in stage for layer in own}) for stage in cuts
    )


def growing_bytes(kept: Kept, asked: Asked, *, tp: int = 1) -> int:
    """That a token takes while it is added: a tensor is copied into a longer one, and freed
    then.
    """
    return max((size for layer in _sizes(kept, asked, tp) for size in layer), default=0)


@dataclass(frozen=True)
class Offloaded:
    """Bytes of a rank whose keys and values wait on the host."""

    device: int
    """At once."""
    pinned: int
    """Of host memory: torch rounds a pinned tensor up to a power of two."""
    copied: int
    """That a token brings to the device, and takes back."""


def offloaded_cache(kept: Kept, asked: Asked, *, tp: int = 1) -> Offloaded:
    """Of a model without a pipeline: the device has `LAYERS_THERE` layers' at once, and those that
    stay.
    """
    sizes = _sizes(kept, asked, tp)
    there = sum(sum(size) for layer, size in zip(kept.layers, sizes, strict=True) if layer.stays)
    moved = [size for layer, size in zip(kept.layers, sizes, strict=True) if not layer.stays]
    pinned = sorted(
        (sum(1 << (one - 1).bit_length() for one in size if one) for size in moved), reverse=True
    )
    largest = sorted(map(sum, moved), reverse=True)
    return Offloaded(
        there + sum(largest[:LAYERS_THERE]), sum(pinned) + sum(pinned[:1]), sum(largest)
    )


def _sizes(kept: Kept, asked: Asked, tp: int) -> list[list[int]]:
    """Bytes of every layer's tensors on a rank."""
    divided = kept.divided(tp) if tp > 1 else frozenset()
    of = {"requests": asked.requests, "tokens": asked.tokens, "itemsize": asked.itemsize}
    return [
        [tensor.nbytes(**of, parts=tp if index in divided else 1) for tensor in layer.tensors]
        for index, layer in enumerate(kept.layers)
    ]
