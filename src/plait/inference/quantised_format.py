"""A weight in 8 or 4 bits:

int8    a code from -127 to 127 for every weight, and a float32 scale for every output channel: weight = code * scale.
        scale = the largest magnitude of the channel / 127. 8.03 bits a weight at 1,000 inputs.
int4    groups of 32 weights along the inputs, each with a bfloat16 scale: weight = (code - 8) * scale, codes 0 to 15.
        scale = the group's weight of the largest magnitude, with its sign, / -8. 4.5 bits a weight. Byte i of a row of n weights has the
        code of weight i in the low four bits, and of weight i + n / 2 in the high ones, so that long rows are unpacked at once.

Scales are rounded to what is stored before codes are chosen, so codes make up for the rounding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

INT8, INT4 = "int8", "int4"
GROUP = 32
"""Weights of an int4 scale."""

Group = dist.ProcessGroup | None


def quantise(weight: torch.Tensor, form: str, group: Group = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of `weight` [out, in], of which other ranks of `group` have other inputs. See the module's description."""
    values = weight.float()
    if form == INT8:
        largest = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scales = torch.where(largest > 0, largest / 127, 1.0)
        return torch.round(values / scales.unsqueeze(1)).clamp_(-127, 127).to(torch.int8), scales
    grouped = values.unflatten(1, (-1, GROUP))
    at = grouped.abs().argmax(dim=2, keepdim=True)
    scales = (grouped.gather(2, at).squeeze(2) / -8).bfloat16()
    divisor = torch.where(scales != 0, scales, 1.0).float().unsqueeze(2)
    codes = torch.round(grouped / divisor).add_(8).clamp_(0, 15).to(torch.uint8)
    codes = codes.flatten(1)
    half = codes.shape[1] // 2
    return codes[:, :half] | codes[:, half:] << 4, scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in]."""
    if codes.dtype == torch.int8:
        return (codes.to(scales.dtype) * scales.unsqueeze(1)).to(dtype)
    found = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
    unpack(codes, found, torch.empty_like(codes))
    found.sub_(8).unflatten(1, (-1, GROUP)).mul_(scales.unsqueeze(2))  # float16 would round small scales, and their products again
    return found


def unpack(codes: torch.Tensor, into: torch.Tensor, scratch: torch.Tensor) -> None:
    """Codes 0 to 15 of packed ones [out, in / 2], to `into` [out, in]. `scratch` is as `codes`, and overwritten."""
    half = codes.shape[1]
    into[:, :half] = torch.bitwise_and(codes, 15, out=scratch)
    into[:, half:] = torch.bitwise_right_shift(codes, 4, out=scratch)
