"""Parameters that a layout cannot train as one process does, refused by name before any process
group exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.modules import has_gradient_hooks
from plait._torch.storage import storage_key
from plait.errors import ModelError
from plait.parallel.memory_layout import overlaps_itself


def refuse_unusable_parameters(
    model: nn.Module, *, sharded: bool, moved: bool, summed: bool
) -> None:
    """Raise ModelError. `moved`: parameters go to another place, so what shares memory would be
    torn apart, as by sharding. `summed`: their gradients are summed over ranks.
    """
    for name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and not isinstance(parameter, DTensor)
            and overlaps_itself(parameter)
        ):
            raise ModelError(
                f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) is an"
                " expanded tensor, whose elements share memory, so no optimizer updates it; make"
                " it a parameter of its own, nn.Parameter(tensor.clone()), or expand it in forward"
            )
        if sharded and has_gradient_hooks(parameter):
            raise ModelError(
                f"{name} has a hook on its gradient, and sharding puts another parameter in its"
                " place, so the hook would never be called; register it afterwards, on the model's"
                " parameters as they are then (they get reduced gradients), or use ZeRO stage 0"
            )
        if sharded and parameter.requires_grad and not parameter.numel():
            raise ModelError(
                f"{name} (shape {tuple(parameter.shape)}) has no elements, and torch cannot shard"
                " its gradient; call requires_grad_(False) on it, or use ZeRO stage 0"
            )
    if sharded or moved:
        _refuse_shared_memory(model)
    if summed:
        for name, module in model.named_modules():
            if (
                isinstance(module, nn.Embedding | nn.EmbeddingBag)
                and module.sparse
                and module.weight.requires_grad
            ):
                raise ModelError(
                    f"{name or 'the model'} makes sparse gradients ({type(module).__name__},"
                    " sparse=True), and ranks sum dense ones; build it with sparse=False"
                )


def quantised_by_bitsandbytes(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights in 8 or 4 bits by name, replicated on every rank: their scales are in attributes, and
    belong to all of them. Frozen.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if _library(parameter) == "bitsandbytes"
    }


def refuse_quantised(model: nn.Module, *, moved: bool, cast: bool, several: bool) -> None:
    """Raise ModelError for weights that another library has quantised, where they would not be what
    they were. `moved`: to another device, by offload, or split by tensor parallelism. `cast`:
    blocks compute in another dtype. `several`: there are other processes.
    """
    for name, parameter in quantised_by_bitsandbytes(model).items():
        if moved:
            raise ModelError(
                f"{name} is {type(parameter).__name__} of bitsandbytes, whose scales are not with"
                " its values, so it is neither split nor moved; use parallel.tp = 1 without"
                " offload, any ZeRO stage and parallel.pp, and load it on this rank's device"
            )
    for name, parameter in model.named_parameters():
        if _library(parameter) == "torchao" and (moved or cast or several):
            raise ModelError(
                f"{name} is {type(parameter).__name__} of torchao, which torch cannot send between"
                " processes nor shard; quantise with bitsandbytes, or train adapters on weights"
                " that are not quantised"
            )


def _library(parameter: nn.Parameter) -> str:
    return type(parameter).__module__.partition(".")[0]


def refuse_several_dtypes(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ModelError where parameters that are gathered together (of a block, or all outside of
    the blocks) have several dtypes, which torch does not shard.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            unit = next((block for block in blocks if name.startswith(f"{block}.")), "")
            other, dtype = first.setdefault(unit, (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ModelError(
                    f"{name} is {_short(parameter.dtype)} and {other} {_short(dtype)}, and what is"
                    f" sharded together ({unit or 'all outside of the blocks'}) has to be of one"
                    " dtype; convert one of them, name modules of one dtype each in"
                    " parallel.blocks, or use ZeRO stage 0"
                )


def refuse_complex(model: nn.Module) -> None:
    """Raise ModelError for complex parameters that would be computed with, or reduced, as real
    numbers of 16 or 32 bits.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ModelError(
                f"{name} is {_short(parameter.dtype)}, and bf16, fp16 and communication_data_type"
                " would drop its imaginary part; leave them out"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_shared_memory(model: nn.Module) -> None:
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and not isinstance(tensor, DTensor):
            by_storage.setdefault(storage_key(tensor), []).append((name, tensor))
    for (first, one), (second, other) in (
        pair for held in by_storage.values() for pair in combinations(held, 2)
    ):
        if (one.requires_grad or other.requires_grad) and _share_elements(one, other):
            raise ModelError(
                f"{first} and {second} are two tensors in the same memory, which sharding or moving"
                " them would tear apart; make them one parameter (`b.weight = a.weight`), or use"
                " ZeRO stage 0 with real weights on the training device"
            )


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    (low, high), (other_low, other_high) = _extent(one), _extent(other)
    if one.dtype != other.dtype or max(low, other_low) >= min(high, other_high):
        return one.dtype != other.dtype and one.untyped_storage().nbytes() > 0
    if one.is_contiguous() and other.is_contiguous():
        return True
    found = [torch.zeros(max(high, other_high), dtype=torch.bool) for _ in range(2)]
    for marks, tensor in zip(found, (one, other), strict=True):
        marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return bool((found[0] & found[1]).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element of the storage that a tensor has, and the one after its last."""
    start = tensor.storage_offset()
    return int(start), int(
        start
        + 1
        + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )
