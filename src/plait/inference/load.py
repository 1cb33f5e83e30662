"""Loading of a model for inference on several processes, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from plait.cluster.huge_pages import move_parameters
from plait.cluster.topology import place
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.cache_layout import CacheDemand, cache_bytes
from plait.inference.capacity import compute_dtype
from plait.inference.dry_cache import cache_layout_of
from plait.inference.placement import Needs
from plait.inference.source import Source
from plait.model.layer_sizes import largest_of_layers, sizes_of_layers
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import WeightFiller, destroying_new_group, shard
from plait.sharded.check import checked_model
from plait.sharded.model import ShardedModel


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
        move_parameters(model)
        fill(model, whole=whole, filled=filled)

    return filler
