"""A model for inference on the processes that there are: its layout, its weights, and no optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.cluster.layout import Layout
from plait.cluster.topology import place
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.capacity import cache_bytes
from plait.inference.placement import Needs
from plait.inference.source import Source
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import leaving_no_group, shard
from plait.sharded.check import checked_model
from plait.sharded.model import ShardedModel


def needs_of(model: nn.Module, *, tokens: int) -> Needs:
    """What a model of Transformers, on meta, needs for `tokens` tokens of keys and values. Raises InputError for a configuration that does
    not say its heads and layers."""
    full: Any = model.config
    config = full.get_text_config(decoder=True)
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        raise InputError(f"{type(model).__name__}: its configuration does not say num_attention_heads and num_hidden_layers")
    shared = getattr(config, "num_key_value_heads", None) or heads
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    split = sum(size for name, size in sizes.items() if model.get_parameter(name).ndim > 1)
    cache = cache_bytes(full, Layout(), tokens=tokens, itemsize=next(model.parameters()).element_size())
    return Needs(sum(sizes.values()), split, cache, heads, shared, layers)


@leaving_no_group()
def load_model(source: Source, *, tp: int = 1, pp: int = 1, dtype: torch.dtype | None = None) -> ShardedModel:
    """The model on tp x pp processes, each with its own slices of the weights; for `generate`. Collective."""
    model = source.model(dtype)
    here = place()
    if here.world_size != tp * pp:
        raise InputError(f"tp = {tp} x pp = {pp} are {tp * pp} processes, and {here.world_size} were started")
    parallel = {"tp": tp, "pp": pp, **({"sequence_parallel": False} if tp > 1 else {})}
    settings = load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "parallel": parallel})
    resolved = resolve(settings, world_size=here.world_size, hidden_size=getattr(model.config, "hidden_size", None))
    checked = checked_model(model, resolved)
    mesh, parts, _ = shard(checked, weights=source.filler())
    model.requires_grad_(False)
    return ShardedModel(parts, mesh, resolved, forward=default_forward, handle="plait generate")
