"""Patched behaviour of `fully_shard`: what would be lost in silence is refused, and gathering in
inference mode serves training too.

`pre_forward`, `reshard`, `unshard` and `wait_for_unshard` of a unit's groups are replaced.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plait._torch.outputs import watch_dataclasses
from plait._torch.units import parameter_groups
from plait.errors import InputError


def watch_shards(module: FSDPModule) -> None:
    """Refuse, in the forward of a fully sharded unit and behind it, what would be lost in silence
    there: another parameter in a shard's place, other data in it, a hook on its gradient, a loss
    that reads it, and a write into the gathered copy. Once, when the unit has the parameters that
    it keeps. Gathering in inference mode is mended: what it makes serves the next training step
    too.
    """
    watch_dataclasses(module)
    for group in parameter_groups(module):
        _watch(group)


class _Alone:
    """A hook of autograd's on a shard, which torch gives its gradient without autograd."""

    def __init__(self, p: Any) -> None:
        # its name is complete after the first forward; and no cycle holds the shard
        self.of = weakref.ref(p)

    def __call__(self, _gradient: torch.Tensor) -> None:
        raise InputError(
            f"{_name(self.of())} is read by the loss itself (a penalty on weights?) while it is a"
            " shard, and its gradient from there would be this rank's alone: read it after the"
            " model was called, which finds it unsharded at ZeRO stages 1 and 2, leave a penalty"
            " on squares to the optimizer's weight_decay, or use ZeRO stage 0"
        )


def _watch(group: Any) -> None:
    # The storage object is kept, so that no other one can take its address.
    held = {p: (p.sharded_param, *_content(p.sharded_param)) for p in group.fsdp_params}
    versions: dict[Any, int] = {}
    pre_forward = group.pre_forward
    reshard = group.reshard
    unshard = group.unshard
    wait_for_unshard = group.wait_for_unshard

    def refuse_reading() -> None:
        if group.mesh_info.mesh.size() == 1:
            return  # one rank's are all there are
        for p in group.fsdp_params:
            shard = p.sharded_param
            if shard.requires_grad and not any(
                isinstance(hook, _Alone) for hook in (shard._backward_hooks or {}).values()
            ):
                shard.register_hook(_Alone(p))

    def checked_forward(*args: Any) -> Any:
        refuse_reading()  # what was frozen may have begun to train
        for p in group.fsdp_params:
            _check_shard(p, held, gathered=group.is_unsharded)
        return pre_forward(*args)

    def unshard_as_ever(async_op: bool = False) -> None:
        with torch.inference_mode(False):
            unshard(async_op)

    def wait_and_note() -> None:
        if group._all_gather_result is None:
            return
        with torch.inference_mode(False):
            wait_for_unshard()
        versions.update({p: p._unsharded_param._version for p in group.fsdp_params})

    def checked_reshard() -> None:
        if group.is_unsharded:
            for p, version in versions.items():
                if p._unsharded_param._version != version:
                    versions.clear()
                    raise InputError(
                        f"{_name(p)} was written to while its shards were gathered (in the forward,"
                        " between forward and backward, or between micro-batches), which the"
                        " shards never see: write to parameters between steps, keep what a forward"
                        " changes in buffers, or use ZeRO stage 0"
                    )
        reshard()

    refuse_reading()
    group.pre_forward = checked_forward
    group.reshard = checked_reshard
    group.unshard = unshard_as_ever
    group.wait_for_unshard = wait_and_note


def _content(shard: DTensor) -> tuple[torch.UntypedStorage, torch.Tensor]:
    return shard.untyped_storage(), shard._local_tensor


def _check_shard(
    p: Any, held: dict[Any, tuple[DTensor, torch.UntypedStorage, torch.Tensor]], *, gathered: bool
) -> None:
    info = p._module_info
    shard, storage, local = held[p]
    expected = p._unsharded_param if gathered else shard
    if info.module._parameters.get(info.param_name) is not expected or p.sharded_param is not shard:
        raise InputError(
            f"{_name(p)} is not the parameter that was sharded: something was put in its place"
            " after plait.initialize or plait.parallelize (a new nn.Parameter,"
            " load_state_dict(assign=True), torch.func.functional_call, pruning), which the"
            " forward would not see; change the values in place (with torch.no_grad():"
            " parameter.copy_(...)), change the model before, or use ZeRO stage 0"
        )
    if shard._local_tensor is not local:  # moved or cast together, which torch handles
        held[p] = (shard, *_content(shard))
    elif shard.untyped_storage()._cdata != storage._cdata:
        raise InputError(
            f"{_name(p)}.data was assigned to, which changes no shard: write in place, with"
            " torch.no_grad(): parameter.copy_(...)"
        )
    if not all(isinstance(hook, _Alone) for hook in (shard._backward_hooks or {}).values()):
        raise InputError(
            f"{_name(p)} has a hook on its gradient (register_hook), which is never called for a"
            " shard; use register_post_accumulate_grad_hook, which gets the reduced gradient in"
            " parameter.grad, or ZeRO stage 0"
        )


def _name(p: Any) -> str:
    return p._param_fqn or p._module_info.param_name
