"""Products with quantised weights, in the dtype of the activations.

On a CPU the dense weight is made a part at a time, which stays in the processor's cache, so that memory sees the codes alone. torch has a
kernel for codes of int8 that makes no dense weight: for a few rows of bfloat16 it takes a quarter of the time. For float32 its time is
twice that of parts, and times the rows.

float16 is computed in float32: small weights, and scales, are below its normal numbers, and sums of codes above its largest. It is no
slower: of 2,048 x 2,048 weights on an Intel processor that has instructions for float16, a row takes 2.3 ms (torch's kernel 6.7, parts in
float16 8.6), and 1,024 rows 77 (81).
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F

from plait._torch.operators import INT8_PRODUCT_INPUTS, int8_product
from plait.cluster import huge_pages
from plait.inference.quantised_format import GROUP, dequantise, unpack

PART, MOST_PARTS = 2 << 20, 8
"""Bytes, for each thread up to so many, of the dense part of a weight that is made and multiplied with at once. Smaller ones are not worth
that threads wait for each other: of a token of 100 M parameters in int8 two threads of an AMD EPYC with 1 MiB of cache each take 16 ms, and
50 with 512 KiB in all (one thread: 20, and 30)."""
FEW_ROWS = 16
"""That torch's kernel is as fast for as parts."""


class _Scratch(threading.local):
    """A thread's memory for dense parts. It is kept: what is freed goes back to the system at the heap's mercy, and in a process where it
    does, a token takes twice as long, for the pages that are new each time."""

    memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        if self.memory.numel() < size:
            self.memory = huge_pages.empty((size,), torch.uint8)
        return self.memory[:size]


_scratch = _Scratch()


def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [..., in] times the weight: [..., out]."""
    if x.device.type != "cpu" or not codes.numel() or not x.numel():
        return F.linear(x, dequantise(codes, scales, x.dtype), bias)
    if x.dtype == torch.float16:
        return product(x.float(), codes, scales, bias).half()
    flat = x.reshape(-1, x.shape[-1])
    has_kernel = codes.dtype == torch.int8 and x.dtype == torch.bfloat16 and x.shape[-1] % INT8_PRODUCT_INPUTS == 0
    if has_kernel and len(flat) <= FEW_ROWS:
        y = int8_product(flat.contiguous(), codes, scales.to(x.dtype))
    else:
        y = _in_parts(flat, codes, scales)
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _in_parts(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x` [rows, in] times the weight: [rows, out]. Scales of int8 are for the sums; codes of int4 are 8 too large, which is taken off the
    sums where these have more than 16 bits."""
    inputs = x.shape[1]
    step = min(len(codes), max(1, _part_bytes() // (inputs * x.element_size())))
    dense_size = step * inputs * x.element_size()
    is_int8, is_exact = codes.dtype == torch.int8, x.dtype != torch.bfloat16
    memory = _scratch.take(dense_size + (0 if is_int8 else step * codes.shape[1]))
    place = memory[:dense_size].view(x.dtype).view(step, inputs)
    y = torch.empty(len(x), len(codes), dtype=x.dtype)
    for at in range(0, len(codes), step):
        part = codes[at : at + step]
        dense = place[: len(part)]
        if is_int8:
            dense.copy_(part)
        else:
            unpack(part, dense, memory[dense_size : dense_size + part.numel()].view_as(part))
            if not is_exact:
                dense.sub_(8)
            dense.unflatten(1, (-1, GROUP)).mul_(scales[at : at + step].unsqueeze(2))
        torch.mm(x, dense.t(), out=y[:, at : at + step])
    if is_int8:
        y *= scales.to(x.dtype)
    elif is_exact:
        y -= 8 * (x.unflatten(1, (-1, GROUP)).sum(2) @ scales.to(x.dtype).t())
    return y


def _part_bytes() -> int:
    return PART * min(torch.get_num_threads(), MOST_PARTS)


def largest_part_bytes(dense: int) -> int:
    """Of memory that products with a weight of `dense` bytes take on a CPU at most, besides what they are given and return. int4 unpacks
    its codes in bytes of their own."""
    return min(dense, _part_bytes()) * 5 // 4
