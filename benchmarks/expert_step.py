"""Time of a training step with experts on two processes, compared with torch by hand.

    python -m benchmarks.expert_step [--quick]

Plait's dispatch and `all_to_all_single` written by hand train the same Mixtral in float32 on two
CPU processes with their own samples. Rounds are interleaved, and ratios are taken within a round.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.common.side_by_side import (
    RANKS,
    Step,
    build_model,
    plait_step,
    random_ids,
    run,
    sum_over_ranks,
)

EXPERTS = 8
TOP_K = 2
LOCAL = EXPERTS // RANKS
"""Experts per rank."""
FIELDS = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "sliding_window": None}
FIELDS |= {"intermediate_size": 512, "max_position_embeddings": 2**16}
KINDS = ("eager", "grouped_mm")
"""How Transformers computes the experts of a rank."""


def model(kind: str = "eager") -> Any:
    return build_model("mixtral", experts=kind, **FIELDS)


class RowExchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts, or back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.counts = received, sent
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return RowExchange.apply(grad, *ctx.counts), None, None


def routed(
    module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute a layer of experts, of which `module` has those of this rank.

    Args:
        module: Experts of this rank.
        hidden: [tokens, hidden].
        chosen: Experts of each token, [tokens, k].
        weights: Their weights, [tokens, k].
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent = counts.view(RANKS, LOCAL).sum(1).tolist()
    received = theirs.view(RANKS, LOCAL).sum(1).tolist()
    arrived = RowExchange.apply(hidden[order // TOP_K], sent, received)
    rows = arrived.split(theirs.tolist())  # by rank, then by expert
    computed: list[Any] = [None] * len(rows)
    for expert in range(LOCAL):
        indices = range(expert, len(rows), LOCAL)
        x = torch.cat([rows[index] for index in indices])
        gate, up = F.linear(x, module.gate_up_proj[expert]).chunk(2, -1)  # type: ignore[index]
        y = F.linear(F.silu(gate) * up, module.down_proj[expert])  # type: ignore[index]
        computed[expert::LOCAL] = y.split([len(rows[index]) for index in indices])
    returned = (
        RowExchange.apply(torch.cat(computed), received, sent) * weights.flatten()[order, None]
    )
    return torch.zeros_like(hidden).index_add(0, order // TOP_K, returned)


def by_hand(rank: int, ids: torch.Tensor) -> Step:
    mixtral = model()
    split = set()
    for layer in mixtral.model.layers:
        module = layer.mlp.experts
        for name, parameter in list(module.named_parameters()):
            local = parameter.detach()[rank * LOCAL : (rank + 1) * LOCAL].clone()
            setattr(module, name, nn.Parameter(local))
        module.forward = partial(routed, module)
        split |= set(module.parameters())
    shared = [parameter for parameter in mixtral.parameters() if parameter not in split]
    optimizer = torch.optim.AdamW(mixtral.parameters(), lr=1e-3, weight_decay=0.0)
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:]

    def step() -> float:
        logits = mixtral(input_ids=ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (RANKS * (ids.shape[1] - 1))
        loss.backward()
        gradients = [parameter.grad for parameter in shared if parameter.grad is not None]
        of_experts = [parameter.grad for parameter in split if parameter.grad is not None]
        sum_over_ranks(gradients)
        sums = torch.stack([get_total_norm(of_experts).square(), loss.detach()])
        dist.all_reduce(sums)
        norm = (sums[0] + get_total_norm(gradients).square()).sqrt()
        clip_grads_with_norm_(mixtral.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(sums[1])

    return step


def steps(rank: int, tokens: int) -> dict[str, Step]:
    ids = random_ids(tokens, seed=2 + rank)
    ours = {}
    for kind in KINDS:
        ours[f"plait, {kind}"] = plait_step(model(kind), ids, {"ep": RANKS})
    return {"torch by hand": by_hand(rank, ids), **ours}


if __name__ == "__main__":
    run("expert_step", __doc__, steps, tokens=2048)
