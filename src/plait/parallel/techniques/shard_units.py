"""Division of a model into the units that `fully_shard` gathers and reduces.

Units are the blocks, the experts of a block on a separate mesh, modules that compute in float32,
embeddings, the head, and the root unit with all other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

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

from plait._torch.outer_units import follow_root
from plait.cluster.mesh import Mesh
from plait.errors import ModelError
from plait.model.outer_units import OuterUnits
from plait.parallel.parameter_checks import quantised_by_bitsandbytes, refuse_several_dtypes
from plait.parallel.parts import Parts


def shard_units(parts: Parts, mesh: Mesh, *, free_after_forward: bool | int) -> None:
    """Shard the blocks and the parameters outside of them, in place.

    Args:
        parts: The model, with the outer units that `DataParallel.check` returned.
        mesh: The mesh of all ranks.
        free_after_forward: Whether the parameters of a block are freed after its forward. If this
            is a number, they are resharded over that many ranks instead.

    Raises:
        ModelError: If torch cannot shard a parameter.
    """
    _refuse_unshardable(parts, is_pipeline=mesh.layout.pp > 1)
    _make_contiguous(parts.model)
    axes: tuple[str, ...] = ("dp_shard",)
    if mesh.layout.dp_replicate > 1:
        axes = ("dp_replicate", "dp_shard")

    def offload(unit: str) -> OffloadPolicy:
        if parts.shard.master_weights_on_host and unit in parts.shard.offloaded_units:
            return CPUOffloadPolicy(pin_memory=parts.shard.pin_master_weights)
        return OffloadPolicy()

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
        name: str, over: DeviceMesh, precision: MixedPrecisionPolicy, unit: str, *, free: bool | int
    ) -> FSDPModule:
        module = parts.model.get_submodule(name)
        return fully_shard(
            module,
            mesh=over,
            mp_policy=precision,
            offload_policy=offload(unit),
            reshard_after_forward=free,
            ignored_params=replicated,
        )

    for name, expert_mesh in parts.shard.separate_mesh.items():
        unit = _block_of(parts.blocks, name)
        shard(name, expert_mesh, expert_policy, unit, free=free_after_forward)
    float32 = MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.param_dtype,
        cast_forward_inputs=True,
    )
    for name in parts.shard.float32_modules:
        unit = _block_of(parts.blocks, name)
        shard(name, mesh.sub(*axes), float32, unit, free=free_after_forward)
    for name in parts.blocks:
        if name not in parts.shard.float32_modules:
            shard(name, mesh.sub(*axes), policy, name, free=free_after_forward)

    # A pipeline gathers the parameters outside of the blocks for each computation of a stage, so
    # they stay one unit.
    outer = parts.plans.outer_units if mesh.layout.pp == 1 else None
    outer = (outer or OuterUnits()).without(parts.shard.float32_modules)
    free_embeddings = bool(free_after_forward)
    embeddings = [
        shard(name, mesh.sub(*axes), policy, "", free=free_embeddings) for name in outer.embeddings
    ]
    heads = []
    if outer.head is not None:
        heads.append(shard(outer.head, mesh.sub(*axes), policy, "", free=False))
    # The root unit (final norms, small layers) is used at both ends of a pass. It stays gathered
    # from the forward to the end of the backward.
    root = shard("", mesh.sub(*axes), policy, "", free=False)
    if embeddings or heads:
        follow_root(root, embeddings=embeddings, heads=heads)


def _block_of(blocks: Sequence[str], name: str) -> str:
    """Return the block that is called `name` or has it inside, or an empty string."""
    return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), "")


def _make_contiguous(model: nn.Module) -> None:
    """Make transposed and channels-last parameters contiguous, as `fully_shard` requires."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _refuse_unshardable(parts: Parts, *, is_pipeline: bool) -> None:
    refuse_several_dtypes(parts.model, parts.blocks)
    owner: dict[int, tuple[str, str]] = {}
    for name, parameter in parts.model.named_parameters(remove_duplicate=False):
        if parameter.ndim == 0:
            if is_pipeline or parts.shard.master_weights_on_host:
                raise ModelError(
                    f"{name} is a 0-dimensional parameter, which a pipeline and an offloaded"
                    " optimizer cannot shard; make it 1-dimensional (shape [1]) or use ZeRO"
                    " stage 0"
                )
            continue
        block = _block_of(parts.blocks, name) or "the rest of the model"
        first_name, first_block = owner.setdefault(id(parameter), (name, block))
        if block != first_block:
            raise ModelError(
                f"{first_name} and {name} share one parameter across two units ({first_block} and "
                f"{block}), which cannot be sharded separately; use ZeRO stage 0, or put both "
                "modules into one module whose forward runs both, and name it in parallel.blocks"
            )
