"""Time of a training step with context parallelism, compared with torch by hand.

    python -m benchmarks.context_step [--quick]

Plait's kinds and `all_to_all_single` with SDPA written by hand train the same Llama in float32 on
two CPU processes. Rounds are interleaved, and ratios are taken within a round.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.common.side_by_side import (
    RANKS,
    Step,
    build_model,
    plait_step,
    random_ids,
    run,
    sum_over_ranks,
)

KINDS = ("ulysses", "all-gather-kv", "ring")


def model() -> Any:
    return build_model("llama", intermediate_size=768, max_position_embeddings=2**20)


class Exchange(torch.autograd.Function):
    """Heads for tokens, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        ctx.dims = joined, cut
        sent = torch.stack(x.chunk(RANKS, cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Exchange.apply(grad, *ctx.dims), None, None


def attend(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    scaling: float,
    **__: Any,
) -> Any:
    """Compute attention with `all_to_all_single`, as Transformers calls it."""
    query, key, value = (Exchange.apply(x, 1, 2) for x in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return Exchange.apply(output, 2, 1).transpose(1, 2).contiguous(), None


def by_hand(rank: int, ids: torch.Tensor) -> Step:
    from transformers import AttentionInterface

    AttentionInterface.register("by_hand", attend)
    llama = model()
    llama.set_attn_implementation("by_hand")
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3, weight_decay=0.0)
    length = ids.shape[1] // RANKS
    # This rank's part of the sequence.
    part = slice(rank * length, (rank + 1) * length)
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:][:, part]
    positions = torch.arange(ids.shape[1])[None, part]

    def step() -> float:
        logits = llama(input_ids=ids[:, part], position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (ids.shape[1] - 1)
        loss.backward()
        total = loss.detach()
        sum_over_ranks([*(p.grad for p in llama.parameters() if p.grad is not None), total])
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def steps(rank: int, tokens: int) -> dict[str, Step]:
    ids = random_ids(tokens, seed=2)
    ours = {}
    for kind in KINDS:
        ours[kind] = plait_step(model(), ids, {"cp": RANKS, "context": kind})
    return {"torch by hand": by_hand(rank, ids), **ours}


if __name__ == "__main__":
    run("context_step", __doc__, steps, tokens=4096)
