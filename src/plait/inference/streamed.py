"""A model that is larger than the memory where it computes: which of its blocks are streamed, from
where, and the model with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from plait._torch.modules import own_parameters
from plait.cluster.host_memory import trim_heap
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.adapters import base_tensor, is_adapters
from plait.inference.layer_files import scratch_folder, write_layers
from plait.inference.load import on_huge_pages
from plait.inference.reading import buffer_bytes
from plait.inference.source import Source
from plait.inference.stored import Stored, read_into, stored_tensors
from plait.inference.stream import SLOTS, WeightStream, block_bytes, brought, pinned_bytes
from plait.model.blocks import find_blocks
from plait.model.tied import tied_names
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import Filler, leaving_no_group, shard
from plait.sharded.check import checked_model
from plait.sharded.load_weights import sources_of, stored_names, weight_files
from plait.sharded.model import ShardedModel
from plait.units import format_bytes, format_enough_bytes


@dataclass(frozen=True)
class Plan:
    """Of one process. Bytes of weights."""

    streamed: tuple[str, ...]
    """Blocks, in the order in which they run; those that stay lie between them, so that streaming
    has their time, too.
    """
    resident_bytes: int
    """That stay."""
    slot_bytes: int
    """Of the places that streamed blocks compute in."""
    streamed_bytes: int
    """That are brought for every token, or for every piece of the prompts."""
    on_host: tuple[str, ...] = ()
    """Those of `streamed` that are kept in pinned host memory. The others are read from files."""
    read_bytes: int = 0
    """Those of `streamed_bytes` that are read from files."""


class BudgetTooSmall(InputError):
    """A budget that does not hold the layers that are streamed beside what every token needs."""


class Streaming(StepHook):
    """Ends the stream with the model."""

    def __init__(self, stream: WeightStream) -> None:
        self.stream = stream

    def close(self) -> None:
        """The thread and the files."""
        self.stream.close()


def tensors_of(source: Source, model: nn.Module) -> dict[str, Stored]:
    """Where the weights of `model`, of a folder of Transformers, lie; without its adapter's."""
    files = weight_files(source.folder)
    found: dict[str, Stored] = {}
    for path in dict.fromkeys(files.values()):
        found |= stored_tensors(path)
    if source.adapter is None:
        stored_as = stored_names(model, files)
        renamed = {name: stored_as(name) for name in model.state_dict() if stored_as(name) != name}
        return found | {name: found[stored] for name, stored in renamed.items() if stored in found}
    found |= source.adapter.replaced
    names = [
        name for name in model.state_dict() if not is_adapters(name) and base_tensor(name) in found
    ]
    return {name: found[base_tensor(name)] for name in names}


def tensors_in_files(source: Source, model: nn.Module) -> dict[str, Stored]:
    """Where tensors lie in the files of a folder of Transformers, or in those of a checkpoint, in
    parts.
    """
    if source.checkpoint is None:
        return tensors_of(source, model)
    files = sorted(Path(str(source.checkpoint.path)).glob("*.safetensors"))
    return {
        f"{path.name} {name}": one for path in files for name, one in stored_tensors(path).items()
    }


def tensors_to_stream(source: Source | None, model: nn.Module) -> tuple[dict[str, Stored], str]:
    """Where the weights of `model`, on meta, lie when they are streamed, and why its layers are
    written to new files first: "" where they are read where they lie. Raises InputError for files
    of another model.
    """
    if source is None:
        return expected_tensors(model), ""
    if source.checkpoint is not None:
        return expected_tensors(model), "the tensors of a checkpoint lie in parts"
    stored = tensors_of(source, model)
    if source.adapter is None:
        sources_of(
            model, model.state_dict(keep_vars=True), weight_files(source.folder), source.folder
        )
    for block in _movable(model):
        for leaf, parameter in brought(model, block).items():
            name = f"{block}.{leaf}"
            if (one := stored.get(name)) is None:
                raise InputError(
                    f"{name} is not in the folder's files under that name, so its layer cannot be"
                    " streamed"
                )
            if one.shape != tuple(parameter.shape):
                raise InputError(
                    f"{one.path}: {name} is {list(one.shape)}, and the model's is"
                    f" {list(parameter.shape)}; is it another model's?"
                )
            if one.dtype != parameter.dtype:
                kinds = [
                    str(dtype).removeprefix("torch.") for dtype in (parameter.dtype, one.dtype)
                ]
                return (
                    expected_tensors(model),
                    f"they compute in {kinds[0]}, and are stored in {kinds[1]}",
                )
    return stored, ""


def plan(
    model: nn.Module,
    stored: dict[str, Stored],
    *,
    budget_bytes: int,
    other_bytes: int,
    host_bytes: int = 0,
) -> Plan:
    """`model` is on meta. The budget is of the memory where it computes; `other_bytes` of it are
    for other things than weights: keys and values, activations. `host_bytes` of host memory may be
    pinned, where it computes elsewhere than on the CPU. Raises InputError, with the numbers, where
    one of them is too small.
    """
    sizes = _movable(model)
    movable = list(sizes)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if total + other_bytes <= budget_bytes:
        return Plan((), total, 0, 0)
    slots = _slot_bytes(model, stored, movable, on_cpu=not host_bytes)
    outside = total - sum(sizes.values())
    room = budget_bytes - outside - other_bytes - slots
    if room < 0 or not movable:
        raise BudgetTooSmall(
            f"a budget of {format_bytes(budget_bytes)} is too small: weights outside of the"
            f" repeated layers and adapters take {format_bytes(outside)}, {SLOTS} layers"
            f" {format_bytes(slots)}, keys, values and activations {format_bytes(other_bytes)};"
            f" give at least {format_enough_bytes(outside + slots + other_bytes)}, or ask for fewer"
            " tokens or prompts at once"
        )
    count = min(len(movable), max(1, -(-(sum(sizes.values()) - room) // max(sizes.values()))))
    chosen = tuple(movable[(2 * index + 1) * len(movable) // (2 * count)] for index in range(count))
    streamed = sum(sizes[name] for name in chosen)
    on_host = _kept_on_host(model, stored, chosen, host_bytes)
    return Plan(
        chosen,
        total - streamed,
        slots,
        streamed,
        on_host,
        streamed - sum(sizes[name] for name in on_host),
    )


def least_budget(model: nn.Module, stored: dict[str, Stored], *, other_bytes: int) -> int:
    """Bytes with which every block is streamed that can be."""
    sizes = _movable(model)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return (
        total
        - sum(sizes.values())
        + _slot_bytes(model, stored, list(sizes), on_cpu=True)
        + other_bytes
    )


def _movable(model: nn.Module) -> dict[str, int]:
    """Blocks that share no weight with another module, and their bytes."""
    tied = {name for group in tied_names(model) for name in group}
    found = {}
    for name in find_blocks(model):
        parameters = brought(model, name)
        if not any(f"{name}.{leaf}" in tied for leaf in parameters):
            found[name] = sum(p.numel() * p.element_size() for p in parameters.values())
    return found


def _slot_bytes(
    model: nn.Module, stored: dict[str, Stored], blocks: Sequence[str], *, on_cpu: bool
) -> int:
    """Of the places for weights, and on the CPU of what files are read into before."""
    largest = max((block_bytes(model, name, stored, on_cpu=on_cpu) for name in blocks), default=0)
    return min(SLOTS, len(blocks)) * largest + (buffer_bytes(largest) if on_cpu else 0)


def _kept_on_host(
    model: nn.Module, stored: dict[str, Stored], streamed: tuple[str, ...], host_bytes: int
) -> tuple[str, ...]:
    """All of `streamed` where they fit into `host_bytes`, else some, evenly, beside the staging
    buffers of the others. Raises InputError where not even those fit.
    """
    if not host_bytes:
        return ()
    each = [pinned_bytes(block_bytes(model, name, stored, on_cpu=False)) for name in streamed]
    if sum(each) <= host_bytes:
        return streamed
    staging = min(SLOTS, len(each)) * max(each)
    if staging > host_bytes:
        raise InputError(
            f"{format_bytes(host_bytes)} of host memory are too little: {min(SLOTS, len(streamed))}"
            f" layers that are read from files take {format_bytes(staging)}"
        )
    count = (host_bytes - staging) // max(each)
    return tuple(streamed[(2 * index + 1) * len(streamed) // (2 * count)] for index in range(count))


def expected_tensors(model: nn.Module) -> dict[str, Stored]:
    """The same, of files that a model on meta would be written to."""
    return {
        name: Stored(Path(), 0, p.numel() * p.element_size(), p.dtype, tuple(p.shape))
        for name, p in model.named_parameters()
        if not is_adapters(name)
    }


@leaving_no_group()
def load_streamed(
    source: Source,
    *,
    budget_bytes: int,
    other_bytes: int,
    host_bytes: int = 0,
    dtype: torch.dtype | None = None,
    scratch: Path | None = None,
) -> tuple[ShardedModel, Plan]:
    """Load the model in one process, on its device, within the budget (see `plan`).

    Streamed layers that no files hold as they compute (see `tensors_to_stream`) are first written
    to files without a name in the folder `scratch` (the system's for temporary files). Raises
    InputError if the model cannot be loaded.
    """
    model = source.model(dtype)
    stored, written = tensors_to_stream(source, model)
    planned = plan(
        model, stored, budget_bytes=budget_bytes, other_bytes=other_bytes, host_bytes=host_bytes
    )
    resolved = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}), world_size=1
    )
    checked = checked_model(model, resolved)
    with ExitStack() as stack:
        if written:
            stored = {}
            if planned.streamed:
                folder = stack.enter_context(scratch_folder(scratch, planned.streamed_bytes))
                stored = write_layers(source, model, planned.streamed, folder)
        mesh, parts, _ = shard(
            checked, weights=on_huge_pages(_filler(source, stored, _empty(model, planned.streamed)))
        )
        model.requires_grad_(False)
        if planned.streamed:
            streaming = Streaming(
                WeightStream(
                    model, planned.streamed, stored, device=mesh.device, on_host=planned.on_host
                )
            )
            parts = parts.with_(hooks=Hooks((*parts.hooks.all, streaming)))
    return (
        ShardedModel(parts, mesh, resolved, forward=default_forward, handle="plait generate"),
        planned,
    )


def _filler(source: Source, stored: dict[str, Stored], streamed: frozenset[str]) -> Filler:
    """What gives a model the weights that stay."""

    def fill(model: nn.Module, *, whole: nn.Module, filled: Callable[[torch.Tensor], None]) -> None:
        leaving = streamed | _read_resident(model, stored, streamed)
        others = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if name not in leaving
        }
        for some in _by_layer(others, find_blocks(whole)):
            source.fill(some, whole=whole)
            trim_heap()
        for tensor in others.values():
            filled(tensor)

    return fill


def _by_layer(
    tensors: dict[str, torch.Tensor], blocks: Sequence[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Those of a layer together, since the parts of files that are read together are in memory at
    once, and others one by one.
    """
    of = {
        name: next((block for block in blocks if name.startswith(f"{block}.")), name)
        for name in tensors
    }
    for key in dict.fromkeys(of.values()):
        yield {name: tensor for name, tensor in tensors.items() if of[name] == key}


def _read_resident(
    model: nn.Module, stored: dict[str, Stored], streamed: frozenset[str]
) -> frozenset[str]:
    """Read what stays straight into its place, and return its names: a file that is mapped would
    take the memory twice. What is stored in another dtype, or stays on another device, is left out.
    """
    done = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        one = stored.get(name)
        if (
            tensor.device.type != "cpu"
            or one is None
            or name in streamed
            or one.dtype != tensor.dtype
            or one.shape != tuple(tensor.shape)
        ):
            continue
        if not one.size or not tensor.is_contiguous():
            continue
        file = os.open(one.path, os.O_RDONLY)
        try:
            read_into(
                file,
                memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data),
                one,
                threading.Event(),
            )
        finally:
            os.close(file)
        done.add(name)
    return frozenset(done)


def _empty(model: nn.Module, blocks: Sequence[str]) -> frozenset[str]:
    """Replace the parameters of streamed blocks, on meta, by ones without elements; returns their
    names.
    """
    names = [f"{block}.{leaf}" for block in blocks for leaf in brought(model, block)]
    for name in names:
        owner, _, leaf = name.rpartition(".")
        own = own_parameters(model.get_submodule(owner))
        held = own[leaf]
        assert held is not None
        own[leaf] = nn.Parameter(
            torch.empty(0, dtype=held.dtype, device="meta"), requires_grad=False
        )
    return frozenset(names)
