"""A layer of experts of which this rank has some: tokens are sent to the ranks of their experts,
and the results return.

Dropless: every token reaches each expert that its router chose. A rank computes with the module's
own forward, whose experts are this rank's. The routing weights stay with the tokens, so that a
router's gradient is computed where its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from plait._torch.dtensor import local_tensor
from plait._torch.modules import HookKind, hooks_of, own_parameters
from plait._torch.operators import FakeTensor
from plait.cluster.fake_group import is_fake
from plait.cluster.host_copy import HostCopy
from plait.comm.collectives import gather, shard_range, split
from plait.comm.exchange import exchange_counts, exchange_rows
from plait.parallel.activations.decisions import decided_once
from plait.parallel.tensor.hook_checks import is_foreign
from plait.parallel.tensor.styles import Region, own_values

Forward = Callable[..., torch.Tensor]
_SEES_OUTPUT: tuple[HookKind, ...] = ("forward", "backward_pre", "backward")


@dataclass(frozen=True)
class Dispatch:
    """In the place of the forward of a module of experts."""

    module: nn.Module
    original: Forward
    """The module's own."""
    group: ProcessGroup
    here: int
    """Experts of each rank."""
    tp: ProcessGroup | None = None
    """Ranks that are called with the same tokens: each sends its part of them."""
    sequence: Region | None = None
    """Where of the output [batch x seq, hidden] each of these ranks keeps its shard of the
    sequence, and reads nothing else.
    """

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`hidden` [tokens, hidden], the experts of every token `chosen` [tokens, k] int64, and
        their `weights` [tokens, k]; the weighted sums [tokens, hidden]. Collective over the group,
        also where a rank has no token.
        """
        if self.tp is None:
            return self._routed(hidden, chosen, weights)
        # some routers have narrower ones, and gradients are sent
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if self.sequence is not None and not _is_watched(self.module):
            return self._of_own_tokens(hidden, chosen, wide, weights.dtype, self.sequence.length)
        own, experts, factors = (split(x, self.tp, dim=0) for x in (hidden, chosen, wide))
        return gather(
            self._routed(own, experts, factors.to(weights.dtype)),
            self.tp,
            dim=0,
            length=len(hidden),
        )

    def _of_own_tokens(
        self,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        dtype: torch.dtype,
        length: int,
    ) -> torch.Tensor:
        """Of this rank's shards of sequences of `length`; the other tokens of the output are 0.
        Their gradients are not gathered either: each rank keeps those of its own tokens. Routers
        are computed by all ranks for all tokens, so gradients of weights are.
        """
        assert self.tp is not None
        rows = len(hidden) // length
        width = hidden.shape[-1]
        start, size = shard_range(length, self.tp)
        own, experts = (
            x.reshape(rows, length, -1).narrow(1, start, size).flatten(0, 1)
            for x in (hidden, chosen)
        )
        factors = split(weights.reshape(rows, length, -1), self.tp, dim=1).flatten(0, 1)
        found = self._routed(own, experts, factors.to(dtype)).view(rows, size, width)
        return F.pad(found, (0, 0, start, length - start - size)).flatten(0, 1)

    def _routed(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, k = chosen.shape
        plan = decided_once(lambda: self._plan(chosen.reshape(-1)))
        order = plan.order
        rows = hidden.index_select(0, order // k)
        if torch.is_grad_enabled() and not rows.requires_grad:
            # the backward is collective too, whatever this rank's own rows need
            rows = rows.detach().requires_grad_()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)

        # The host waits for the sizes as late as possible, while the device does the work above.
        sent, received = plan.rows()
        arrived = exchange_rows(rows, self.group, sent=sent, received=received)
        computed = self._compute(arrived, plan.experts(received))
        returned = exchange_rows(computed, self.group, sent=received, received=sent)
        by_token = returned.index_select(0, back).view(tokens, k, hidden.shape[-1])
        return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _compute(self, arrived: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if not len(arrived):
            return (
                arrived  # the module's own forward would return zeros that no gradient comes from
            )
        local = {
            name: local_tensor(parameter)
            for name, parameter in own_parameters(self.module).items()
            if parameter is not None
        }
        with own_values(self.module, local):
            return self.original(arrived, experts.unsqueeze(-1), arrived.new_ones(len(arrived), 1))

    def _plan(self, flat: torch.Tensor) -> _Plan | _EvenPlan:
        """Exchange the numbers of rows with the other ranks. Collective.

        Args:
            flat: [rows], expert of every row.
        """
        ranks = self.group.size()
        if isinstance(flat, FakeTensor) or flat.is_meta or is_fake(self.group):
            # Choices of a router have no values here, so all experts have equally many tokens.
            exchange_counts(
                torch.zeros(ranks, self.here, dtype=torch.int64, device=flat.device), self.group
            )
            return _EvenPlan(torch.sort(flat, stable=True).indices, ranks, self.here)
        counts = torch.zeros(ranks * self.here, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat)).view(ranks, self.here)
        received_counts = exchange_counts(counts, self.group)
        # The copy is queued before the sort, so that reading it does not wait for the sort.
        sizes = HostCopy(torch.stack([counts.sum(1), received_counts.sum(1)]))
        return _Plan(torch.sort(flat, stable=True).indices, received_counts, sizes)


Sizes = tuple[list[int], list[int]]
"""Numbers of rows that go to each rank, and of rows that come from each rank."""


class _Plan:
    """Destinations of the rows of one call.

    A recomputation uses the plan of its forward, even if its router would choose differently. The
    ranks then agree on the sizes of their messages, and no rank waits for its device again.
    """

    def __init__(self, order: torch.Tensor, received_counts: torch.Tensor, sizes: HostCopy) -> None:
        """Create the plan.

        Args: order: [rows], indices of the rows in the order of their experts. received_counts:
            [ranks, experts of this rank], rows that come from each rank for each expert. sizes: [2,
            ranks], rows to each rank and rows from each rank.
        """
        self.order = order
        self._received_counts = received_counts
        self._sizes = sizes

    def rows(self) -> Sizes:
        """Return the sizes of the messages. The first call waits for the device."""
        sent, received = self._sizes.values().tolist()
        return sent, received

    def experts(self, received: list[int]) -> torch.Tensor:
        """Return the local expert of every row that arrives."""
        ranks, count = self._received_counts.shape
        experts = torch.arange(count, device=self._received_counts.device).repeat(ranks)
        return experts.repeat_interleave(self._received_counts.view(-1), output_size=sum(received))


@dataclass(frozen=True)
class _EvenPlan:
    """Plan of a dry run, in which all experts have equally many tokens."""

    order: torch.Tensor
    ranks: int
    experts_per_rank: int

    def rows(self) -> Sizes:
        """Return sizes that are as even as possible."""
        count = len(self.order)
        sizes = [count // self.ranks + (rank < count % self.ranks) for rank in range(self.ranks)]
        return sizes, sizes

    def experts(self, received: list[int]) -> torch.Tensor:
        """Return the local expert of every row that arrives."""
        return torch.arange(sum(received), device=self.order.device) % self.experts_per_rank


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook of the user gets what the module returns, or its gradient: all of it, then."""
    return any(
        is_foreign(hook) for kind in _SEES_OUTPUT for hook in hooks_of(module, kind).values()
    )


def install(
    module: nn.Module,
    group: ProcessGroup,
    *,
    here: int,
    tp: ProcessGroup | None,
    sequence: Region | None,
) -> None:
    """Give a module of experts, whose parameters are this rank's, the forward of `Dispatch`."""
    module.forward = Dispatch(module, module.forward, group, here, tp, sequence)
    module.num_experts = here  # type: ignore[assignment]  # grouped products count them


def remove(module: nn.Module, *, count: int) -> None:
    """Its own forward, and number of experts."""
    if isinstance(module.__dict__.get("forward"), Dispatch):
        del module.__dict__["forward"]
        module.num_experts = count  # type: ignore[assignment]
