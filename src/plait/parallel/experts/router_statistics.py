"""The losses of routers where no module computes them from all that they are of: the balance loss
of a model whose routers are on several pipeline stages, see parts of sequences, or are balanced
over the tokens of all ranks; and the z loss, which Transformers does not have.

Transformers sums, over all routers of a model, how many tokens each expert was chosen for and the
probabilities that it was given, and multiplies the two sums. So no stage can compute its part of
the loss alone: the sums of the stages before are sent with the activations, and the gradient of the
probabilities returns with theirs. On the last stage the sums of other ranks are added up. In the
order and the dtypes of Transformers' `load_balancing_loss_func`, so that the value is the same.
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
from plait.parallel.tokens import TokensOfForward

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(tokens of each expert [experts], sums of its probabilities [experts], rows and squares of
logarithms, both 0-dimensional).
"""


class RouterStatistics:
    """What the routers of a rank's stages have chosen for the micro-batch that runs. `begin` and
    `end` of a stage's forward are called by the pipeline.
    """

    tensors = 4
    """How many tensors are sent with the activations."""

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
        """`balances`: whether there is a balance loss, `is_global`: of the tokens of all
        data-parallel ranks. `z_loss`: the coefficient of the other. `group`: ranks whose tokens
        count too. With `balances` the model's own forward computes none; its config says what it
        did.
        """
        self.is_global = is_global
        self.experts = experts
        self.top_k = top_k
        self.balances = balances
        self.z_loss = z_loss
        self.group = group
        self.routers = len(routers)
        self._logits: list[torch.Tensor] | None = None
        self._before: Sums | None = None
        self._tokens = TokensOfForward(model)
        self._handles = [model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)]
        for router in routers:
            module = model.get_submodule(router.name)
            self._handles.append(module.register_forward_hook(partial(self._note, router.index)))

    def release(self) -> None:
        """Remove the hooks."""
        self._tokens.release()
        for handle in self._handles:
            handle.remove()

    def begin(self, first: bool, received: Any) -> Any:
        """Before it. `received`: what the stage before has sent; returns its activations alone."""
        self._logits = []
        self._before = None
        if first:
            return received
        received, self._before = received
        return received

    def end(self, output: Any) -> Any:
        """After it, on a stage that is not the last: what is sent."""
        return output, self.sums()

    def like(self, output: Any) -> Any:
        """The same of a stage that another rank runs: the shapes of what it sends."""
        leaves = output if isinstance(output, tuple) else (output,)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        each = torch.zeros(self.experts, dtype=torch.float32, device=device)
        return output, (
            each,
            torch.zeros_like(each),
            torch.zeros_like(each[0]),
            torch.zeros_like(each[0]),
        )

    def sums(self) -> Sums:
        """Of all routers so far."""
        logits = self._logits or []
        given = self._tokens.now
        if self._before is not None:
            tokens, probabilities, rows, squares = self._before
        else:
            device = logits[0].device if logits else None
            tokens = torch.zeros(self.experts, dtype=torch.float32, device=device)
            probabilities = torch.zeros_like(tokens)
            rows = torch.zeros_like(tokens[0])
            squares = torch.zeros_like(tokens[0])
        for one in logits:
            weights = torch.softmax(one, dim=-1)
            chosen = torch.topk(weights, self.top_k, dim=-1).indices.reshape(-1)
            wide = weights if weights.dtype == torch.float64 else weights.float()
            square = (
                torch.logsumexp(one if one.dtype == torch.float64 else one.float(), -1).square()
                if self.z_loss
                else wide.new_zeros(1)
            )
            if given is None:
                squares = squares + square.sum()
                counted = torch.ones_like(chosen, dtype=torch.float32)
                probabilities = probabilities + wide.sum(0)
                rows = rows + len(one)
            else:
                mask = given.reshape(-1).to(one.device, torch.float32)
                squares = squares + (square * mask).sum()
                counted = mask.repeat_interleave(self.top_k)
                probabilities = probabilities + (wide * mask.unsqueeze(-1)).sum(0)
                rows = rows + mask.sum()
            tokens = tokens + torch.zeros_like(tokens).scatter_add_(0, chosen, counted)
        return tokens, probabilities, rows, squares

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(balance loss, z loss times its coefficient) of the micro-batch whose last stage has run
        here; 0-dimensional. Collective over the group, and so is the backward: each rank adds a
        loss as often as it has targets.
        """
        if self._logits is None:
            raise ModelError(
                "the losses of a pipeline's routers are known on its last stage, after its forward"
            )
        tokens, probabilities, rows, squares = self.sums()
        if self.group is not None:
            single = torch.stack([rows.to(probabilities.dtype), squares.to(probabilities.dtype)])
            own = torch.cat([tokens.to(probabilities.dtype), probabilities, single])
            counted, probabilities, row, squares = leave(enter(own, self.group), self.group).split(
                [self.experts, self.experts, 1, 1]
            )
            tokens = counted.to(tokens.dtype)
            rows = row.to(rows.dtype)
        balance = (tokens / rows * (probabilities / rows)).sum() * self.experts
        return balance, (squares / rows).sum() * (self.z_loss * self.routers)

    def _note(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._logits is not None and graph_task() is None:  # in a backward a block is recomputed
            self._logits.append(output[index] if isinstance(output, tuple | list) else output)

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._logits = []
        # The model's own sum would be of its last stage, or of a part of the tokens. The
        # configuration is the user's, who saves it.
        return args, {**kwargs, "output_router_logits": False} if self.balances else kwargs
