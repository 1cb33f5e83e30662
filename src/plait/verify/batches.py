"""Data of a comparison: few and short samples that are uneven in every way that real batches are.

Micro-batches have different lengths, rows are padded on the right or on the left, numbers of
targets differ, and one micro-batch has no target at all. The data of a micro-batch depend on the
step and on its index only, so a layout and one process see the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.parallel.micro_batches import IGNORED

BatchFunction = Callable[[int, torch.Generator], Any]
"""Function of (samples, generator) that returns one micro-batch.

Users provide one for a model that is not a language model.
"""

SHORTEST = 5
LONGEST = 12


def ragged_steps(
    *, steps: int, micro_batches: int, size: int, seed: int, micro_batch: BatchFunction
) -> list[list[Any]]:
    """Return micro-batches of random data, one list per step.

    One micro-batch has no targets if its batches have `labels`: the second of the first step, or
    the only one of the second step.

    Args:
        steps: Number of optimizer steps.
        micro_batches: Micro-batches per step, over all data-parallel ranks.
        size: Samples per micro-batch.
        seed: Seed of the generator that is passed to `micro_batch`.
        micro_batch: Function that creates a micro-batch.
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
    """Return a function that creates micro-batches of random tokens.

    A micro-batch has the tokens [size, length] int64, `labels` [size, length] int64 with -100 at
    padding, and an attention mask [size, length] int64. Rows alternate between padding on the
    right, padding on the left and no padding.

    Args:
        vocabulary: Number of tokens.
        first: Key of the tokens, such as `input_ids`.
        mask: Key of the attention mask, or None for a model that takes none.
        left: Whether rows may be padded on the left.
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
