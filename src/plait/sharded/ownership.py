"""Ownership of a model: it belongs to the engine or `ParallelModel` that it was passed to last.

A replicated model is a plain module and may be passed on. Its previous owner removes its hooks, and
raises an error when it is used. A model that was split (shards, tensor or pipeline parallelism) has
changed for good and is refused.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel as TorchDataParallel
from torch.nn.parallel import DistributedDataParallel

from plait.errors import ModelError
from plait.sharded.model import owner_of


def refuse_taken(model: nn.Module) -> None:
    """Raise ModelError for a model that is already wrapped or split."""
    if isinstance(model, DistributedDataParallel | TorchDataParallel):
        raise ModelError(
            f"the model is already wrapped in {type(model).__name__}, which would reduce every"
            " gradient twice; pass the inner model (`model.module`) and delete the wrapping line:"
            " Plait does its work"
        )
    # DeepSpeed marks the parameters that it has partitioned with `ds_id`.
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            "the model's parameters were cut by DeepSpeed itself (its zero.Init, or Transformers' "
            "HfDeepSpeedConfig), and this process has a part of them; leave that out, and build "
            "the model with plait.from_pretrained(name)"
        )
    owner = owner_of(model)
    if owner is not None and owner.is_cut:
        layout = owner.mesh.layout
        raise ModelError(
            f"the model was already sharded by Plait (ZeRO stage {owner.parts.zero_stage},"
            f" parallel.pp {layout.pp},"
            f" parallel.tp {layout.tp}), and its parameters are parts now; build it again (under"
            " torch.device('meta'), at no cost) and load its checkpoint, or go on with the engine"
            " that it has"
        )
    if any(isinstance(module, FSDPModule | DistributedDataParallel) for module in model.modules()):
        raise ModelError(
            "part of the model is already sharded or wrapped (fully_shard or"
            " DistributedDataParallel); pass the plain model"
        )


def take_over(model: nn.Module) -> None:
    """Release a model from its previous owner, if it has one."""
    owner = owner_of(model)
    if owner is not None:
        owner.release()
        owner.mesh.leave()
