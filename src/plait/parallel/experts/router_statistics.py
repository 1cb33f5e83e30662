"""Statistics of routers, for losses that no single module can compute.

The losses are the z loss, which Transformers does not have, and a balance loss over routers on
several pipeline stages, over parts of sequences on several ranks, or over the tokens of all ranks.

Note [Balance loss over stages and ranks]
    For each expert, Transformers sums two quantities over all routers of a model: the number of
    tokens that are routed to the expert, and the probabilities that routers give to the expert. The
    loss is the product of the two sums, so a stage cannot compute its part of the loss alone. The
    sums of earlier stages are sent with the activations, and the gradient of the probabilities
    returns with the gradients of the activations. The last stage adds the sums of other ranks.
    Order and dtypes are those of Transformers' `load_balancing_loss_func`, so that the value is the
    same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.passes import graph_task
from plait.comm.collectives import enter, leave
from plait.errors import ModelError
from plait.model.experts import Router
from plait.parallel.hooks import StepHook
from plait.parallel.micro_batches import TokenMaskObserver
from plait.sizes import wide_dtype

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Sums over tokens from which the losses are computed.

They are: the tokens of each expert [experts], the sum of the probabilities of each expert
[experts], the number of tokens (0-dimensional), and the sum of squared log-sum-exps of the logits
(0-dimensional).
"""


class RouterStatistics(StepHook):
    """Statistics of the routers of this rank's stages in the running micro-batch.

    A pipeline calls `begin` and `end` around the forward of a stage. See Note [Balance loss over
    stages and ranks].
    """

    tensors = 4
    """Number of tensors that are sent with the activations."""

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[Router],
        *,
        experts: int,
        top_k: int,
        balances: bool = True,
        z_loss: float = 0.0,
        group: dist.ProcessGroup | None = None,
        is_global: bool = False,
    ) -> None:
        """Register hooks on the routers of a model.

        Args:
            model: The model on this rank. If `balances` is True, its original forward no longer
                computes a balance loss. Its config is not changed.
            routers: The routers of the model on this rank.
            experts: Number of experts.
            top_k: Number of experts per token.
            balances: Whether there is a balance loss.
            z_loss: Coefficient of the z loss.
            group: Ranks over whose tokens the losses are computed, or None for this rank only.
            is_global: Whether the balance loss is over the tokens of all data-parallel ranks.
        """
        self.is_global = is_global
        self.experts = experts
        self.top_k = top_k
        self.balances = balances
        self.z_loss = z_loss
        self.group = group
        self.routers = len(routers)
        self._logits: list[torch.Tensor] | None = None
        self._earlier_sums: Sums | None = None
        self._tokens = TokenMaskObserver(model)
        self._handles = [model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)]
        for router in routers:
            module = model.get_submodule(router.name)
            self._handles.append(
                module.register_forward_hook(partial(self._record_logits, router.index))
            )

    def release(self) -> None:
        """Remove the hooks. The model then computes its own balance loss again."""
        self._tokens.release()
        for handle in self._handles:
            handle.remove()

    def begin(self, first: bool, received: Any) -> Any:
        """Begin the forward of a pipeline stage, and unpack the sums of earlier stages.

        Args:
            first: Whether it is the first stage.
            received: The output of `end` of the previous stage, or the input of the first one.

        Returns:
            The activations without the sums.
        """
        self._logits = []
        self._earlier_sums = None
        if first:
            return received
        received, self._earlier_sums = received
        return received

    def end(self, output: Any) -> Any:
        """End the forward of a stage that is not the last.

        Returns:
            The values that are sent to the next stage: (output, sums).
        """
        return output, self.sums()

    def like(self, output: Any) -> Any:
        """Return tensors with the shapes and dtypes that `end` returns on another rank."""
        leaves = output if isinstance(output, tuple) else (output,)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        return output, self._zeros(device)

    def _zeros(self, device: torch.device | None) -> Sums:
        per_expert = torch.zeros(self.experts, dtype=torch.float32, device=device)
        scalar = torch.zeros((), dtype=torch.float32, device=device)
        return per_expert, torch.zeros_like(per_expert), scalar, torch.zeros_like(scalar)

    def sums(self) -> Sums:
        """Return the sums over all routers so far, those of earlier stages included."""
        all_logits = self._logits or []
        token_mask = self._tokens.mask
        if self._earlier_sums is not None:
            tokens, probabilities, rows, squares = self._earlier_sums
        else:
            device = all_logits[0].device if all_logits else None
            tokens, probabilities, rows, squares = self._zeros(device)

        # Each [tokens, experts].
        for logits in all_logits:
            weights = torch.softmax(logits, dim=-1)
            chosen = torch.topk(weights, self.top_k, dim=-1).indices.reshape(-1)
            wide = weights.to(wide_dtype(weights.dtype))
            square = wide.new_zeros(1)
            if self.z_loss:
                square = torch.logsumexp(
                    logits.to(wide_dtype(logits.dtype)), -1
                ).square()  # [tokens]
            if token_mask is None:
                squares = squares + square.sum()
                counted = torch.ones_like(chosen, dtype=torch.float32)
                probabilities = probabilities + wide.sum(0)
                rows = rows + len(logits)
            else:
                mask = token_mask.reshape(-1).to(logits.device, torch.float32)
                squares = squares + (square * mask).sum()
                counted = mask.repeat_interleave(self.top_k)
                probabilities = probabilities + (wide * mask.unsqueeze(-1)).sum(0)
                rows = rows + mask.sum()
            tokens = tokens + torch.zeros_like(tokens).scatter_add_(0, chosen, counted)
        return tokens, probabilities, rows, squares

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the micro-batch whose last stage has run on this rank. Collective.

        The losses are for all tokens of the group, and their backward is collective as well.
        The caller multiplies both by this rank's number of targets, and adds them to the rank's
        sum of token losses.

        Returns:
            (balance loss without its coefficient, z loss times its coefficient), 0-dimensional.

        Raises:
            ModelError: No forward of the last stage has run.
        """
        if self._logits is None:
            raise ModelError(
                "the losses of a pipeline's routers exist only on its last stage after its forward;"
                " read them on that stage"
            )
        tokens, probabilities, rows, squares = self.sums()
        if self.group is not None:
            # One message of [2 experts + 2]. `enter` also sums the gradient over the group.
            dtype = probabilities.dtype
            scalars = torch.stack([rows.to(dtype), squares.to(dtype)])
            local = torch.cat([tokens.to(dtype), probabilities, scalars])
            summed = leave(enter(local, self.group), self.group)
            summed_tokens, probabilities, summed_rows, squares = summed.split(
                [self.experts, self.experts, 1, 1]
            )
            tokens = summed_tokens.to(tokens.dtype)
            rows = summed_rows.to(rows.dtype)
        balance = (tokens / rows * (probabilities / rows)).sum() * self.experts
        return balance, (squares / rows).sum() * (self.z_loss * self.routers)

    def _record_logits(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        # A forward inside a backward is a recomputation.
        if self._logits is None or graph_task() is not None:
            return
        if isinstance(output, tuple | list):
            output = output[index]
        self._logits.append(output)

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._logits = []
        if not self.balances:
            return args, kwargs
        # The model's own loss would be that of its last stage, or of a part of the tokens. It is
        # disabled by an argument and not in the configuration, which the user saves.
        return args, {**kwargs, "output_router_logits": False}
