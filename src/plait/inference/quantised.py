"""Weights of linear layers in 8 or 4 bits, for inference: which layers of a model, and the parameters that they have instead.

Products are computed in the dtype of the activations. Linear layers of the repeated blocks are quantised; embeddings, the head, norms,
biases, and experts that are kept in one tensor are not.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from plait._torch.computed_weight import ComputedWeight
from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_parameters
from plait.errors import InputError
from plait.inference.adapters import is_adapters
from plait.inference.quantised_format import GROUP, INT4, INT8, Group, dequantise, quantise
from plait.inference.quantised_products import largest_part_bytes, product
from plait.model.blocks import find_blocks
from plait.model.layers import is_conv1d, is_linear
from plait.model.tied import tied_names
from plait.units import format_bytes

CODES, SCALES = "weight_codes", "weight_scales"
"""Names of the parameters that a quantised layer has in the place of `weight`."""


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


def product_bytes(model: nn.Module, dtype: torch.dtype, *, tokens: int) -> int:
    """Of memory that products of a quantised model take on a CPU at most besides what they are given and return; `dtype` is what it
    computes in, and float16 is given, and returned, in float32 as well."""
    codes = [one for name, one in model.named_parameters() if name.endswith(CODES)]
    shapes = [(len(one), one.shape[1] * (1 if one.dtype == torch.int8 else 2)) for one in codes]
    is_half = dtype == torch.float16
    part = largest_part_bytes(max((outputs * inputs * (4 if is_half else dtype.itemsize) for outputs, inputs in shapes), default=0))
    return part + (4 * tokens * max(map(sum, shapes), default=0) if is_half else 0)


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
