"""Global norm of gradients that are sharded over some mesh dimensions and replicated over others.

Each element counts once on every layout. The norm needs one all-reduce.
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
    """Return min(1, largest / (norm + 1e-6)), as torch and DeepSpeed do."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


@torch.no_grad()
def global_norm(
    grads: Iterable[torch.Tensor], mesh: Mesh, *, tier: DiskTier | None = None
) -> torch.Tensor:
    """Return the Euclidean norm over all gradients: 0-dimensional, float64.

    Collective over the model-parallel ranks.

    Args:
        grads: Gradients of this rank, plain or DTensor.
        mesh: Mesh of the ranks.
        tier: Files with the gradients, if they are not all in memory at once.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(sharded_axes(grad), []).append(local_tensor(grad))

    local_norms: dict[tuple[str, ...], torch.Tensor] = {}
    for axes, members in by_axes.items():
        if tier is None:
            norms = norms_of(members)
        else:
            norms = [norm for buffered in tier.walk(members) for norm in norms_of(buffered)]
        local_norms[axes] = joined_norm(norms)
    return _norm_over_ranks(local_norms, mesh)


@torch.no_grad()
def norm_of_norms(
    norms: Iterable[tuple[tuple[str, ...], torch.Tensor]], mesh: Mesh
) -> torch.Tensor:
    """Return the result of `global_norm`, with the same bits, from norms of local gradients.

    Collective over the model-parallel ranks.

    Args:
        norms: (sharded mesh dimensions, `norms_of` this rank's shard) of every gradient, in the
            order of `global_norm`.
        mesh: Mesh of the ranks.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, norm in norms:
        by_axes.setdefault(axes, []).append(norm)
    return _norm_over_ranks({axes: joined_norm(members) for axes, members in by_axes.items()}, mesh)


def _norm_over_ranks(by_axes: Mapping[tuple[str, ...], torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Return the global norm from local norms, keyed by the mesh dimensions of their shards."""
    squares = []
    # Sorted, so that the rounding of the sum does not depend on the order of parameters.
    for axes, norm in sorted(by_axes.items(), key=lambda entry: entry[0]):
        square = (norm**2).to(mesh.device)  # Gradients may be on the host.
        # If another rank counts a replica, 0 times the square is added here. This keeps NaN and
        # infinity.
        squares.append(square if Reduction(axes).counts_at(mesh.coordinates) else square * 0)

    if squares:
        total = sum(squares[1:], squares[0])
    else:
        # A pipeline stage may have nothing to train.
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    group = mesh.group(*mesh.norm_axes)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()
