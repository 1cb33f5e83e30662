"""Forward of a layer whose experts are distributed over ranks.

Note [Dispatch of tokens]
    An all-to-all sends tokens to the ranks of their experts. There the original forward of the
    module applies the experts, and another all-to-all returns the results. No token is dropped:
    every token reaches each expert that its router has chosen. The routing weights are not sent, so
    the gradient of a router is computed on the ranks that have the tokens.

    All ranks make the same calls, even those without tokens. The numbers of rows are exchanged
    first, and the host waits for them as late as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from plait._torch.modules import HookKind, direct_parameters, hooks_of
from plait._torch.operators import FakeTensor
from plait._torch.tensors import local_tensor
from plait.cluster.accelerator import HostCopy
from plait.cluster.process_groups import is_fake
from plait.comm.collectives import exchange_counts, exchange_rows, gather, shard_range, split
from plait.parallel.activations.selective import decide_once
from plait.parallel.tensor.hook_checks import is_foreign
from plait.parallel.tensor.styles import Region, replace_values

Forward = Callable[..., torch.Tensor]


Sizes = tuple[list[int], list[int]]
"""Numbers of rows that are sent to each rank, and that are received from each rank."""


_SEES_OUTPUT: tuple[HookKind, ...] = ("forward", "backward_pre", "backward")


def install(
    module: nn.Module,
    group: ProcessGroup,
    *,
    experts_per_rank: int,
    tp: ProcessGroup | None,
    sequence: Region | None,
) -> None:
    """Replace the forward of a module of experts with `Dispatch`.

    Args:
        module: The module, which has the parameters of this rank's experts.
        group: The ranks of ep.
        experts_per_rank: Number of experts of each rank.
        tp: The ranks with the same tokens, or None.
        sequence: The region of sequence parallelism if each rank of tp uses only its shard of the
            output, or None.
    """
    module.forward = Dispatch(module, module.forward, group, experts_per_rank, tp, sequence)
    # Grouped matrix products use this number.
    module.num_experts = experts_per_rank  # type: ignore[assignment]


def remove(module: nn.Module, *, count: int) -> None:
    """Restore the original forward and number of experts of a module."""
    if isinstance(module.__dict__.get("forward"), Dispatch):
        del module.__dict__["forward"]
        module.num_experts = count  # type: ignore[assignment]


@dataclass(frozen=True)
class Dispatch:
    """Replacement for the forward of a module of experts. See Note [Dispatch of tokens]."""

    module: nn.Module
    original: Forward
    """Original forward of the module."""
    group: ProcessGroup
    experts_per_rank: int
    """Number of experts of each rank."""
    tp: ProcessGroup | None = None
    """Ranks that are called with the same tokens and each send a part of them, or None."""
    sequence: Region | None = None
    """Region of sequence parallelism if each rank of tp reads only its shard of the output."""

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs. Collective.

        Args:
            hidden: Tokens [tokens, hidden].
            chosen: Experts of every token [tokens, k], int64.
            weights: Weights of these experts [tokens, k].

        Returns:
            Sums [tokens, hidden].
        """
        if self.tp is None:
            return self._dispatch(hidden, chosen, weights)
        # Some routers have 16-bit weights. Their gradients are gathered over tp in float32.
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if self.sequence is not None and not _is_watched(self.module):
            return self._compute_shard(hidden, chosen, wide, weights.dtype, self.sequence.length)

        # [tokens, ...] -> [tokens / tp, ...]
        local_hidden = split(hidden, self.tp, dim=0)
        local_chosen = split(chosen, self.tp, dim=0)
        local_weights = split(wide, self.tp, dim=0).to(weights.dtype)
        outputs = self._dispatch(local_hidden, local_chosen, local_weights)
        return gather(outputs, self.tp, dim=0, length=len(hidden))

    def _compute_shard(
        self,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        dtype: torch.dtype,
        length: int,
    ) -> torch.Tensor:
        """Compute the outputs of this rank's shard of every sequence. Other outputs are 0.

        Outputs and gradients of tokens are not gathered, because each rank only needs those of its
        shard. Gradients of routing weights are gathered, because all ranks compute the routers for
        all tokens.
        """
        assert self.tp is not None
        rows = len(hidden) // length
        width = hidden.shape[-1]
        start, size = shard_range(length, self.tp)

        def shard(values: torch.Tensor) -> torch.Tensor:
            # [rows x length, n] -> [rows x size, n]
            return values.reshape(rows, length, -1).narrow(1, start, size).flatten(0, 1)

        local_hidden = shard(hidden)
        local_chosen = shard(chosen)
        local_weights = split(weights.reshape(rows, length, -1), self.tp, dim=1).flatten(0, 1)
        outputs = self._dispatch(local_hidden, local_chosen, local_weights.to(dtype))
        outputs = outputs.view(rows, size, width)
        # [rows, size, width] -> [rows x length, width]
        return F.pad(outputs, (0, 0, start, length - start - size)).flatten(0, 1)

    def _dispatch(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, k = chosen.shape
        plan = decide_once(lambda: self._plan(chosen.reshape(-1)))
        order = plan.order
        # [tokens, hidden] -> [tokens x k, hidden], in the order of the experts
        rows = hidden.index_select(0, order // k)
        if torch.is_grad_enabled() and not rows.requires_grad:
            # The backward is collective too, even if this rank's rows need no gradient.
            rows = rows.detach().requires_grad_()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)

        # The host waits for the sizes only here, while the device does the work above.
        sent, received = plan.rows()
        arrived = exchange_rows(rows, self.group, sent=sent, received=received)
        computed = self._compute(arrived, plan.experts(received))
        returned = exchange_rows(computed, self.group, sent=received, received=sent)
        # [tokens x k, hidden] -> [tokens, k, hidden] -> [tokens, hidden]
        by_token = returned.index_select(0, back).view(tokens, k, hidden.shape[-1])
        return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _compute(self, arrived: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Run the original forward on rows [rows, hidden] with the local expert of each row."""
        if not len(arrived):
            # The original forward would return zeros that need no gradient, but the backward is
            # collective.
            return arrived
        local = {}
        for name, parameter in direct_parameters(self.module).items():
            if parameter is not None:
                local[name] = local_tensor(parameter)
        with replace_values(self.module, local):
            return self.original(arrived, experts.unsqueeze(-1), arrived.new_ones(len(arrived), 1))

    def _plan(self, flat: torch.Tensor) -> _DispatchPlan | _EvenDispatchPlan:
        """Exchange row counts with the other ranks. Collective.

        Args:
            flat: Expert of every row [rows].
        """
        ranks = self.group.size()
        counts = torch.zeros(ranks * self.experts_per_rank, dtype=torch.int64, device=flat.device)
        if isinstance(flat, FakeTensor) or flat.is_meta or is_fake(self.group):
            # The tensors have no values, so all experts get equally many tokens.
            exchange_counts(counts.view(ranks, -1), self.group)
            return _EvenDispatchPlan(
                torch.sort(flat, stable=True).indices, ranks, self.experts_per_rank
            )
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat)).view(ranks, -1)
        received_counts = exchange_counts(counts, self.group)
        # The copy is queued before the sort, so that reading it does not wait for the sort.
        sizes = HostCopy(torch.stack([counts.sum(1), received_counts.sum(1)]))
        return _DispatchPlan(torch.sort(flat, stable=True).indices, received_counts, sizes)


@dataclass(frozen=True)
class _DispatchPlan:
    """Destinations of the rows of one call. A row is a copy of a token for one of its experts.

    A recomputation uses the plan of the first forward, even if its router would choose differently.
    The ranks therefore agree on the sizes of messages, and no rank waits for its device again.

    Attributes:
        order: Indices of the rows in the order of their experts [rows].
        received_counts: Number of rows from each rank for each expert [ranks, experts of this
            rank].
        sizes: Number of rows that are sent to each rank and received from it [2, ranks].
    """

    order: torch.Tensor
    received_counts: torch.Tensor
    sizes: HostCopy

    def rows(self) -> Sizes:
        """Return the sizes of the messages. The first call waits for the device."""
        sent, received = self.sizes.values().tolist()
        return sent, received

    def experts(self, received: list[int]) -> torch.Tensor:
        """Return the local expert of every row that arrives."""
        ranks, count = self.received_counts.shape
        experts = torch.arange(count, device=self.received_counts.device).repeat(ranks)
        return experts.repeat_interleave(self.received_counts.view(-1), output_size=sum(received))


@dataclass(frozen=True)
class _EvenDispatchPlan:
    """Plan of a dry run, in which all experts receive the same number of tokens."""

    order: torch.Tensor
    ranks: int
    experts_per_rank: int

    def rows(self) -> Sizes:
        """Return equal numbers of rows for all ranks, up to a remainder of one row."""
        count = len(self.order)
        sizes = [count // self.ranks + (rank < count % self.ranks) for rank in range(self.ranks)]
        return sizes, sizes

    def experts(self, received: list[int]) -> torch.Tensor:
        """Return the local expert of every row that arrives."""
        return torch.arange(sum(received), device=self.order.device) % self.experts_per_rank


def _is_watched(module: nn.Module) -> bool:
    """Return True if a user's hook receives the output or its gradient.

    Such a hook needs the values of all tokens.
    """
    return any(
        is_foreign(hook) for kind in _SEES_OUTPUT for hook in hooks_of(module, kind).values()
    )
