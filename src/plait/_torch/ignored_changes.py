"""Errors for changes of parameters that `fully_shard` would ignore silently.

Patched behaviour: `pre_forward`, `reshard`, `unshard` and `wait_for_unshard` of a unit's parameter
groups are replaced. With the replacements, parameters that are gathered in inference mode are
usable in later training steps, and tensors in objects that a unit returns are found.
`unwrap_to_op_info` of DTensor's dispatcher is replaced for the rest of the process.

`GatheredWrites` detects writes to gathered parameters. A gathered parameter is a copy that exists
until its unit is sharded again. A module that writes to it, such as a hook that masks
`module.weight.data`, changes the copy of one pass and not the shards. torch does not detect this,
and `.data` bypasses the version counter of the parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from plait._torch.passes import leaves_of_graph
from plait._torch.tensors import local_tensor
from plait._torch.units import all_parameter_groups, parameter_groups
from plait.errors import InputError

# Since torch 2.12. Before, torch searches containers only.
_tensors_found_by_torch = getattr(_common_utils, "collect_grad_tensors", tree_leaves)

_SAMPLES = 1 << 16
"""Largest number of elements of a parameter that are compared."""


def watch_shards(module: FSDPModule) -> None:
    """Make a fully sharded unit raise InputError for changes that would have no effect.

    Call this once per unit, when it has its final parameters. From then on the unit refuses
    another parameter in the place of a shard, other data in a shard, a hook on the gradient of a
    shard, a loss that reads a shard, and a write into the gathered copy. Parameters that were
    gathered in inference mode can be used by the next training step.
    """
    _search_objects(module)
    for group in parameter_groups(module):
        _WatchedGroup(group)


def _search_objects(module: FSDPModule) -> None:
    """Make the backward of a unit gather its parameters if its forward returns an object.

    The backward gathers a unit when a gradient of its output arrives. torch finds the tensors of
    containers, and those of dataclasses since torch 2.12, but of no other objects. The backward
    would then compute with freed memory.
    """
    state: Any = module._get_fsdp_state()
    register = state._register_pre_backward_hook

    def register_in_objects(output: Any) -> Any:
        if torch.is_grad_enabled():
            # If the output has tensors, its objects may be a cache with tensors of other units.
            has_tensors = any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(output))
            objects = _tensors_of_objects(output, set(), only_dataclasses=has_tensors)
            hidden = {id(tensor): tensor for tensor in objects}
            for tensor in _tensors_found_by_torch(output):
                hidden.pop(id(tensor), None)
            if hidden:
                register(list(hidden.values()))
        return register(output)

    state._register_pre_backward_hook = register_in_objects


def _tensors_of_objects(
    value: Any, seen: set[int], *, only_dataclasses: bool
) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes of the objects of a nested value.

    Args:
        value: The value.
        seen: Identities of the objects that were searched already.
        only_dataclasses: Whether other objects are left out.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor | nn.Module | type) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        attributes: list[Any] = []
        if dataclasses.is_dataclass(leaf):
            # A dataclass with slots has no `__dict__`.
            attributes = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        elif not only_dataclasses:
            attributes = list(getattr(leaf, "__dict__", {}).values())
        yield from (entry for entry in tree_leaves(attributes) if isinstance(entry, torch.Tensor))
        yield from _tensors_of_objects(attributes, seen, only_dataclasses=only_dataclasses)


class _RefuseLossGradient:
    """Hook on the gradient of a shard that refuses losses which read the shard.

    torch assigns reduced gradients to shards without autograd, so autograd calls the hook only if
    the loss reads the shard itself.
    """

    def __init__(self, p: Any) -> None:
        # The name of the parameter is complete after the first forward only, so it is looked up
        # late. The reference is weak because the shard refers to this hook.
        self.parameter = weakref.ref(p)

    def __call__(self, _gradient: torch.Tensor | None) -> None:
        raise InputError(
            f"{_name(self.parameter())} is read by the loss itself (a penalty on weights?) while it"
            " is a shard, so the loss would give it the gradient of this rank only; read it after"
            " the model was called (below ZeRO stage 3 it is unsharded then), use the optimizer's"
            " weight_decay for an L2 penalty, or use ZeRO stage 0 in the model's own dtype"
        )


_SHARD_MESHES: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
"""Meshes of all shards with a hook of `_RefuseLossGradient`."""


@functools.cache
def _refuse_sums_with_shards() -> None:
    """Refuse operators on a tensor that was computed from shards and a plain tensor.

    torch allows them for tensors of one element, for example if a loss adds a penalty that was
    computed from weights before the forward. The backward of the loss would reach the model before
    the penalty, and fail in an operator that is unrelated to the penalty.
    """
    dispatcher: Any = DTensor._op_dispatcher
    unwrap = dispatcher.unwrap_to_op_info

    def refuse_and_unwrap(operator: Any, args: Any, *rest: Any, **settings: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_sum(tree_leaves(args))
        return unwrap(operator, args, *rest, **settings)

    dispatcher.unwrap_to_op_info = refuse_and_unwrap


def _refuse_sum(arguments: Iterable[Any]) -> None:
    trained = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    if all(isinstance(tensor, DTensor) for tensor in trained):
        return
    for tensor in trained:
        # With tensor parallelism activations are DTensors too, of another mesh.
        if not isinstance(tensor, DTensor) or tensor.device_mesh not in _SHARD_MESHES:
            continue
        for leaf in leaves_of_graph(tensor):
            for hook in _hooks(leaf):
                if isinstance(hook, _RefuseLossGradient):
                    hook(None)


class _WatchedGroup:
    """A unit's FSDPParamGroup, whose methods are replaced with ones that check the shards."""

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
            refuses = any(isinstance(hook, _RefuseLossGradient) for hook in _hooks(shard))
            if shard.requires_grad and not refuses:
                shard.register_hook(_RefuseLossGradient(p))
                _SHARD_MESHES.add(shard.device_mesh)
                _refuse_sums_with_shards()

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


def _hooks(shard: torch.Tensor) -> list[Any]:
    return list((shard._backward_hooks or {}).values())


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
            f"{_name(p)}.data was assigned to, which does not change the shard; change the values"
            " in place (with torch.no_grad(): parameter.copy_(...))"
        )

    if not all(isinstance(hook, _RefuseLossGradient) for hook in _hooks(shard)):
        raise InputError(
            f"{_name(p)} has a hook on its gradient (register_hook), which is never called for a"
            " shard; use register_post_accumulate_grad_hook, whose hook finds the reduced gradient"
            " in parameter.grad, or use ZeRO stage 0"
        )


def _name(p: Any) -> str:
    return p._param_fqn or p._module_info.param_name


class GatheredWrites:
    """Comparison of gathered parameters after the gather and before the resharding of a unit.

    Args:
        root: The sharded model, before its first forward.

    Attributes:
        is_watching: Whether units that are gathered now are compared.
    """

    def __init__(self, root: FSDPModule) -> None:
        assert isinstance(root, nn.Module)
        self.is_watching = True
        names = {parameter: name for name, parameter in root.named_parameters()}
        # Keyed by torch's record: `load_state_dict(assign=True)` replaces the parameter.
        self._names: dict[Any, str] = {}
        self._gathered: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
        """Records of the parameters of each gathered group, with their samples."""
        self._changed: dict[str, torch.Tensor] = {}
        for group in all_parameter_groups(root):
            self._names |= {p: names[p.sharded_param] for p in group.fsdp_params}
            group.wait_for_unshard = self._sample_after(group, group.wait_for_unshard)
            group.reshard = self._compare_before(group, group.reshard)

    def take(self) -> tuple[list[str], torch.Tensor] | None:
        """Return which of the compared parameters have changed, and forget them.

        Returns:
            (names, changed): the names of the compared parameters, and a bool tensor [names] on the
            device. None if nothing was compared.
        """
        changed = self._changed
        self._changed = {}
        if not changed:
            return None
        return list(changed), torch.stack(list(changed.values()))

    def _sample_after(self, group: Any, wait: Callable[[], None]) -> Callable[[], None]:
        def wait_and_sample() -> None:
            wait()
            if not self.is_watching or not group.is_unsharded or group in self._gathered:
                return
            # Outside of passes the caller gathers on purpose, and may write to the parameters.
            if group._training_state is not TrainingState.IDLE:
                self._gathered[group] = [
                    (p, _sample(p._unsharded_param).clone())
                    for p in group.fsdp_params
                    if p._unsharded_param.numel()
                ]

        return wait_and_sample

    def _compare_before(self, group: Any, reshard: Callable[[], None]) -> Callable[[], None]:
        def compare_and_reshard() -> None:
            samples = self._gathered.pop(group, ())
            if group.is_unsharded:
                for p, sample in samples:
                    name = self._names[p]
                    changed = (_sample(p._unsharded_param) != sample).any()
                    earlier = self._changed.get(name)
                    self._changed[name] = changed if earlier is None else earlier | changed
            reshard()

        return compare_and_reshard


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of evenly spaced elements of a parameter, or of all of them, as bytes."""
    flat = local_tensor(parameter.detach()).reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLES)].unsqueeze(-1).view(torch.uint8)
