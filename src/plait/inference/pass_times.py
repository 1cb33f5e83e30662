"""How long this machine takes for a forward of a model, measured on a few of its layers with random weights.

A model of the first layers is built, quantised where the whole is to be, and generates. From its times with one layer and with several
follow the time of a layer and of what is outside of the layers; from two lengths of prompts how they grow with the length. So no weights
are read, and a model that is larger than the memory can be measured.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

import torch
from torch import nn

from plait._torch.modules import own_children
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.generate import generate
from plait.inference.load import QuantisingFiller
from plait.model.blocks import find_blocks
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import shard
from plait.sharded.check import checked_model
from plait.sharded.model import ShardedModel
from plait.units import format_bytes

T = TypeVar("T")
SAMPLE_BYTES = 256 << 20
"""Of the layers that are measured, where the model has more: several times what processors keep in their caches."""
SAMPLE_FLOPS = 1.5e11
"""Of a measured pass over prompts: seconds on a core."""
NEW = 10
"""Tokens that are measured after a prompt; the first of them is the prompt's."""

TIMES, QUICK_SECONDS = 4, 2.0
"""How often a length is measured, if that is quick."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a batch of requests, with all weights where they compute."""

    first: float
    """Over the prompts, to the first token."""
    token: float
    """For one token of each, on average over a generation."""
    layers: float
    """The part of `token` in the repeated layers."""
    source: str
    """For a person."""


@dataclass(frozen=True)
class _Times:
    first: float
    token: float

    def beyond(self, other: _Times, factor: float) -> _Times:
        """This one, and `factor` times its difference to `other`, which is of less."""
        more = _Times(max(0.0, self.first - other.first), max(0.0, self.token - other.token))
        return _Times(self.first + factor * more.first, self.token + factor * more.token)


class _Random:
    """Weights of no meaning. The same few million values again and again: drawing each would take longer than measuring."""

    def __init__(self) -> None:
        self._values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02

    def fill(self, tensors: Mapping[str, torch.Tensor], *, whole: nn.Module) -> None:
        """See `load.Weights`."""
        for tensor in tensors.values():
            flat = tensor.data.view(-1)
            for at in range(0, flat.numel(), self._values.numel()):
                piece = flat[at : at + self._values.numel()]
                piece.copy_(self._values[: piece.numel()])


def measure_passes(model: nn.Module, *, prompt: int, new: int, requests: int, quant: str | None, memory_bytes: int) -> PassTimes:
    """Of `model`, unquantised and on meta, on this process's device: `requests` prompts of `prompt` tokens that get `new` tokens each.
    `memory_bytes` may be used. Raises InputError where not even one layer fits."""
    blocks, count = sampled(model, memory_bytes)
    lengths = lengths_of(model, count, len(blocks), prompt=prompt, new=new, requests=requests)
    several = _measured(model, blocks, count, lengths, requests=requests, new=new, quant=quant)
    found, layers = several, 1.0
    if count < len(blocks):
        one = _measured(model, blocks, 1, lengths, requests=requests, new=new, quant=quant)
        factor = (len(blocks) - count) / max(count - 1, 1)
        found = [many.beyond(few, factor) for many, few in zip(several, one, strict=True)]
        layers = (several[0].token - one[0].token) / max(count - 1, 1) * len(blocks) / found[0].token
    first, token = _at(lengths, found, prompt=prompt, new=new)
    of = "all" if count == len(blocks) else f"1 and {count} of the {len(blocks)}"
    at = " and ".join(f"{length:,}" for length in lengths)
    source = f"measured here on {of} layers with random weights, {requests} prompts of {at} tokens, {torch.get_num_threads()} threads"
    return PassTimes(first, token, max(0.0, min(1.0, layers)) * token, source)


def sampled(model: nn.Module, memory_bytes: int) -> tuple[Sequence[str], int]:
    """(the repeated layers, how many of them are measured) of a model on meta. Raises InputError where not even one fits."""
    blocks = find_blocks(model)
    if not blocks:
        raise InputError(f"{type(model).__name__} has no repeated layers to measure")
    each = max(sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters()) for name in blocks)
    outside = sum(p.numel() * p.element_size() for p in model.parameters()) - each * len(blocks)
    room = int(0.5 * memory_bytes) - max(outside, 0)  # random weights, and those of a layer that is being quantised
    if each > room:
        raise InputError(
            f"a layer of {format_bytes(each)} cannot be measured in {format_bytes(memory_bytes)} beside {format_bytes(max(outside, 0))} "
            "outside of the layers; name a device of the catalogue with --gpu, to compute with its datasheet"
        )
    return blocks, min(len(blocks), max(2, SAMPLE_BYTES // each), max(1, room // each))


def lengths_of(model: nn.Module, count: int, blocks: int, *, prompt: int, new: int, requests: int) -> list[int]:
    """Of the prompts that are measured: those of the beginning and of the end of the generation, or two shorter ones."""
    parameters = sum(p.numel() for p in model.parameters()) * count / blocks
    most = max(16, int(SAMPLE_FLOPS / (2 * parameters * requests)))
    last = prompt + max(0, new - NEW)
    if last <= most:
        return sorted({prompt, last})
    return [most // 2, most] if prompt > most else sorted({max(prompt, most // 2), most})


def _at(lengths: Sequence[int], times: Sequence[_Times], *, prompt: int, new: int) -> tuple[float, float]:
    """(first, token): the time of a pass over prompts is b n + c n^2 of their length, and that of a token a + b n."""
    if len(lengths) == 1:
        return times[0].first * prompt / lengths[0], times[0].token
    (low, high), (short, long) = lengths, times
    curve = max(0.0, (long.first / high - short.first / low) / (high - low))
    slope = max(0.0, (long.token - short.token) / (high - low))
    linear = (short.first / low + long.first / high - curve * (low + high)) / 2
    first = short.first if prompt == low else linear * prompt + curve * prompt * prompt
    return first, short.token + slope * (prompt + new / 2 - low)


def _measured(
    model: nn.Module, blocks: Sequence[str], count: int, lengths: Sequence[int], *, requests: int, new: int, quant: str | None
) -> list[_Times]:
    """Of the first `count` layers, for every length."""
    sharded = sample_model(model, blocks, count, quant)
    try:
        _generated(sharded, 4, requests, 2)
        return [_best(sharded, length, requests, min(NEW, new)) for length in lengths]
    finally:
        sharded.close()


def sample_model(model: nn.Module, blocks: Sequence[str], count: int, quant: str | None) -> ShardedModel:
    """`model`, which is on meta, with the first `count` of its layers and random weights."""
    small = copy.deepcopy(model)
    for name in reversed(blocks[count:]):
        parent, _, child = name.rpartition(".")
        del own_children(small.get_submodule(parent))[child]
    resolved = resolve(load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}), world_size=1)
    checked = checked_model(small, resolved)
    weights = _Random()
    if quant is None:
        mesh, parts, _ = shard(checked, weights=lambda model, *, whole, filled: weights.fill(model.state_dict(), whole=whole))
    else:
        filler = QuantisingFiller(model, weights, quant)  # a single layer is not known as a repeated one
        mesh, parts, _ = shard(checked, weights=filler, on_meta=filler.convert)
    small.requires_grad_(False)
    return ShardedModel(parts, mesh, resolved, forward=default_forward, handle="plait plan infer")


def _best(sharded: ShardedModel, length: int, requests: int, new: int) -> _Times:
    """Of a few times, as many as are quick: other programs only make it slower."""
    began = time.perf_counter()
    found: list[_Times] = []
    while not found or (len(found) < TIMES and time.perf_counter() - began < QUICK_SECONDS):
        found.append(_generated(sharded, length, requests, new))
    return _Times(min(one.first for one in found), min(one.token for one in found))


def _generated(sharded: ShardedModel, length: int, requests: int, new: int) -> _Times:
    began, first, *more = timeline(sharded, length, requests, new, time.perf_counter)
    after = [later - earlier for earlier, later in pairwise([first, *more])]
    return _Times(first - began, median(after) if after else 0.0)


def timeline(sharded: ShardedModel, length: int, requests: int, new: int, clock: Callable[[], T]) -> list[T]:
    """What `clock` shows when a generation begins, and at each of its `new` tokens."""
    shown = []

    def note(request: int, _: int) -> None:
        if not request:
            shown.append(clock())

    vocabulary = sharded.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    prompt = [index % min(vocabulary, 97) for index in range(length)]
    shown.append(clock())
    generate(sharded, [prompt] * requests, max_new_tokens=new, temperature=0, eos_token_id=[vocabulary + 1], pad_token_id=0, on_token=note)
    return shown
