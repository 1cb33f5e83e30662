"""Placement of a model for inference: choice of a layout, and loading without an optimizer.

Note [Choice of a placement]
    If the model fits on one device, one is used. Otherwise tensor parallelism is used, with the
    smallest degree that fits: all devices then work on each token. Only if no degree fits, there
    are pipeline stages: on as few devices as possible, with the largest degree for their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import nn

from plait.cluster.host_memory import move_to_huge_pages
from plait.cluster.topology import place
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.capacity import CacheDemand, cache_bytes, cache_layout_of, compute_dtype
from plait.inference.source import Source
from plait.model.facts import largest_of_layers, sizes_of_layers
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import WeightFiller, checked_model, destroying_new_group, shard
from plait.sharded.model import ShardedModel
from plait.sizes import format_bytes

WORKSPACE = 0.08
"""Share of a device's memory that weights and cache leave free.

Activations and the allocator need it.
"""


class DoesNotFit(InputError):
    """Error of a model that no placement on the devices holds."""


@dataclass(frozen=True)
class Needs:
    """Needs of a model for some requests."""

    weight_bytes: int
    split_bytes: int
    """Part of the weights that tensor parallelism splits. Every rank has the rest."""
    cache: Callable[[int, int], int]
    """Return the bytes of keys and values of all requests for degrees (tp, pp).

    They are those on the device with the largest part.
    """
    heads: int
    key_value_heads: int
    layers: int


@dataclass(frozen=True)
class Placement:
    """Layout of a model, and the bytes on each device."""

    tp: int
    pp: int
    weight_bytes: int
    cache_bytes: int
    why: str
    """Explanation for the user."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tp * self.pp


def place_model(
    needs: Needs,
    *,
    devices: int,
    device_bytes: int,
    tp: int | None = None,
    pp: int | None = None,
) -> Placement:
    """Return the placement on the fewest devices. See Note [Choice of a placement].

    Args:
        needs: Needs of the model.
        devices: Number of devices of the machine.
        device_bytes: Memory of each device.
        tp: Degree of tensor parallelism, if the user chose it.
        pp: Number of pipeline stages, if the user chose it.

    Raises:
        DoesNotFit: No placement holds the model. The error has the numbers of the closest one.
        InputError: A choice of the user is not possible.
    """
    _check_choices(needs, devices, tp=tp, pp=pp)
    available = int(device_bytes * (1 - WORKSPACE))
    closest: Placement | None = None
    for degree, stages in _candidates(needs, devices):
        if (tp is not None and degree != tp) or (pp is not None and stages != pp):
            continue
        replicated = needs.weight_bytes - needs.split_bytes
        # Stages are assumed to have equal parts.
        weights = -(-(needs.split_bytes // degree + replicated) // stages)
        cache = needs.cache(degree, stages)
        why = "as asked for"
        if tp is None and pp is None:
            why = _explanation(degree, stages)
        placement = Placement(degree, stages, weights, cache, why)
        if weights + cache <= available:
            return placement
        if closest is None or weights + cache < closest.weight_bytes + closest.cache_bytes:
            closest = placement

    assert closest is not None
    raise DoesNotFit(
        f"the model does not fit: at tp = {closest.tp}, pp = {closest.pp} a device would hold"
        f" {format_bytes(closest.weight_bytes)} of weights and {format_bytes(closest.cache_bytes)}"
        f" of keys and values, and {format_bytes(available)} of its {format_bytes(device_bytes)}"
        f" may be used (1 x {devices} devices); use more devices, fewer tokens or"
        " requests at once, or a smaller dtype"
    )


def _candidates(needs: Needs, devices: int) -> Iterator[tuple[int, int]]:
    """Yield the degrees (tp, pp) in the order in which they are tried.

    See Note [Choice of a placement].
    """
    degrees = [
        degree
        for degree in range(1, devices + 1)
        if needs.heads % degree == 0 and _can_split(degree, needs.key_value_heads)
    ]
    for degree in degrees:
        yield degree, 1

    pairs = product(degrees, range(1, min(needs.layers, devices) + 1))
    others = [pair for pair in pairs if pair[0] * pair[1] <= devices]
    # Fewest devices first, and of these the largest degree of tensor parallelism.
    yield from sorted(others, key=lambda pair: (pair[0] * pair[1], -pair[0]))


def _can_split(degree: int, key_value_heads: int) -> bool:
    """Return True if every rank has complete key-value heads, or several ranks share one."""
    return key_value_heads % degree == 0 or degree % key_value_heads == 0


def _check_choices(needs: Needs, devices: int, *, tp: int | None, pp: int | None) -> None:
    if tp is not None and (tp < 1 or needs.heads % tp or not _can_split(tp, needs.key_value_heads)):
        raise InputError(
            f"--tp {tp}: must divide the model's {needs.heads} attention heads, and divide or be a"
            f" multiple of its {needs.key_value_heads} key and value heads"
        )
    if tp is not None and tp > devices:
        raise InputError(
            f"--tp {tp}: a machine has {devices} devices, and tensor parallelism stays inside"
            " of one; use --pp as well"
        )
    if pp is not None and not 1 <= pp <= needs.layers:
        raise InputError(f"--pp {pp}: must be between 1 and the model's {needs.layers} layers")
    chosen = (tp or 1) * (pp or 1)
    if chosen > devices:
        raise InputError(
            f"--tp {tp or 1} x --pp {pp or 1}: {chosen} devices, and there are {devices}"
        )


def _explanation(tp: int, pp: int) -> str:
    if tp == pp == 1:
        return "it fits on one device"
    if pp == 1:
        return (
            f"the fewest devices of one machine that hold it are {tp}, and tensor parallelism lets"
            " all of them work on each token"
        )
    return f"{tp} devices of a machine do not hold it, so {pp} pipeline stages of {tp} devices do"


class Weights(Protocol):
    """Source of weights, e.g. `Source`."""

    def fill(self, tensors: Mapping[str, torch.Tensor], *, whole: nn.Module) -> None:
        """Read the values of some of a model's tensors.

        Args:
            tensors: The tensors by name.
            whole: The complete model, on the meta device.
        """


def needs_of(model: nn.Module, *, requests: int, tokens: int) -> Needs:
    """Return the memory that a model of Transformers needs for a number of requests.

    Args:
        model: The model, on the meta device.
        requests: Number of requests.
        tokens: Number of tokens of each.

    Raises:
        InputError: The configuration does not define the numbers of heads and layers.
    """
    full: Any = model.config
    config = full.get_text_config(decoder=True)
    heads = largest_of_layers(config, "num_attention_heads")
    layers = getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        raise InputError(
            f"{type(model).__name__}: its configuration does not say num_attention_heads and"
            " num_hidden_layers"
        )
    key_value_heads = min(sizes_of_layers(config, "num_key_value_heads"), default=heads)

    weight_bytes = 0
    split_bytes = 0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        weight_bytes += size
        # Matrices are split. Norms and biases are small, and counted as replicated.
        if parameter.ndim > 1:
            split_bytes += size

    layout = cache_layout_of(model)
    demand = CacheDemand(requests, tokens, compute_dtype(model).itemsize)
    return Needs(
        weight_bytes,
        split_bytes,
        lambda tp, pp: cache_bytes(layout, demand, tp=tp, pp=pp),
        heads,
        key_value_heads,
        layers,
    )


@destroying_new_group()
def load_model(
    source: Source, *, tp: int = 1, pp: int = 1, dtype: torch.dtype | None = None
) -> ShardedModel:
    """Load a model for `generate`. Collective.

    Each process reads its own slices of the weights.

    Args:
        source: Source of the model.
        tp: Degree of tensor parallelism.
        pp: Number of pipeline stages.
        dtype: Dtype of the model. None stands for the dtype that it was saved in.

    Raises:
        InputError: The number of processes is not tp x pp, or the model cannot be loaded.
    """
    model = source.model(dtype)
    world_size = place().world_size
    if world_size != tp * pp:
        raise InputError(
            f"tp = {tp} x pp = {pp} are {tp * pp} processes, and {world_size} were started"
        )
    parallel: dict[str, Any] = {"tp": tp, "pp": pp}
    if tp > 1:
        parallel["sequence_parallel"] = False
    settings = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "parallel": parallel,
        }
    )
    hidden_size = getattr(model.config, "hidden_size", None)
    resolved = resolve(settings, world_size=world_size, hidden_size=hidden_size)
    checked = checked_model(model, resolved)
    mesh, parts, _ = shard(checked, weights=on_huge_pages(source.filler()))
    model.requires_grad_(False)
    return ShardedModel(parts, mesh, resolved, forward=default_forward, handle="plait generate")


def on_huge_pages(fill: WeightFiller) -> WeightFiller:
    """Wrap a filler of weights so that it writes to huge pages.

    The matrix products of a token read such memory faster.
    """

    def filler(
        model: nn.Module, *, whole: nn.Module, filled: Callable[[torch.Tensor], None]
    ) -> None:
        move_to_huge_pages(model)
        fill(model, whole=whole, filled=filled)

    return filler
