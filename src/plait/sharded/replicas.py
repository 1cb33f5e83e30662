"""Whether ranks that hold the same tensor hold the same bits: a sum over the bits of every
parameter and optimizer state, compared.

Replicas are computed from the same bits by the same operations, so that a difference is a fault: of
memory, of a processor, of code that treats ranks differently. What is sharded over all axes has no
replica, and is not compared.
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
from plait.comm.hang import names as rank_names
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, NumbersError, Problem
from plait.parallel.reduction import sharded_axes

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_without_replicas(resolved: Resolved) -> None:
    """Raise ConfigError where a comparison is asked for and nothing is replicated."""
    at = resolved.layout
    every = resolved.faults.compare_replicas_every
    if every and at.dp_replicate == at.cp == at.tp == 1:
        rule = f"no process has a copy of what another one has: the layout is {at}"
        raise ConfigError(
            Problem(
                "faults.compare_replicas_every",
                every,
                rule,
                "use 0, or a layout with dp_replicate, tp or cp",
            )
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, taken as integers, modulo 2**64; int64, 0-dimensional. One
    flipped bit changes it.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)


def compare_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, *, step: int
) -> None:
    """Raise NumbersError, on all ranks, naming the first tensor that differs and the ranks.
    Collective over all ranks.
    """
    tensors = list(_tensors(model, optimizer))
    wrong: list[tuple[str, str]] = []
    for axis in (*AXES, *EXPERT_AXES):
        group = mesh.group(axis)
        if group is None or axis == "pp":
            continue
        replicated = [
            (name, tensor) for name, tensor, axes in tensors if _is_replicated(axes, over=axis)
        ]
        if not replicated:
            continue
        own = torch.stack([bits_of(tensor) for _, tensor in replicated]).to(mesh.device)
        everyone = own.new_empty(group.size() * own.numel())
        all_gather_single(everyone, own, group=group)
        rows = everyone.view(group.size(), -1).cpu()
        differs = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        if differs:
            wrong.append(
                (
                    replicated[differs[0]][0],
                    _minority(rows[:, differs[0]], dist.get_process_group_ranks(group), axis),
                )
            )
    told: list[list[tuple[str, str]]] = [wrong]
    if dist.is_initialized() and dist.get_world_size() > 1:
        flag = torch.tensor([len(wrong)], device=mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        told = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, wrong)
    found = [one for rows_of in told for one in rows_of]
    if found:
        name, who = found[0]
        error = NumbersError(
            f"step {step}: replicas of {name} differ: {who}. A bit was flipped there (memory,"
            " processor), or code treats ranks differently. Go on from the last checkpoint; if it"
            " happens again, without that device"
        )
        error.of_batch = False
        raise error


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
    """(name, this rank's part, axes over which it is split)."""
    for name, parameter in model.named_parameters():
        axes = sharded_axes(parameter)
        yield f"`{name}`", local_tensor(parameter), axes
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield (
                    f"`{key}` of `{name}`",
                    local_tensor(value),
                    sharded_axes(value) or (axes if value.numel() > 1 else ()),
                )


def _is_replicated(axes: tuple[str, ...], *, over: str) -> bool:
    """Whether a tensor that is split over `axes` is the same along an axis: experts know the second
    view of the ranks, all else the first.
    """
    other_view = STAGE_AXES if "ep" in axes else EXPERT_AXES
    return over not in axes and over not in other_view


def _minority(sums: torch.Tensor, ranks: list[int], axis: str) -> str:
    """Who differs from most."""
    values = sums.tolist()
    usual = max(set(values), key=values.count)
    most = values.count(usual)
    others = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    if 2 * most <= len(values):
        return f"{rank_names(ranks)} along {axis}, of which none is the majority"
    verb = "has" if len(others) == 1 else "have"
    return f"{rank_names(others)} {verb} other bits than the {most} others along {axis}"
