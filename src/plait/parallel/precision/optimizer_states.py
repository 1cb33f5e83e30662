"""The dtypes of AdamW's two moments, and their bytes: `optimizer.states`.

    form    first average      second average     bytes of both, a parameter
    own     parameter's dtype  parameter's dtype  8 (float32)
    bf16    bfloat16           float32            6
    int8    codes of 8 bits    codes of 8 bits    2 + 8 / block
    float8  codes of 8 bits    codes of 8 bits    2 + 8 / block

Codes belong to blocks of consecutive elements of a row with one float32 scale each. The blocks
follow from a parameter's unsharded shape alone, and no layout cuts one: shards are complete rows,
and tensor parallelism that would cut a block is refused. States therefore have the same values on
every layout. Pure; the codes are made in `optim.low_bit_codes`, the step is `optim.low_bit_adam`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from plait.errors import ConfigError, Problem

StateForm = Literal["bf16", "int8", "float8"]
CODED = ("int8", "float8")
"""Forms with codes in blocks."""
FIELD = "optimizer.states"

LARGEST_BLOCK = 256
SMALLEST_BLOCK = 16
FEWEST_NUMBERS = 4096
"""Smaller parameters (norms, biases) keep float32 averages, as in bitsandbytes and torchao."""
TENSOR_PARALLEL_DEGREE = 8
"""Up to this power of two, splitting rows over tp cuts no block."""
_SCALE_BYTES = 4


def block_of(shape: Sequence[int]) -> int:
    """Elements that share a scale: the largest power of two from 16 to 256 that divides an eighth
    of a row; 0 where a parameter of this unsharded shape keeps float32 moments, because it is
    small, a vector, or has no such power.
    """
    row = prod(shape[1:])
    if len(shape) < 2 or shape[0] * row < FEWEST_NUMBERS:
        return 0
    block = LARGEST_BLOCK
    while block >= SMALLEST_BLOCK and row % (TENSOR_PARALLEL_DEGREE * block):
        block //= 2
    return block if block >= SMALLEST_BLOCK else 0


def state_bytes(
    form: str | None, shape: Sequence[int], *, itemsize: int, tensors: int, numel: Any
) -> Any:
    """Bytes of the states of `numel` elements (an int or an array; a multiple of the block size) of
    a parameter of the unsharded `shape`. `tensors` is how many states an optimizer keeps in the
    parameter's own dtype.
    """
    wide = max(itemsize, 4)
    block = block_of(shape) if form in CODED else 0
    if form is None:
        return numel * itemsize * tensors
    if block:
        return 2 * (numel + numel // block * _SCALE_BYTES)
    return numel * (2 + wide if form == "bf16" else 2 * wide)


def refuse_cut_blocks(form: str | None, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ConfigError where tensor parallelism splits rows inside of a block. Looks at shapes and
    placements only.
    """
    if form not in CODED:
        return
    problems = []
    for name, parameter in named:
        block = block_of(parameter.shape)
        if not block or not isinstance(parameter, DTensor):
            continue
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_shard() or placement.dim == 0:  # type: ignore[attr-defined]
                continue
            size = parameter.device_mesh.size(axis)
            row = prod(parameter.shape[1:])
            even = placement.dim == 1 and parameter.shape[1] % size == 0  # type: ignore[attr-defined]
            if not even or row // size % block:
                rule = (
                    f"{name} has rows of {row} elements in blocks of {block}, and {size} processes"
                    " would cut a block"
                )
                problems.append(
                    Problem(
                        FIELD,
                        form,
                        rule,
                        f'use parallel.tp up to {TENSOR_PARALLEL_DEGREE}, or "bf16", or leave'
                        " it out",
                    )
                )
    if problems:
        raise ConfigError(problems[0])
