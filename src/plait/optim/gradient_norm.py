"""The global norm of gradients that are sharded over some axes and replicated over the others, by one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from plait._torch.dtensor import local_tensor
from plait.cluster.mesh import Mesh
from plait.optim.disk_optimizer import DiskTier
from plait.optim.gradient_math import norms_of
from plait.parallel.reduction import Reduction, sharded_axes


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """min(1, largest / (norm + 1e-6)), torch's and DeepSpeed's rule."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


def global_norm(grads: Iterable[torch.Tensor], mesh: Mesh, *, tier: DiskTier | None = None) -> torch.Tensor:
    """Euclidean norm over every element of every gradient, each counted once whatever the layout; float64, 0-dimensional. `tier`: where
    gradients are, if not all in memory at once. Collective over the model-parallel ranks."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(sharded_axes(grad), []).append(local_tensor(grad))
    walked = {axes: [members] if tier is None else tier.walk(members) for axes, members in by_axes.items()}
    return norm_of_norms([(axes, norm) for axes, parts in walked.items() for some in parts for norm in norms_of(some)], mesh)


def norm_of_norms(norms: Iterable[tuple[tuple[str, ...], torch.Tensor]], mesh: Mesh) -> torch.Tensor:
    """`global_norm`, the same bits, from (sharded axes, `norms_of` this rank's part) of every gradient."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, norm in norms:
        by_axes.setdefault(axes, []).append(norm)
    return _over_ranks({axes: _joined(found) for axes, found in by_axes.items()}, mesh)


def _joined(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]), 2.0)


def _over_ranks(by_axes: dict[tuple[str, ...], torch.Tensor], mesh: Mesh) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes, norm in sorted(by_axes.items(), key=lambda entry: entry[0]):
        square = (norm**2).to(mesh.device)  # gradients may be on the host
        # What another rank counts is added as 0, which keeps a norm that is not finite.
        total = total + (square if Reduction(axes).counts_at(mesh.coordinates) else square * 0)
    group = mesh.group(*mesh.norm_axes)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()
