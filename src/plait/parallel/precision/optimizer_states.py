"""Dtypes and bytes of AdamW's two moments: `optimizer.states`.

    form    first moment       second moment      bytes of both per parameter
    own     parameter's dtype  parameter's dtype  8 (float32)
    bf16    bfloat16           float32            6
    int8    codes of 8 bits    codes of 8 bits    2 + 8 / block
    float8  codes of 8 bits    codes of 8 bits    2 + 8 / block

A block consists of consecutive elements of a row that share one float32 scale. The blocks depend
only on the unsharded shape of a parameter. No layout splits a block: shards are complete rows, and
tensor parallelism that would split a block is refused. States therefore have the same values on
every layout. `optim.low_bit_adam` contains the optimizer, and computes the codes.
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
"""Forms that store codes, in blocks that share a scale."""
FIELD = "optimizer.states"

LARGEST_BLOCK = 256
SMALLEST_BLOCK = 16
FEWEST_NUMBERS = 4096
"""Smallest number of elements of a parameter whose states are stored as codes.

Smaller parameters (norms, biases) keep float32 moments, as in bitsandbytes and torchao.
"""
TENSOR_PARALLEL_DEGREE = 8
"""Largest degree of tp, a power of two, that never splits a block."""
_SCALE_BYTES = 4


def block_of(shape: Sequence[int]) -> int:
    """Return the number of elements that share a scale.

    It is the largest power of two from 16 to 256 that divides an eighth of a row. The result is 0
    for parameters that keep float32 moments: small ones, vectors, and those without such a power.

    Args:
        shape: The unsharded shape of a parameter.
    """
    row = prod(shape[1:])
    if len(shape) < 2 or shape[0] * row < FEWEST_NUMBERS:
        return 0
    # Up to TENSOR_PARALLEL_DEGREE ranks must be able to split a row between two blocks.
    block = LARGEST_BLOCK
    while block >= SMALLEST_BLOCK and row % (TENSOR_PARALLEL_DEGREE * block):
        block //= 2
    if block < SMALLEST_BLOCK:
        return 0
    return block


def state_bytes(
    form: str | None, shape: Sequence[int], *, itemsize: int, tensors: int, numel: Any
) -> Any:
    """Return the bytes of the optimizer states of a part of a parameter.

    Args:
        form: Storage format of the states, or None for the dtype of the parameter.
        shape: Unsharded shape of the parameter.
        itemsize: Bytes of an element of the parameter.
        tensors: Number of state tensors per parameter. Only used if `form` is None.
        numel: Elements of the part, an int or an array. A multiple of the block size.
    """
    if form is None:
        return numel * itemsize * tensors
    wide_itemsize = max(itemsize, 4)
    if form == "bf16":
        return numel * (2 + wide_itemsize)
    block = block_of(shape)
    if form in CODED and block:
        return 2 * (numel + numel // block * _SCALE_BYTES)
    return numel * 2 * wide_itemsize


def refuse_cut_blocks(form: str | None, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensor parallelism that splits rows inside a quantization block.

    Args:
        form: Storage format of the states.
        named: Parameters by name. Only their shapes and placements are read.

    Raises:
        ConfigError: Tensor parallelism splits a block of a parameter.
    """
    if form not in CODED:
        return
    for name, parameter in named:
        block = block_of(parameter.shape)
        if not block or not isinstance(parameter, DTensor):
            continue
        for axis, placement in enumerate(parameter.placements):
            # A split along the first dimension leaves complete rows.
            if not placement.is_shard() or placement.dim == 0:  # type: ignore[attr-defined]
                continue
            size = parameter.device_mesh.size(axis)
            row = prod(parameter.shape[1:])
            # Only an even split of the second dimension leaves equal and contiguous parts of rows.
            is_even = placement.dim == 1 and parameter.shape[1] % size == 0  # type: ignore[attr-defined]
            if not is_even or row // size % block:
                rule = (
                    f"{name} has rows of {row} elements in blocks of {block}, and {size} processes"
                    " would cut a block"
                )
                remedy = (
                    f'use parallel.tp up to {TENSOR_PARALLEL_DEGREE}, or "bf16", or leave it out'
                )
                raise ConfigError(Problem(FIELD, form, rule, remedy))
