"""The data of a comparison: few, short, and uneven in every way that real batches are.

Micro-batches of different lengths, rows padded on the right and on the left, unequal numbers of
targets, one micro-batch with no target at all. What a rank gets depends on the step and the
micro-batch only, so a layout and one process see the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.parallel.micro_batches import IGNORED

BatchFunction = Callable[[int, torch.Generator], Any]
"""(samples, generator) to one micro-batch: what a user gives for a model that is not a language
model.
"""

SHORTEST = 5
LONGEST = 12


def ragged_steps(
    *, steps: int, micro_batches: int, size: int, seed: int, micro_batch: BatchFunction
) -> list[list[Any]]:
    """`steps` x `micro_batches` micro-batches of `size` samples. The second of the first step (the
    only one, where a step has one and there are more steps) loses its targets, if it has `labels`.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    plan = [[micro_batch(size, generator) for _ in range(micro_batches)] for _ in range(steps)]
    if micro_batches > 1 or steps > 1:
        empty = plan[0][1] if micro_batches > 1 else plan[1][0]
        if isinstance(empty, dict) and "labels" in empty:
            empty["labels"].fill_(IGNORED)
    return plan


def token_batches(
    *, vocabulary: int, first: str, mask: str | None, left: bool = True
) -> BatchFunction:
    """Micro-batches of random tokens: `first` [size, length] int64, `labels` alike with -100 where
    padded, and a `mask` where it has a name. Rows are in turn padded on the right, on the left
    (unless `left` is false), and full; a third of a row at least is padding.
    """
    kinds = ("right", "left", "full") if left else ("right", "full")

    def micro_batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        length = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=generator))
        ids = torch.randint(0, vocabulary, (size, length), generator=generator)
        labels = ids.clone()
        visible = torch.ones_like(ids)
        first_kind = int(torch.randint(0, len(kinds), (1,), generator=generator))
        for row in range(size):
            kind = kinds[(first_kind + row) % len(kinds)]
            count = int(torch.randint(length // 3, length - 2, (1,), generator=generator))
            if kind != "full":
                padded = slice(length - count, length) if kind == "right" else slice(0, count)
                labels[row, padded] = IGNORED
                visible[row, padded] = 0
        return {first: ids, "labels": labels, **({mask: visible} if mask else {})}

    return micro_batch
