"""Comparison of replicas: ranks that hold the same tensor must hold the same bits.

Replicas are computed from the same bits by the same operations, so a difference is a fault of
memory, of a processor, or of code that treats ranks differently. The comparison is of a sum over
the bits of every parameter and optimizer state. A tensor that is sharded over all mesh dimensions
has no replica and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait._torch.flat_collectives import all_gather_single
from plait.cluster.layout import AXES, EXPERT_AXES, STAGE_AXES
from plait.cluster.mesh import Mesh
from plait.cluster.small_messages import all_gather_objects, max_over_ranks
from plait.comm.hang import format_ranks as rank_names
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, NumbersError, Problem
from plait.parallel.reduction import sharded_axes

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for each element size in bytes."""

Difference = tuple[str, str]
"""Name of a tensor, and a description of the ranks that differ."""


def refuse_without_replicas(resolved: Resolved) -> None:
    """Raise ConfigError if replicas are to be compared and the layout has none."""
    layout = resolved.layout
    every = resolved.faults.compare_replicas_every
    if every and layout.dp_replicate == layout.cp == layout.tp == 1:
        rule = f"no process has a copy of what another one has: the layout is {layout}"
        remedy = "use 0, or a layout with dp_replicate, tp or cp"
        raise ConfigError(Problem("faults.compare_replicas_every", every, rule, remedy))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements, read as integers, modulo 2**64: 0-dimensional, int64.

    One flipped bit changes it.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGER_DTYPES[flat.element_size()]).sum(dtype=torch.int64)


def compare_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, *, step: int
) -> None:
    """Compare all replicas of parameters and optimizer states. Collective over all ranks.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        mesh: Mesh of the ranks.
        step: Number of the step, for the error.

    Raises:
        NumbersError: Replicas differ. It names the first tensor and the ranks, on all ranks.
    """
    local = _local_differences(model, optimizer, mesh)
    differences = _all_gather_differences(local, mesh)
    if not differences:
        return
    name, description = differences[0]
    error = NumbersError(
        f"step {step}: replicas of {name} differ: {description}. A bit was flipped there (memory,"
        " processor), or code treats ranks differently. Go on from the last checkpoint; if it"
        " happens again, without that device"
    )
    error.of_batch = False
    raise error


def _local_differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh
) -> list[Difference]:
    """Return the first difference along each mesh dimension, from this rank's groups."""
    tensors = list(_tensors(model, optimizer))
    differences: list[Difference] = []
    for axis in (*AXES, *EXPERT_AXES):
        group = mesh.group(axis)
        if group is None or axis == "pp":
            continue
        replicated = [
            (name, tensor) for name, tensor, axes in tensors if _is_replicated(axes, over=axis)
        ]
        if not replicated:
            continue

        # sums: [tensors]; rows: [ranks, tensors]
        sums = torch.stack([bits_of(tensor) for _, tensor in replicated]).to(mesh.device)
        gathered = sums.new_empty(group.size() * sums.numel())
        all_gather_single(gathered, sums, group=group)
        rows = gathered.view(group.size(), -1).cpu()

        differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        if differing:
            first = differing[0]
            ranks = dist.get_process_group_ranks(group)
            description = _describe_minority(rows[:, first], ranks, axis)
            differences.append((replicated[first][0], description))
    return differences


def _all_gather_differences(local: list[Difference], mesh: Mesh) -> list[Difference]:
    # Usually there is none. One number is cheaper to exchange than Python objects.
    if not max_over_ranks([len(local)], dist.group.WORLD, device=mesh.device)[0]:
        return []
    return [difference for differences in all_gather_objects(local) for difference in differences]


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
    """Yield (name, local shard, mesh dimensions that it is sharded over) of every tensor."""
    for name, parameter in model.named_parameters():
        axes = sharded_axes(parameter)
        yield f"`{name}`", local_tensor(parameter), axes
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(value, torch.Tensor):
                continue
            # A plain state is shaped like the local shard of its parameter, or is a scalar.
            state_axes = sharded_axes(value)
            if not state_axes and value.numel() > 1:
                state_axes = axes
            yield f"`{key}` of `{name}`", local_tensor(value), state_axes


def _is_replicated(axes: tuple[str, ...], *, over: str) -> bool:
    """Return True if a tensor that is sharded over `axes` has replicas along another dimension.

    Experts use a second view of the ranks (EXPERT_AXES), and all other parameters the first.
    """
    other_view = STAGE_AXES if "ep" in axes else EXPERT_AXES
    return over not in axes and over not in other_view


def _describe_minority(sums: torch.Tensor, ranks: list[int], axis: str) -> str:
    """Return a description of the ranks whose sum is not that of most ranks.

    Args:
        sums: Sum of each rank, [ranks].
        ranks: Global rank numbers, in the same order.
        axis: Mesh dimension of the group.
    """
    values = sums.tolist()
    usual = max(set(values), key=values.count)
    usual_count = values.count(usual)
    others = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    if 2 * usual_count <= len(values):
        return f"{rank_names(ranks)} along {axis}, of which none is the majority"
    verb = "has" if len(others) == 1 else "have"
    return f"{rank_names(others)} {verb} other bits than the {usual_count} others along {axis}"
