"""Patched behaviour of `fully_shard`: errors for changes that sharding would ignore silently.

`pre_forward`, `reshard`, `unshard` and `wait_for_unshard` of a unit's groups are replaced. The
replacements also make gathering in inference mode usable for later training steps, and find the
tensors of dataclasses that a unit returns.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from plait._torch.units import parameter_groups
from plait.errors import InputError


def watch_shards(module: FSDPModule) -> None:
    """Make a fully sharded unit raise InputError for changes that would have no effect.

    Call this once per unit, when it has its final parameters. From then on the unit refuses
    another parameter in the place of a shard, other data in a shard, a hook on the gradient of a
    shard, a loss that reads a shard, and a write into the gathered copy. Parameters that are
    gathered in inference mode serve the next training step too.
    """
    _search_dataclasses(module)
    for group in parameter_groups(module):
        _WatchedGroup(group)


def _search_dataclasses(module: FSDPModule) -> None:
    """Make the backward of a unit gather its parameters if its forward returns a dataclass.

    The backward gathers a unit when a gradient of its output arrives. torch 2.11 finds tensors in
    an output with pytree functions only, which treat unregistered dataclasses as leaves. The
    backward would then compute with freed memory. Later releases search dataclasses.
    """
    if hasattr(_common_utils, "collect_grad_tensors"):
        return
    state: Any = module._get_fsdp_state()
    register = state._register_pre_backward_hook

    def register_in_dataclasses(output: Any) -> Any:
        if torch.is_grad_enabled():
            register(list(_leaves(output)))
        return output

    state._register_pre_backward_hook = register_in_dataclasses


def _leaves(output: Any) -> Iterator[Any]:
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


class _RefuseLossGradient:
    """Autograd hook on a shard. torch assigns reduced gradients to shards without autograd.

    Autograd calls the hook only if the loss reads the shard itself.
    """

    def __init__(self, p: Any) -> None:
        # The name of the parameter is complete after the first forward only, so it is looked up
        # late. The reference is weak because the shard refers to this hook.
        self.parameter = weakref.ref(p)

    def __call__(self, _gradient: torch.Tensor) -> None:
        raise InputError(
            f"{_name(self.parameter())} is read by the loss itself (a penalty on weights?) while it"
            " is a shard, so its gradient from there would be that of this rank only: read it after"
            " the model was called (at ZeRO stages 1 and 2 it is unsharded then), leave a penalty"
            " on squares to the optimizer's weight_decay, or use ZeRO stage 0"
        )


class _WatchedGroup:
    """Replaced methods of a unit's parameter group that check the shards."""

    def __init__(self, group: Any) -> None:
        self._group = group
        # The storage object is referenced, so that no new storage can get its address.
        self._shards = {p: (p.sharded_param, *_content(p.sharded_param)) for p in group.fsdp_params}
        self._versions: dict[Any, int] = {}
        """Version counters of the gathered parameters after the last gather."""
        self._pre_forward = group.pre_forward
        self._reshard = group.reshard
        self._unshard = group.unshard
        self._wait_for_unshard = group.wait_for_unshard
        self._refuse_loss_gradients()
        group.pre_forward = self._check_and_run_forward
        group.reshard = self._check_and_reshard
        group.unshard = self._unshard_outside_inference_mode
        group.wait_for_unshard = self._wait_and_record_versions

    def _refuse_loss_gradients(self) -> None:
        if self._group.mesh_info.mesh.size() == 1:
            # The shard of a single rank is the full parameter, and its gradient is complete.
            return
        for p in self._group.fsdp_params:
            shard = p.sharded_param
            if shard.requires_grad and not _refuses_loss_gradient(shard):
                shard.register_hook(_RefuseLossGradient(p))

    def _check_and_run_forward(self, *args: Any) -> Any:
        # A parameter that was frozen before may train now.
        self._refuse_loss_gradients()
        for p in self._group.fsdp_params:
            _check_shard(p, self._shards, gathered=self._group.is_unsharded)
        return self._pre_forward(*args)

    # Autograd cannot save inference tensors. The gathered parameters are allocated once and used by
    # evaluation and training.
    def _unshard_outside_inference_mode(self, async_op: bool = False) -> None:
        with torch.inference_mode(False):
            self._unshard(async_op)

    def _wait_and_record_versions(self) -> None:
        if self._group._all_gather_result is None:
            return
        with torch.inference_mode(False):
            self._wait_for_unshard()
        for p in self._group.fsdp_params:
            self._versions[p] = p._unsharded_param._version

    def _check_and_reshard(self) -> None:
        if self._group.is_unsharded:
            for p, version in self._versions.items():
                if p._unsharded_param._version != version:
                    self._versions.clear()
                    raise InputError(
                        f"{_name(p)} was written to while its shards were gathered (in the forward,"
                        " between forward and backward, or between micro-batches), and its shards"
                        " would not change; write to parameters between steps, keep values that a"
                        " forward changes in buffers, or use ZeRO stage 0"
                    )
        self._reshard()


def _content(shard: DTensor) -> tuple[torch.UntypedStorage, torch.Tensor]:
    return shard.untyped_storage(), shard._local_tensor


def _hooks(shard: DTensor) -> list[Any]:
    return list((shard._backward_hooks or {}).values())


def _refuses_loss_gradient(shard: DTensor) -> bool:
    return any(isinstance(hook, _RefuseLossGradient) for hook in _hooks(shard))


def _check_shard(
    p: Any,
    shards: dict[Any, tuple[DTensor, torch.UntypedStorage, torch.Tensor]],
    *,
    gathered: bool,
) -> None:
    """Raise InputError if a parameter, its data or its hooks were replaced.

    Args:
        p: torch's record of the parameter.
        shards: Shard, storage and local tensor of each parameter. Updated if the whole unit was
            moved or cast.
        gathered: Whether the unit is gathered now.
    """
    info = p._module_info
    shard, storage, local = shards[p]
    expected = p._unsharded_param if gathered else shard
    if info.module._parameters.get(info.param_name) is not expected or p.sharded_param is not shard:
        raise InputError(
            f"{_name(p)} was replaced after plait.initialize or plait.parallelize (by a new"
            " nn.Parameter, load_state_dict(assign=True), torch.func.functional_call or pruning),"
            " and the forward would not see the new parameter; change the values in place (with"
            " torch.no_grad(): parameter.copy_(...)), replace it before that call, or use ZeRO"
            " stage 0"
        )

    if shard._local_tensor is not local:
        # `Module.to` and `Module.half` replace the local tensors. torch handles that.
        shards[p] = (shard, *_content(shard))
    elif shard.untyped_storage()._cdata != storage._cdata:
        raise InputError(
            f"{_name(p)}.data was assigned to, which changes no shard: write in place, with"
            " torch.no_grad(): parameter.copy_(...)"
        )

    if not all(isinstance(hook, _RefuseLossGradient) for hook in _hooks(shard)):
        raise InputError(
            f"{_name(p)} has a hook on its gradient (register_hook), which is never called for a"
            " shard; use register_post_accumulate_grad_hook, which gets the reduced gradient in"
            " parameter.grad, or ZeRO stage 0"
        )


def _name(p: Any) -> str:
    return p._param_fqn or p._module_info.param_name
