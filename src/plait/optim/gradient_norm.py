"""The global norm of gradients that are sharded over some axes and replicated over the others, by
one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from plait._torch.dtensor import local_tensor
from plait.cluster.mesh import Mesh
from plait.optim.disk_optimizer import DiskTier
from plait.optim.gradient_math import joined_norm, norms_of
from plait.parallel.reduction import Reduction, sharded_axes


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """min(1, largest / (norm + 1e-6)), torch's and DeepSpeed's rule."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


@torch.no_grad()
def global_norm(
    grads: Iterable[torch.Tensor], mesh: Mesh, *, tier: DiskTier | None = None
) -> torch.Tensor:
    """Euclidean norm over every element of every gradient, each counted once whatever the layout;
    float64, 0-dimensional. `tier`: where gradients are, if not all in memory at once. Collective
    over the model-parallel ranks.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(sharded_axes(grad), []).append(local_tensor(grad))
    if tier is None:
        norms = {axes: norms_of(members) for axes, members in by_axes.items()}
    else:
        norms = {
            axes: [n for part in tier.walk(members) for n in norms_of(part)]
            for axes, members in by_axes.items()
        }
    return _over_ranks({axes: joined_norm(members) for axes, members in norms.items()}, mesh)


@torch.no_grad()
def norm_of_norms(
    norms: Iterable[tuple[tuple[str, ...], torch.Tensor]], mesh: Mesh
) -> torch.Tensor:
    """`global_norm`, the same bits, from (sharded axes, `norms_of` this rank's part) of every
    gradient.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, norm in norms:
        by_axes.setdefault(axes, []).append(norm)
    return _over_ranks({axes: joined_norm(members) for axes, members in by_axes.items()}, mesh)


def _over_ranks(by_axes: Mapping[tuple[str, ...], torch.Tensor], mesh: Mesh) -> torch.Tensor:
    squares = []
    for axes, norm in sorted(by_axes.items(), key=lambda entry: entry[0]):
        square = (norm**2).to(mesh.device)  # gradients may be on the host
        # What another rank counts is added as 0, which keeps a norm that is not finite.
        squares.append(square if Reduction(axes).counts_at(mesh.coordinates) else square * 0)
    # A pipeline stage may have nothing to train.
    total = (
        sum(squares[1:], squares[0])
        if squares
        else torch.zeros((), dtype=torch.float64, device=mesh.device)
    )
    group = mesh.group(*mesh.norm_axes)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()
