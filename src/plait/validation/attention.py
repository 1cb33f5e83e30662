"""Attention of context parallelism: fused kernels compared with float64 matrix multiplications.

The queries are the second half of a sequence and the keys both halves, as on the last rank of a
ring of two ranks. Attention is computed once for each half of the keys, and the two results are
combined with their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from plait.parallel.context.kernel import (
    AttentionBlock,
    AttentionRule,
    BackwardInputs,
    GradientSum,
    GradientSums,
    PartialSoftmax,
    attend,
    attend_backward,
    kernel_for,
)
from plait.sizes import dtype_name
from plait.validation.context import Context, require_real_device
from plait.validation.rows import Verdict, verdict

BATCH = 1
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64
TOKENS = 2048
SMALL_TOKENS = 64
ALLOWED: Mapping[torch.dtype, float] = {
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
    torch.float32: 1e-5,
}
"""Largest error of an output or a gradient, as a share of the largest number of the tensor."""
NAMES = ("output", "gradient of query", "gradient of key", "gradient of value")


@dataclass(frozen=True)
class Case:
    """Dtype and mask of one attention comparison."""

    dtype: torch.dtype
    window: bool = False
    documents: bool = False
    softcap: float | None = None

    @property
    def title(self) -> str:
        """Dtype and properties of the case."""
        properties = {
            "window": self.window,
            "documents": self.documents,
            "capped scores": self.softcap,
        }
        present = [name for name, value in properties.items() if value]
        return ", ".join([dtype_name(self.dtype), *present])


CASES = (
    Case(torch.bfloat16),
    Case(torch.float16),
    Case(torch.float32),
    Case(torch.bfloat16, window=True),
    Case(torch.bfloat16, documents=True),
    Case(torch.bfloat16, window=True, documents=True),
    Case(torch.bfloat16, softcap=20.0),
    Case(torch.float32, documents=True),
)


def kernels(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Compare every case, twice: the second time with other positions, windows and documents.

    The second comparison fails if it compiles anything, because a training run has hundreds of
    positions and must not compile for each of them.
    """
    require_real_device(context, "fused attention cannot be simulated: its kernels need a real GPU")
    numbers: dict[str, Any] = {"tokens": context.size(TOKENS, small=SMALL_TOKENS)}
    problems = []
    for case in CASES:
        kernel, errors = compare(context, case, shift=0)
        numbers[case.title] = {
            "kernel": kernel,
            "allowed": ALLOWED[case.dtype],
            "largest_error": max(errors.values()),
        }
        problems += problems_of(case, kernel, errors)
        context.progress(numbers)

    # The first loop has compiled every case. A training run, which has hundreds of positions, would
    # compile for each of them.
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in CASES:
            kernel, errors = compare(context, case, shift=24)
            problems += problems_of(case, kernel, errors)
    return verdict(problems, **numbers)


def problems_of(case: Case, kernel: str, errors: Mapping[str, float]) -> list[str]:
    """Return a line of text for each error of a case that is larger than allowed."""
    allowed = ALLOWED[case.dtype]
    return [
        f"{case.title} ({kernel}): error of the {name} {error:.1e}, allowed {allowed:.0e}"
        for name, error in errors.items()
        # Negated, so that an error of NaN is reported.
        if not error <= allowed
    ]


def compare(context: Context, case: Case, *, shift: int) -> tuple[str, dict[str, float]]:
    """Return (name of the kernel that ran, relative errors of output and gradients).

    Args:
        context: Context of the check.
        case: Dtype and mask.
        shift: Tokens by which positions, the window and the documents are moved.
    """
    tokens = context.size(TOKENS, small=SMALL_TOKENS)
    half = tokens // 2
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, length: int) -> torch.Tensor:
        # Drawn on the CPU in float32, so that every device and dtype rounds the same numbers.
        values = torch.randn(BATCH, heads, length, HEAD_DIM, generator=generator)
        return values.to(context.device, case.dtype)

    # Queries [batch, heads, tokens / 2, head_dim], keys and values [batch, kv_heads, tokens,
    # head_dim]: fewer heads of keys than of queries, as in grouped-query attention.
    query = random(HEADS, half)
    grad = random(HEADS, half)
    key = random(KV_HEADS, tokens)
    value = random(KV_HEADS, tokens)
    starts = None
    if case.documents:
        positions = torch.arange(half, tokens) + shift
        borders = torch.tensor([0, half // 3, half + half // 4, half + half // 2]) + shift
        # The last border that is not after a query begins the document of the query.
        rows = borders[torch.searchsorted(borders, positions, right=True) - 1]
        starts = rows.expand(BATCH, half).to(context.device)
    rule = AttentionRule(HEAD_DIM**-0.5, half // 2 + shift if case.window else None, case.softcap)

    kernel, _ = kernel_for(
        context.device, case.dtype, (HEAD_DIM, HEAD_DIM), rule, documents=case.documents
    )
    fused = attention(query, key, value, grad, starts, rule, shift)
    # Plain products, because a fused kernel on both sides would hide its own error.
    exact = attention(
        query.double(),
        key.double(),
        value.double(),
        grad.double(),
        starts,
        replace(rule, kernel="products"),
        shift,
    )
    errors = {name: relative_error(a, b) for name, a, b in zip(NAMES, fused, exact, strict=True)}
    return kernel, errors


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    starts: torch.Tensor | None,
    rule: AttentionRule,
    shift: int,
) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of query, key and value.

    Args:
        query: [batch, heads, tokens / 2, head_dim], the second half of the sequence.
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, head_dim].
        grad: Gradient of the output.
        starts: [batch, tokens / 2], position at which the document of a query begins, or None.
        rule: Rule of the layer.
        shift: Position of the first key.
    """
    half = query.shape[2]
    # The causal block of the own half has column `half`; the keys before it have column 0.
    blocks = []
    for column in (0, half):
        blocks.append(
            AttentionBlock(
                query,
                key[:, :, column : column + half],
                value[:, :, column : column + half],
                query_at=shift + half,
                key_at=shift + column,
                starts=starts,
                column=column,
            )
        )
    softmax = PartialSoftmax(query, value.shape[3])
    for block in blocks:
        attend(block, rule, softmax)
    output, log_sum_exp = softmax.finished()

    # Gradients of a query come from both blocks and are added over them.
    sums = [GradientSum(tensor) for tensor in (query, key, value)]
    for block in blocks:
        attend_backward(block, rule, BackwardInputs(grad, output, log_sum_exp), GradientSums(*sums))
    return output, *(gradient.total for gradient in sums)


def relative_error(computed: torch.Tensor, exact: torch.Tensor) -> float:
    """Return max |computed - exact| / max |exact|."""
    return float((computed.double() - exact).abs().max() / exact.abs().max())
