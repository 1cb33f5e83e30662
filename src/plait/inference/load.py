"""A model for inference on the processes that there are: its layout, its weights, and no
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from plait.cluster.huge_pages import move_parameters
from plait.cluster.topology import place
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.capacity import compute_dtype
from plait.inference.dry_cache import kept_of
from plait.inference.kept import Asked, cache_bytes
from plait.inference.placement import Needs
from plait.inference.source import Source
from plait.model.layer_sizes import largest_of_layers, sizes_of_layers
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import Filler, leaving_no_group, shard
from plait.sharded.check import checked_model
from plait.sharded.model import ShardedModel


class Weights(Protocol):
    """Where weights come from: `Source.fill`."""

    def fill(self, tensors: Mapping[str, torch.Tensor], *, whole: nn.Module) -> None:
        """Give some of a model's tensors their values."""


def needs_of(model: nn.Module, *, requests: int, tokens: int) -> Needs:
    """What a model of Transformers, on meta, needs for `requests` requests of `tokens` tokens.
    Raises InputError for a configuration that does not say its heads and layers.
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
    shared = min(sizes_of_layers(config, "num_key_value_heads"), default=heads)
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    split = sum(size for name, size in sizes.items() if model.get_parameter(name).ndim > 1)
    kept = kept_of(model)
    asked = Asked(requests, tokens, compute_dtype(model).itemsize)
    return Needs(
        sum(sizes.values()),
        split,
        lambda tp, pp: cache_bytes(kept, asked, tp=tp, pp=pp),
        heads,
        shared,
        layers,
    )


@leaving_no_group()
def load_model(
    source: Source, *, tp: int = 1, pp: int = 1, dtype: torch.dtype | None = None
) -> ShardedModel:
    """Load the model on tp x pp processes, each with its own slices of the weights, for `generate`.
    Collective.
    """
    model = source.model(dtype)
    here = place()
    if here.world_size != tp * pp:
        raise InputError(
            f"tp = {tp} x pp = {pp} are {tp * pp} processes, and {here.world_size} were started"
        )
    parallel = {"tp": tp, "pp": pp, **({"sequence_parallel": False} if tp > 1 else {})}
    settings = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "parallel": parallel,
        }
    )
    resolved = resolve(
        settings, world_size=here.world_size, hidden_size=getattr(model.config, "hidden_size", None)
    )
    checked = checked_model(model, resolved)
    mesh, parts, _ = shard(checked, weights=on_huge_pages(source.filler()))
    model.requires_grad_(False)
    return ShardedModel(parts, mesh, resolved, forward=default_forward, handle="plait generate")


def on_huge_pages(fill: Filler) -> Filler:
    """The same, into memory that a token's products read faster."""

    def filler(
        model: nn.Module, *, whole: nn.Module, filled: Callable[[torch.Tensor], None]
    ) -> None:
        move_parameters(model)
        fill(model, whole=whole, filled=filled)

    return filler
