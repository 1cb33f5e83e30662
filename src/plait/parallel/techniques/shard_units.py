"""Division of a model into the units that `fully_shard` gathers and reduces.

Units are the blocks, the experts of a block (on a separate mesh), modules that compute in float32,
embeddings, the head, and the root unit with all other parameters. If a layout cannot train a
parameter as a single process would, the parameter is refused, if possible before any process group
exists. The error names the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from plait._torch.gathering import follow_root
from plait._torch.modules import has_gradient_hooks
from plait._torch.tensors import storage_key
from plait.cluster.mesh import Mesh
from plait.errors import ModelError
from plait.model.outer_layers import OuterUnits
from plait.parallel.parameter_layout import overlaps_itself
from plait.parallel.parts import Parts
from plait.sizes import dtype_name


def shard_units(parts: Parts, mesh: Mesh, *, free_after_forward: bool | int) -> None:
    """Shard the blocks and the parameters outside them, in place.

    Args:
        parts: The model, with the outer units that `DataParallel.check` returned.
        mesh: The mesh of all ranks.
        free_after_forward: Whether the parameters of a block are freed after its forward. If this
            is a number, they are resharded over that many ranks instead.

    Raises:
        ModelError: torch cannot shard a parameter.
    """
    _refuse_unshardable(parts, is_pipeline=mesh.layout.pp > 1)
    _make_contiguous(parts.model)
    if mesh.layout.dp_replicate > 1:
        dp_mesh = mesh.sub("dp_replicate", "dp_shard")
    else:
        dp_mesh = mesh.sub("dp_shard")

    policy = MixedPrecisionPolicy(
        param_dtype=parts.shard.compute_dtype, reduce_dtype=parts.shard.reduce_dtype
    )
    # Experts receive routing weights besides tokens, and those must keep their dtype.
    expert_policy = MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        cast_forward_inputs=False,
    )
    replicated = {
        *quantised_by_bitsandbytes(parts.model).values(),
        *(p for p in parts.model.parameters() if p.ndim == 0),
    }

    def shard(
        name: str, over: DeviceMesh, precision: MixedPrecisionPolicy, *, free: bool | int
    ) -> FSDPModule:
        unit = _block_of(parts.blocks, name)
        offload = OffloadPolicy()
        if parts.shard.master_weights_on_host and unit in parts.shard.offloaded_units:
            offload = CPUOffloadPolicy(pin_memory=parts.shard.pin_master_weights)
        return fully_shard(
            parts.model.get_submodule(name),
            mesh=over,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=free,
            ignored_params=replicated,
        )

    for name, expert_mesh in parts.shard.separate_mesh.items():
        shard(name, expert_mesh, expert_policy, free=free_after_forward)
    float32 = MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.param_dtype,
        cast_forward_inputs=True,
    )
    for name in parts.shard.float32_modules:
        shard(name, dp_mesh, float32, free=free_after_forward)
    for name in parts.blocks:
        if name not in parts.shard.float32_modules:
            shard(name, dp_mesh, policy, free=free_after_forward)

    # A pipeline gathers the parameters outside the blocks for each computation of a stage, so
    # they stay one unit.
    outer = OuterUnits()
    if mesh.layout.pp == 1 and parts.plans.outer_units is not None:
        outer = parts.plans.outer_units.without(parts.shard.float32_modules)
    free_embeddings = bool(free_after_forward)
    embeddings = [shard(name, dp_mesh, policy, free=free_embeddings) for name in outer.embeddings]
    heads = []
    if outer.head is not None:
        heads.append(shard(outer.head, dp_mesh, policy, free=False))
    # The root unit (final norms, small layers) is used at both ends of a pass. It stays gathered
    # from the forward to the end of the backward.
    root = shard("", dp_mesh, policy, free=False)
    if embeddings or heads:
        follow_root(root, embeddings=embeddings, heads=heads)


def _refuse_unshardable(parts: Parts, *, is_pipeline: bool) -> None:
    refuse_several_dtypes(parts.model, parts.blocks)
    owner: dict[int, tuple[str, str]] = {}
    for name, parameter in parts.model.named_parameters(remove_duplicate=False):
        if parameter.ndim == 0:
            _refuse_scalar(name, parts, is_pipeline=is_pipeline)
            continue
        block = _block_of(parts.blocks, name) or "the rest of the model"
        first_name, first_block = owner.setdefault(id(parameter), (name, block))
        if block != first_block:
            raise ModelError(
                f"{first_name} and {name} are one parameter in two units ({first_block} and"
                f" {block}), which cannot be sharded separately; use ZeRO stage 0, or put both"
                " modules into one module whose forward runs both and name that module in"
                " parallel.blocks"
            )


def _refuse_scalar(name: str, parts: Parts, *, is_pipeline: bool) -> None:
    """Refuse a 0-dimensional parameter if the layout does not support replicated parameters."""
    if parts.shard.master_weights_on_host:
        raise ModelError(
            f"{name} is a 0-dimensional parameter, which cannot be sharded, and"
            " offload_optimizer updates shards only; make it 1-dimensional (shape [1]), or set"
            ' zero_optimization.offload_optimizer.device = "none"'
        )
    if is_pipeline:
        raise ModelError(
            f"{name} is a 0-dimensional parameter, which cannot be sharded, and a pipeline supports"
            " it only if all parameters are replicated; make it 1-dimensional (shape [1]), or use"
            " ZeRO stage 0 without bf16, fp16 and offloading"
        )


def refuse_several_dtypes(model: nn.Module, blocks: Sequence[str]) -> None:
    """Refuse units with parameters of several dtypes, which torch cannot shard.

    A unit is a block, or all parameters outside the blocks.

    Raises:
        ModelError: The dtypes of a unit differ. The error names two of its parameters.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            unit = _block_of(blocks, name)
            first_name, dtype = first.setdefault(unit, (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ModelError(
                    f"{name} is {dtype_name(parameter.dtype)} and {first_name} is"
                    f" {dtype_name(dtype)}, but parameters that are sharded together"
                    f" ({unit or 'all outside the blocks'}) must have one dtype; convert one of"
                    " them, list modules with parameters of only one dtype in parallel.blocks, or"
                    " use ZeRO stage 0"
                )


def _block_of(blocks: Sequence[str], name: str) -> str:
    """Return the name of the block that contains a module or parameter, or an empty string."""
    return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), "")


def _make_contiguous(model: nn.Module) -> None:
    """Make transposed and channels-last parameters contiguous, as `fully_shard` requires."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def quantised_by_bitsandbytes(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen 8-bit and 4-bit weights of bitsandbytes, by name.

    They are replicated on every rank, because the scales of a weight are stored in attributes that
    cannot be sharded with it.
    """
    quantised: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if _library(parameter) == "bitsandbytes":
            quantised[name] = parameter
    return quantised


def refuse_quantised(model: nn.Module, *, moved: bool, cast: bool, several: bool) -> None:
    """Refuse weights quantised by bitsandbytes or torchao if the layout does not support them.

    Args:
        model: The model of the user.
        moved: Whether parameters are moved to another device, offloaded, or split by tensor
            parallelism.
        cast: Whether blocks compute in another dtype.
        several: Whether there are several processes.

    Raises:
        ModelError: The layout does not support a quantised weight. The error names the first one,
            and a remedy.
    """
    for name, parameter in quantised_by_bitsandbytes(model).items():
        if moved:
            raise ModelError(
                f"{name} has the type {type(parameter).__name__} of bitsandbytes, which stores"
                " scales apart from the values, so it can be neither split nor moved; load it on"
                " this rank's device, and use parallel.tp = 1 without offload (any ZeRO stage and"
                " parallel.pp are supported)"
            )
    for name, parameter in model.named_parameters():
        if _library(parameter) == "torchao" and (moved or cast or several):
            raise ModelError(
                f"{name} has the type {type(parameter).__name__} of torchao, which torch can"
                " neither send between processes nor shard; quantise with bitsandbytes, or train"
                " adapters on weights that are not quantised"
            )


def _library(parameter: nn.Parameter) -> str:
    return type(parameter).__module__.partition(".")[0]


def refuse_complex(model: nn.Module) -> None:
    """Refuse complex parameters that would be cast to real numbers of 16 or 32 bits.

    Raises:
        ModelError: A parameter is complex. The error names the first one.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ModelError(
                f"{name} is {dtype_name(parameter.dtype)}, and bf16, fp16 and"
                " communication_data_type would drop its imaginary part; leave these settings out"
            )


def refuse_uneven_complex(model: nn.Module, shards: int) -> None:
    """Refuse complex vectors whose shards have different lengths.

    torch's Adam updates a complex tensor through a view of its real numbers. For a DTensor that is
    split unevenly along its last dimension, `view_as_real` returns a copy, so Adam would not update
    the parameter.

    Args:
        model: The model.
        shards: Number of ranks over which parameters are sharded.

    Raises:
        ModelError: A parameter is such a vector. The error names the first one, and a remedy.
    """
    for name, parameter in model.named_parameters():
        is_vector = parameter.is_complex() and parameter.ndim == 1
        if parameter.requires_grad and is_vector and parameter.numel() % shards:
            raise ModelError(
                f"{name} is {dtype_name(parameter.dtype)} with {parameter.numel()} elements, and"
                f" {shards} ranks hold shards of different lengths, which torch's Adam would not"
                f" update; make its length a multiple of {shards}, keep its real numbers as the"
                " parameter (torch.view_as_complex(parameter) in the forward), or use ZeRO stage 0"
            )


def refuse_unusable_parameters(
    model: nn.Module, *, sharded: bool, moved: bool, summed: bool
) -> None:
    """Refuse parameters that this layout cannot train.

    Args:
        model: The model of the user.
        sharded: Whether parameters are sharded.
        moved: Whether parameters are moved to another device. Like sharding, this separates
            tensors that share memory.
        summed: Whether gradients are summed over ranks.

    Raises:
        ModelError: A parameter cannot be trained. The error names the first one, and a remedy.
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
                f"{name} has a hook on its gradient, but sharding replaces the parameter, so the"
                " hook would never be called; call register_post_accumulate_grad_hook on the"
                " parameters of the sharded model, whose hooks find the reduced gradient in"
                " parameter.grad, or use ZeRO stage 0"
            )
        if sharded and parameter.requires_grad and not parameter.numel():
            raise ModelError(
                f"{name} (shape {tuple(parameter.shape)}) has no elements, and torch cannot shard"
                " its gradient; call requires_grad_(False) on it, or use ZeRO stage 0"
            )
    if sharded or moved:
        _refuse_shared_memory(model)
    if summed:
        _refuse_sparse_gradients(model)


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ModelError(
                f"{name or 'the model'} produces sparse gradients ({type(module).__name__},"
                " sparse=True), but only dense gradients can be reduced; build it with"
                " sparse=False"
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and not isinstance(tensor, DTensor):
            by_storage.setdefault(storage_key(tensor), []).append((name, tensor))
    for tensors in by_storage.values():
        for (first_name, first), (second_name, second) in combinations(tensors, 2):
            trains = first.requires_grad or second.requires_grad
            if trains and _share_elements(first, second):
                raise ModelError(
                    f"{first_name} and {second_name} are two tensors in the same memory, but"
                    " sharding or moving them would separate them; make them one parameter"
                    " (`b.weight = a.weight`), or use ZeRO stage 0 with real weights on the"
                    " training device"
                )


def _share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors of one storage have an element in common."""
    if first.dtype != second.dtype:
        # Their elements are not comparable, so any memory in common counts.
        return first.untyped_storage().nbytes() > 0
    start, end = _extent(first)
    second_start, second_end = _extent(second)
    if max(start, second_start) >= min(end, second_end):
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True

    # Interleaved strides: mark the elements of each tensor, and compare.
    masks = []
    for tensor in (first, second):
        mask = torch.zeros(max(end, second_end), dtype=torch.bool)
        mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
        masks.append(mask)
    return bool((masks[0] & masks[1]).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (start, end) of the range of storage elements that a tensor spans."""
    start = int(tensor.storage_offset())
    end = start + 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        end += (size - 1) * stride
    return start, int(end)
