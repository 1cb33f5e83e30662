"""Numerical check of a split of one module, without a process group or knowledge of its code.

Note [Check of a split]
    The module runs alone on the CPU with random weights: once in full, and once per part with its
    slice of the columns and rows. The outputs of the parts must add up to the full output at a
    random point. Both are the same formula in the weights and inputs, so they then agree for all
    weights and inputs, and their gradients agree as well. A split of a module that cannot run alone
    is not accepted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from plait._torch.modules import own_buffers, own_parameters
from plait.model.heads import HEADS, KV_HEADS, count_attributes
from plait.model.layers import count_parameters, in_features, out_features, split_dims
from plait.model.rules import Style
from plait.shards import shard_length, shard_lengths

MAX_PARAMETERS = 2**28
"""Largest number of parameters of a module that is run.

In float32 they are 1 GiB, and the parts need as much again.
"""
_MAX_FLOAT64_PARAMETERS = 2**22
"""Largest number of parameters of a module that is run in float64."""
_MAX_LAYERS = 6
"""Largest number of linear layers for which a split is searched."""


def checked_split(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Style] | None:
    """Find a correct split of a module into column-split layers and one row-split layer.

    See Note [Check of a split]. The module's head counts, under their usual names, are divided by
    the number of parts.

    Args:
        module: The module.
        layers: Its linear children, by name.

    Returns:
        Styles of the linear children and of all other children with parameters. None if no such
        split is correct, or none can be tested.
    """
    if not 2 <= len(layers) <= _MAX_LAYERS or not can_be_run(module):
        return None
    counts = [name for name in count_attributes(module) if name in (*HEADS, *KV_HEADS)]
    parts = _number_of_parts(module, counts)
    if parts is None:
        return None

    # The row-split layer is usually the last one.
    for row in reversed(list(layers)):
        columns = [leaf for leaf in layers if leaf != row]
        width = in_features(layers[columns[0]])
        widths = {in_features(layers[leaf]) for leaf in columns} | {out_features(layers[row])}
        if widths != {width}:
            continue
        split: dict[str, Style] = {**dict.fromkeys(columns, "colwise"), row: "rowwise"}
        if _adds_up(module, split, parts, counts, width):
            # Every part uses the other parameters, so their gradients are sums over the parts.
            for leaf, child in module.named_children():
                if leaf not in split and next(child.parameters(), None) is not None:
                    split[leaf] = "replicated_with_grad_allreduce"
            return split
    return None


def can_be_run(module: nn.Module) -> bool:
    """Return True if a module takes one tensor and is small enough to run alone."""
    if not takes_one_tensor(module):
        return False
    return count_parameters(module) <= MAX_PARAMETERS


def takes_one_tensor(module: nn.Module) -> bool:
    """Return True if a module can run alone, with random weights, on one tensor.

    Its forward requires one argument, it has no parameters outside of its children, and the values
    of its buffers are available.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    required = []
    for parameter in parameters:
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            required.append(parameter)
    return (
        len(required) == 1
        and required[0].kind is not inspect.Parameter.KEYWORD_ONLY
        and next(module.parameters(recurse=False), None) is None
        and all(buffer.device.type != "meta" for buffer in module.buffers())
    )


def _number_of_parts(module: nn.Module, counts: Sequence[str]) -> int | None:
    """Return the smallest number above 1 that divides every head count, or None."""
    values = [int(getattr(module, name)) for name in counts]
    for parts in range(2, min(values, default=2) + 1):
        if all(value % parts == 0 for value in values):
            return parts
    return None


def _adds_up(
    module: nn.Module, split: Mapping[str, Style], parts: int, counts: Sequence[str], width: int
) -> bool:
    """Return True if the outputs of the parts of a module add up to its output."""
    dtype = torch.float64
    tolerance = 1e-9
    if count_parameters(module) > _MAX_FLOAT64_PARAMETERS:
        dtype = torch.float32
        tolerance = 1e-3

    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            full = _random_copy(module, dtype, generator)
            x = torch.randn(2, 5, width, dtype=dtype, generator=generator)
            expected = _output_tensor(full(x.clone()))
            total = torch.zeros_like(expected)
            for index in range(parts):
                part = _part_of(full, split, index, parts, counts)
                total += _output_tensor(part(x.clone()))
        except Exception:  # unknown code that cannot run alone, or not in parts, proves nothing
            return False
    return bool(((total - expected).abs().max() <= tolerance * expected.abs().max()).item())


def _random_copy(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Copy a module to the CPU, in evaluation mode and with random parameters.

    The size of the parameters keeps the outputs about as large as the inputs.
    """
    copied = copy.deepcopy(module).eval()
    # `to_empty` discards the values of buffers as well.
    buffers = {name: buffer.detach().to("cpu") for name, buffer in copied.named_buffers()}
    copied = copied.to_empty(device="cpu").to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        if buffer.is_floating_point():
            buffer = buffer.to(dtype)
        own_buffers(copied.get_submodule(owner))[leaf] = buffer

    for parameter in copied.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(generator=generator)
        if parameter.ndim > 1:
            parameter.mul_(min(parameter.shape) ** -0.5)
    return copied


def _part_of(
    full: nn.Module, split: Mapping[str, Style], index: int, parts: int, counts: Sequence[str]
) -> nn.Module:
    """Return what one of `parts` ranks would compute, without the sum over the ranks.

    Only the first part adds the bias of the row-split layer. Replicated parameters are shared with
    `full`.
    """
    memo = {id(parameter): parameter for parameter in full.parameters()}
    part = copy.deepcopy(full, memo)
    for leaf, style in split.items():
        layer = part.get_submodule(leaf)
        for name, dim in split_dims(layer, style).items():
            parameter = own_parameters(layer).get(name)
            if parameter is None:
                continue
            if dim is not None:
                lengths = shard_lengths(parameter.shape[dim], parts)
                shard = parameter.split(lengths, dim=dim)[index]
                own_parameters(layer)[name] = nn.Parameter(shard, requires_grad=False)
            elif index > 0:
                own_parameters(layer)[name] = None
        # Some code reads the size of a layer.
        for attribute in ("out_features", "nf") if style == "colwise" else ("in_features", "nx"):
            if hasattr(layer, attribute):
                size = int(getattr(layer, attribute))
                setattr(layer, attribute, shard_length(size, parts, index))
    for name in counts:
        setattr(part, name, int(getattr(part, name)) // parts)
    return part


def _output_tensor(output: object) -> torch.Tensor:
    """Return the only tensor of a module's output.

    Raises:
        ValueError: There are more, and their meaning is unknown.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple) and output:
        first, *others = output
        if isinstance(first, torch.Tensor) and all(entry is None for entry in others):
            return first
    raise ValueError("not one tensor")
