"""Kernels of one attention layer with context parallelism, compared with a ring written by hand.

    python -m benchmarks.context_kernels [--quick]

It counts forward and backward from fake tensors, and prints the table of
docs/how-to/context-parallelism.md. A kernel is an operator that computes or moves data: views and
allocations are none, and a send with its receive is one.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.command import command
from benchmarks.common.report import markdown
from plait._torch.operators import FakeTensorMode, TorchDispatchMode
from plait.parallel.context.kernel import AttentionRule, Kernel
from plait.parallel.context.kinds import Kind, SequenceLayout, SequencePlacement, attention

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 32
"""Sizes of Llama-3-8B."""
NO_KERNELS = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "device", "recv_"),
)
CASES = {8192: (2, 4, 8), 32768: (2, 8, 32), 131072: (8, 32), 1048576: (8, 32)}
"""Degrees of context parallelism, by the number of tokens."""


class CountKernels(TorchDispatchMode):
    """Counts kernels by the names of their operators."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._opname)
        if not func.is_view and name not in NO_KERNELS:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


def kernels_of_layer(
    kind: Kind,
    tokens: int,
    ranks: int,
    rank: int,
    *,
    window: int | None = None,
    kernel: Kernel = "flash",
) -> Counter[str]:
    """Count the kernels of a layer of Plait on one rank.

    Args:
        kind: How queries see the keys of other ranks.
        tokens: Length of the full sequence.
        ranks: Degree of context parallelism.
        rank: This rank.
        window: Sliding window of the layer, in tokens.
        kernel: What computes attention.
    """
    layout = SequenceLayout(ranks, rank, zigzag=kind != "ulysses")
    rule = AttentionRule(HEAD_DIM**-0.5, window, kernel=kernel)

    def compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert dist.group.WORLD is not None
        placement = SequencePlacement(layout, dist.group.WORLD)
        return attention(kind, query, key, value, None, placement, rule)

    return _counted(ranks, rank, tokens, compute)


def kernels_by_hand(tokens: int, ranks: int, rank: int) -> Counter[str]:
    """Count the kernels of the same layer as a ring that is written by hand."""
    return _counted(ranks, rank, tokens, lambda *tensors: RingByHand.apply(*tensors, ranks, rank))


def _counted(
    ranks: int, rank: int, tokens: int, compute: Callable[..., torch.Tensor]
) -> Counter[str]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with FakeTensorMode():
            tensors = []
            for heads in (HEADS, KV_HEADS, KV_HEADS):
                # Transformers' projections make [batch, tokens, heads, head_dim] in memory.
                shape = (1, tokens // ranks, heads, HEAD_DIM)
                tensor = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
                tensors.append(tensor.transpose(1, 2))
            with CountKernels() as counted:
                output = compute(*tensors)
                output.backward(torch.empty_like(output))
        return counted.kernels
    finally:
        dist.destroy_process_group()


class RingByHand(torch.autograd.Function):
    """Causal ring attention with zigzag chunks, with as few kernels as torch allows.

    A step is one call of FlashAttention, one merge of five element-wise operators, and one message.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int, rank: int
    ) -> torch.Tensor:
        width = key.shape[3]
        output = log_sum_exp = None
        for step, both, rows, keys in _ring(torch.cat([key, value], -1), ranks, rank):
            part, part_log_sum_exp = _flash(
                query[:, :, rows],
                both[:, :, keys, :width],
                both[:, :, keys, width:],
                causal=step == 0,
            )
            if output is None or log_sum_exp is None:
                output = part.float()
                log_sum_exp = part_log_sum_exp
                continue
            total = log_sum_exp[:, :, rows]
            share = torch.sigmoid(part_log_sum_exp - total).unsqueeze(-1)
            output[:, :, rows].lerp_(part.float(), share)
            torch.logaddexp(total, part_log_sum_exp, out=total)
        assert output is not None and log_sum_exp is not None
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.place = (ranks, rank)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        width = key.shape[3]
        both = torch.cat([key, value], -1)
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        travelling = torch.zeros_like(both, dtype=torch.float32)
        last = log_sum_exp[:, :, key.shape[2] // 2 :].contiguous()
        for step, current, rows, keys in _ring(both, *ctx.place):
            gradients = _flash_backward(
                grad[:, :, rows],
                query[:, :, rows],
                current[:, :, keys, :width],
                current[:, :, keys, width:],
                output[:, :, rows],
                last if rows.start else log_sum_exp,
                causal=step == 0,
            )
            grad_query[:, :, rows].add_(gradients[0])
            travelling[:, :, keys, :width].add_(gradients[1])
            travelling[:, :, keys, width:].add_(gradients[2])
            arrived = torch.empty_like(travelling)
            for work in _send(travelling, arrived, *ctx.place):
                work.wait()
            travelling = arrived
        grad_both = travelling.to(key.dtype)
        grad_key = grad_both[..., :width]
        return grad_query.to(query.dtype), grad_key, grad_both[..., width:], None, None


def _ring(
    both: torch.Tensor, ranks: int, rank: int
) -> Iterator[tuple[int, torch.Tensor, slice, slice]]:
    """Yield steps with the keys and values of one rank, while those of the next arrive.

    The slices are the rows of queries that see them, and the keys that are seen.
    """
    half = both.shape[2] // 2
    for step in range(ranks):
        arriving = both
        works = []
        if step < ranks - 1:
            arriving = torch.empty_like(both)
            works = _send(both, arriving, ranks, rank)
        source = (rank - step) % ranks
        rows = slice(half, None) if source > rank else slice(None)
        keys = slice(0, half) if source < rank else slice(None)
        yield step, both, rows, keys
        for work in works:
            work.wait()
        both = arriving


def _send(sent: torch.Tensor, received: torch.Tensor, ranks: int, rank: int) -> list[dist.Work]:
    send = dist.P2POp(dist.isend, sent, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    return dist.batch_isend_irecv([send, receive])


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    lengths = query.shape[2], key.shape[2]
    output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, None, None, *lengths, 0.0, causal, False
    )
    return output.transpose(1, 2), log_sum_exp


def _flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    causal: bool,
) -> list[torch.Tensor]:
    tensors = [x.transpose(1, 2) for x in (grad, query, key, value, output)]
    random = query.new_empty(0)
    lengths = (query.shape[2], key.shape[2])
    backward = torch.ops.aten._flash_attention_backward
    return [
        x.transpose(1, 2)
        for x in backward(*tensors, log_sum_exp, None, None, *lengths, 0.0, causal, random, random)
    ]


def main() -> None:
    quick = command("context_kernels", __doc__).parse_args().quick
    kinds: tuple[Kind, ...] = get_args(Kind)
    rows = []
    for tokens, degrees in CASES.items():
        if quick:
            degrees = degrees[:1]
        for ranks in degrees:
            columns = [ranks, kernels_by_hand(tokens, ranks, 0).total()]
            for kind in kinds:
                columns.append(kernels_of_layer(kind, tokens, ranks, 0).total())
            ring = columns[2 + kinds.index("ring")]
            rows.append([f"{tokens:,}", *map(str, columns), f"{ring * LAYERS:,}"])
    header = ["tokens", "cp", "ring by hand", *kinds, f"ring, {LAYERS} layers"]
    print(markdown(header, rows, right=()))


if __name__ == "__main__":
    main()
