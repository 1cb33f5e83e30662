"""Update of routing biases, which balance experts without a loss, as in DeepSeek-V3.

A router adds a bias per expert to its scores when it selects experts. After a step the bias is
raised for experts that had fewer tokens than the mean, and lowered for those that had more. The
classes of Transformers have the bias, but never change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from plait._torch.modules import own_buffers
from plait._torch.passes import graph_task
from plait.errors import ModelError
from plait.model.experts import SCORE_CORRECTION_BIAS, chosen_experts
from plait.parallel.hooks import StepEnd, StepHook
from plait.parallel.tokens import TokensOfForward


class BiasUpdate(StepHook):
    """Counts the tokens of each expert in a step, and updates the biases once per step.

    The count is the sum over micro-batches and over ranks with different tokens. Padding,
    evaluations, recomputed blocks and skipped steps do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[str],
        *,
        rate: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Listen to the routers of a model.

        Args:
            model: The model on this rank.
            routers: Names of its routers with a bias.
            rate: Amount by which a bias changes.
            group: The ranks with different tokens.
        """
        self.rate = rate
        self.group = group
        self._routers = [model.get_submodule(name) for name in routers]
        self._tokens = TokensOfForward(model)
        self._counts: list[torch.Tensor] = []
        self._totals: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        for index, (name, router) in enumerate(zip(routers, self._routers, strict=True)):
            self._counts.append(torch.zeros_like(self._bias(router), dtype=torch.int64))
            self._handles.append(router.register_forward_hook(partial(self._count, index, name)))
        self.said = f"the biases of {len(routers)} routers move by {rate:g} after every step"

    @staticmethod
    def _bias(router: nn.Module) -> torch.Tensor:
        bias = own_buffers(router)[SCORE_CORRECTION_BIAS]
        assert bias is not None
        return bias

    def _count(self, index: int, name: str, router: nn.Module, args: Any, output: Any) -> None:
        # A forward inside of a backward is a recomputation.
        if not router.training or not torch.is_grad_enabled() or graph_task() is not None:
            return
        chosen = chosen_experts(output)  # [tokens, k]
        if chosen is None:
            raise ModelError(
                f"experts.bias_update_rate: {name} returns no table of the experts of every token,"
                " so they cannot be counted; use 0"
            )
        counts = self._counts[index]
        mask = self._tokens.now
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel() == len(chosen):
            counted = mask.to(chosen.dtype).reshape(-1, 1).expand_as(chosen)
        else:
            counted = torch.ones_like(chosen)
        counts.scatter_add_(0, chosen.detach().reshape(-1), counted.reshape(-1))

    def finish_reduction(self) -> None:
        """Sum the counts over all ranks with different tokens."""
        if self.group is None or not self._counts:
            self._totals = [counts.clone() for counts in self._counts]
            return
        # One message for all routers.
        summed = torch.cat(self._counts)
        dist.all_reduce(summed, group=self.group)
        self._totals = list(summed.split([len(counts) for counts in self._counts]))

    def after_step(self, end: StepEnd) -> str:
        """Move every bias by the rate, unless the step was skipped."""
        for router, counts in zip(self._routers, self._totals, strict=True):
            if not end.skipped:
                wide = counts.to(torch.float64)
                bias = self._bias(router)
                bias.add_((wide.mean() - wide).sign().to(bias.dtype), alpha=self.rate)
        self.drop_gradients()
        return ""

    def drop_gradients(self) -> None:
        """Reset the counts, because the step starts again."""
        for counts in self._counts:
            counts.zero_()

    def release(self) -> None:
        """Remove the hooks from the model."""
        self._tokens.release()
        for handle in self._handles:
            handle.remove()
