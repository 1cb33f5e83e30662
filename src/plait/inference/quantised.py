"""Weights of linear layers in 8 or 4 bits, for inference: which layers, the format, and products with them.

int8    a code from -127 to 127 for every weight, and a float32 scale for every output channel: weight = code * scale.
        scale = the largest magnitude of the channel / 127. 8.03 bits a weight at 1,000 inputs.
int4    groups of 32 weights along the inputs, each with a bfloat16 scale: weight = (code - 8) * scale, codes 0 to 15.
        scale = the group's weight of the largest magnitude, with its sign, / -8. 4.5 bits a weight. Byte i of a row of n weights has the
        code of weight i in the low four bits, and of weight i + n / 2 in the high ones, so that long rows are unpacked at once.

Scales are rounded to what is stored before codes are chosen, so codes make up for the rounding. Products are computed in the dtype of the
activations. Linear layers of the repeated blocks are quantised; embeddings, the head, norms, biases, and experts that are kept in one
tensor are not.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from plait._torch.computed_weight import ComputedWeight
from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_parameters
from plait.errors import InputError
from plait.inference.adapters import is_adapters
from plait.model.blocks import find_blocks
from plait.model.layers import is_conv1d, is_linear
from plait.model.tied import tied_names
from plait.units import format_bytes

INT8, INT4 = "int8", "int4"
CODES, SCALES = "weight_codes", "weight_scales"
"""Names of the parameters that a quantised layer has in the place of `weight`."""
GROUP = 32
"""Weights of an int4 scale."""
PART, MOST_PARTS = 2 << 20, 8
"""Bytes, for each thread up to so many, of the dense part of a weight that is made and multiplied with at once on a CPU: it stays in the
processor's cache, so that memory sees the codes alone. Smaller ones are not worth that threads wait for each other: of a token of 100 M
parameters in int8 two threads take 16 ms, and 50 with 512 KiB in all (one thread: 20, and 30)."""

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Layer:
    """A linear layer that is quantised; its `module` has no weights yet."""

    name: str
    module: nn.Module
    weight: torch.Tensor
    """On meta, as it was: a DTensor, where tensor parallelism splits it."""
    form: str
    group: Group
    """Of the ranks that have other inputs of the same channels."""

    @property
    def tensor_name(self) -> str:
        """The weight's, in files."""
        return f"{self.name}.weight"

    def fill(self, loaded: torch.Tensor) -> None:
        """Quantise this rank's part of the weight, a tensor as `weight` with its values. Collective over `group`."""
        dense = local_tensor(loaded)
        codes, scales = quantise(dense.t() if is_conv1d(self.module) else dense, self.form, self.group)
        for name, value in ((CODES, codes), (SCALES, scales)):
            parameter = own_parameters(self.module)[name]
            assert parameter is not None
            parameter.data.copy_(value)


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
    found = _unpacked(codes, torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device))
    found.sub_(8).unflatten(1, (-1, GROUP)).mul_(scales.unsqueeze(2).to(dtype))
    return found


def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [..., in] times the weight: [..., out]."""
    if x.device.type != "cpu" or not codes.numel() or not x.numel():
        return F.linear(x, dequantise(codes, scales, x.dtype), bias)
    flat = x.reshape(-1, x.shape[-1])
    step = min(len(codes), max(1, _dense_bytes() // (x.shape[-1] * x.element_size())))
    place = torch.empty(step, x.shape[-1], dtype=x.dtype)
    y = torch.empty(len(flat), len(codes), dtype=x.dtype)
    is_int8, is_exact = codes.dtype == torch.int8, x.dtype in (torch.float32, torch.float64)
    for at in range(0, len(codes), step):
        part = codes[at : at + step]
        dense = place[: len(part)]
        if is_int8:
            dense.copy_(part)
        else:
            _unpacked(part, dense)
            if not is_exact:
                dense.sub_(8)
            dense.unflatten(1, (-1, GROUP)).mul_(scales[at : at + step].unsqueeze(2))
        torch.mm(flat, dense.t(), out=y[:, at : at + step])
    if is_int8:
        y *= scales.to(x.dtype)
    elif is_exact:  # codes are 8 too large; of 16 bits the difference would leave too few
        y -= 8 * (flat.unflatten(1, (-1, GROUP)).sum(2) @ scales.to(x.dtype).t())
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _dense_bytes() -> int:
    return PART * min(torch.get_num_threads(), MOST_PARTS)


def product_bytes(model: nn.Module, itemsize: int) -> int:
    """Of memory that products of a quantised model take on a CPU at most besides what they are given and return; `itemsize` of what it
    computes in. int4 unpacks its codes in bytes of their own."""
    codes = [one for name, one in model.named_parameters() if name.endswith(CODES)]
    largest = max((one.numel() * (1 if one.dtype == torch.int8 else 2) * itemsize for one in codes), default=0)
    return min(largest, _dense_bytes()) * 5 // 4


def _unpacked(codes: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 of packed ones, in `into`."""
    half = codes.shape[1]
    into[:, :half] = codes & 15
    into[:, half:] = codes >> 4
    return into


def layers_to_quantise(model: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers of the repeated blocks. Raises InputError where there are none."""
    blocks, tied = find_blocks(model), {name for group in tied_names(model) for name in group}
    found = tuple(
        name
        for block in blocks
        for name, module in model.get_submodule(block).named_modules(prefix=block)
        if is_linear(module) and f"{name}.weight" not in tied and not is_adapters(f"{name}.weight")
    )
    if normed := [name for name, _ in model.named_parameters() if "lora_magnitude_vector" in name]:
        raise InputError(f"--quant: the adapter has {normed[0]} (DoRA), which reads the dense weights of its layer; leave --quant out")
    if not found:
        raise InputError(f"--quant: {type(model).__name__} has no linear layers in repeated blocks, so nothing would be quantised")
    return found


def convert(model: nn.Module, names: Collection[str], form: str, group: Group = None) -> list[Layer]:
    """Replace the weights of the layers `names`, on meta, by codes and scales on meta. Those of them that the model has; a pipeline stage
    lacks some. `group`: of tensor parallelism. Raises InputError where int4 groups do not fit into what a rank has."""
    modules, found = dict(model.named_modules()), []
    for name in (name for name in names if name in modules and own_parameters(modules[name]).get("weight") is not None):
        module = modules[name]
        weight = own_parameters(module)["weight"]
        assert weight is not None
        own_parameters(module)["weight"] = None  # the name stays the layer's, as tensor parallelism wants it
        outputs, inputs = _out_in(module, tuple(local_tensor(weight).shape))
        in_all = _out_in(module, tuple(weight.shape))[1]
        if form == INT4 and inputs % GROUP:
            of = f" of {in_all:,} on this rank" if inputs != in_all else ""
            raise InputError(
                f"--quant int4: {name} has {inputs:,} inputs{of}, and groups are of {GROUP}; use --quant int8, or a degree of tensor "
                "parallelism that does not cut groups"
            )
        codes = torch.empty(
            outputs, inputs if form == INT8 else inputs // 2, dtype=torch.int8 if form == INT8 else torch.uint8, device="meta"
        )
        scales = torch.empty(outputs, dtype=torch.float32, device="meta")
        if form == INT4:
            scales = torch.empty(outputs, inputs // GROUP, dtype=torch.bfloat16, device="meta")
        own_parameters(module)[CODES] = nn.Parameter(codes, requires_grad=False)
        own_parameters(module)[SCALES] = nn.Parameter(scales, requires_grad=False)
        module.__dict__["_plait_dtype"] = weight.dtype
        module.__class__ = _quantised_class(type(module))  # type: ignore[arg-type]
        found.append(Layer(name, module, weight, form, group if inputs != in_all else None))
    return found


def quantised_copy(model: nn.Module, form: str) -> nn.Module:
    """A copy of a model on meta with its layers quantised, to count the bytes of. Raises InputError where they cannot be."""
    found = copy.deepcopy(model)
    convert(found, layers_to_quantise(found), form)
    return found


@cache
def _quantised_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Of the same name, so that what looks for a kind of layer finds it; its `weight` is made of codes and scales when it is read."""

    def weight(module: Any) -> ComputedWeight:
        codes, scales, dtype = module.weight_codes, module.weight_scales, module._plait_dtype
        outputs, inputs = len(codes), codes.shape[1] * (1 if codes.dtype == torch.int8 else 2)
        transposed = is_conv1d(module)
        return ComputedWeight(
            (inputs, outputs) if transposed else (outputs, inputs),
            codes,
            dtype,
            dense=lambda: dequantise(codes, scales, dtype),
            product=lambda x, bias: product(x, codes, scales, bias),
            transposed=transposed,
        )

    return type(kind.__name__, (kind,), {"weight": property(weight), "__module__": kind.__module__})


def _out_in(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[1], shape[0]) if is_conv1d(module) else (shape[0], shape[1])


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model with quantised layers, on one process."""

    layers: int
    """Of the quantised layers."""
    layers_in_float32: int
    model: int
    model_in_float32: int

    def __str__(self) -> str:
        return (
            f"quantised layers take {format_bytes(self.layers)}, {self.layers / self.layers_in_float32:.3f} x their float32 bytes; all "
            f"weights {format_bytes(self.model)}, {self.model / self.model_in_float32:.3f} x"
        )


def sizes_of(model: nn.Module, quantised: nn.Module) -> Sizes:
    """Of a model on meta, and the same with quantised layers."""
    after = dict(quantised.named_parameters())
    small = sum(p.numel() * p.element_size() for name, p in after.items() if name.endswith((CODES, SCALES)))
    large = sum(4 * p.numel() for name, p in model.named_parameters() if name not in after)
    others = [p for name, p in after.items() if not name.endswith((CODES, SCALES))]
    same = sum(p.numel() * p.element_size() for p in others)
    return Sizes(small, large, small + same, large + sum(4 * p.numel() for p in others))
