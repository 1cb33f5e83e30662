"""The owner of a model: the engine, or your own training loop, to which it was passed last.

A replicated model is a plain module and may be passed on: its previous owner removes its hooks, and raises an error when it is used. A
model that was split (shards, tp, a pipeline) has changed, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel as TorchDataParallel
from torch.nn.parallel import DistributedDataParallel

from plait.cluster.mesh import Mesh
from plait.errors import InputError, ModelError
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.technique import Parts

_ATTRIBUTE = "_plait"


@dataclass(frozen=True)
class Owner:
    """Of a model that was given to Plait."""

    parts: Parts
    mesh: Mesh
    own_loop: bool = False
    """Whether your own training loop trains it, and no engine."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nobody, ()  # a copy of the model, or one from a file, has no owner


def _nobody() -> None:
    return None


def remember(model: nn.Module, owner: Owner) -> None:
    """`owner` has the model now."""
    # A plain attribute of the user's model, outside nn.Module's registries: no wrapper, no global table, names stay as they are.
    object.__setattr__(model, _ATTRIBUTE, owner)


def recall(model: nn.Module) -> Owner:
    """Raises InputError for a model without an owner."""
    owner: Owner | None = getattr(model, _ATTRIBUTE, None)
    if owner is None:
        raise InputError(f"this {type(model).__name__} was not sharded by plait.parallelize; call it first, and pass the same object")
    return owner


def release(model: nn.Module, owner: Owner) -> None:
    """`owner` has done with the model, if it still has it: a replicated one is as it was, but for its weights."""
    if getattr(model, _ATTRIBUTE, None) is not owner:
        return
    for end in owner.parts.hooks.release:
        end()
    if not _is_cut(owner):
        object.__delattr__(model, _ATTRIBUTE)


def refuse_taken(model: nn.Module) -> None:
    """Raise ModelError for a model that is wrapped, or cut and so no longer what it was."""
    if isinstance(model, DistributedDataParallel | TorchDataParallel):
        raise ModelError(
            f"the model is already wrapped in {type(model).__name__}, which would reduce every gradient twice; pass the inner model "
            "(`model.module`) and delete the wrapping line: Plait does its work"
        )
    owner: Owner | None = getattr(model, _ATTRIBUTE, None)
    if owner is not None and _is_cut(owner):
        layout, data = owner.mesh.layout, owner.parts.noted(DataParallel)
        stage = data.stage if data is not None else 0
        raise ModelError(
            f"the model was already sharded by Plait (ZeRO stage {stage}, parallel.pp {layout.pp}, parallel.tp {layout.tp}), "
            "and its parameters are parts now; build it again (under torch.device('meta'), for nothing) and load its checkpoint, or go on "
            "with the engine that it has"
        )
    if any(isinstance(module, FSDPModule | DistributedDataParallel) for module in model.modules()):
        raise ModelError("part of the model is already sharded or wrapped (fully_shard or DistributedDataParallel); pass the plain model")


def take_over(model: nn.Module) -> None:
    """Before the model gets a new owner: release it from the old one."""
    owner: Owner | None = getattr(model, _ATTRIBUTE, None)
    if owner is not None:
        release(model, owner)
        owner.mesh.leave()


def close(model: nn.Module, owner: Owner) -> None:
    """`owner` is closed: it lets go of the model, and its threads, files and process groups end, the default one where Plait made
    it and nobody else uses it."""
    release(model, owner)
    for end in owner.parts.hooks.close:
        end()
    owner.mesh.close()


def _is_cut(owner: Owner) -> bool:
    layout, parts = owner.mesh.layout, owner.parts
    return isinstance(parts.model, FSDPModule) or layout.pp > 1 or layout.tp > 1 or parts.noted(OffloadedActivations) is not None
