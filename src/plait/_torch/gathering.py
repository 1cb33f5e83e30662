"""Patched behaviour of `fully_shard`: the gathering of units, and units outside the blocks.

The methods `unshard`, `wait_for_unshard` and `reshard` of a unit's parameter groups are replaced.

All ranks gather outer units (units outside the blocks) in every forward, as they gather the root
unit. Outer units are freed earlier than the root.

Note [Life of an outer unit]
    The root unit of `fully_shard` is gathered in every forward of the model, whichever layers run.
    Ranks may therefore use different layers outside the blocks. An ordinary unit is gathered
    when its own forward runs, so ranks that run different layers would deadlock. Outer units are
    gathered in every forward, as the root is: an embedding together with the root, and a head at
    the end of the model's forward at the latest.

    An embedding is freed after its forward, because its backward does not read the weight. The
    first call in a forward may be made on some ranks only. A second call gathers the embedding
    again, so all ranks must make it. A head stays gathered until the backward of its first call
    in the forward has ended. The backwards of all later calls have ended by then, because autograd
    runs the most recent nodes first.

    Other code of the model may read a unit's parameter, for example to multiply with the transposed
    weight of the embedding. Such a read gathers the unit. From then on the unit is treated like the
    root: it stays gathered until the end of the backward, and is reduced then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from plait._torch.operators import outside_of_transforms, tree_leaves
from plait._torch.units import parameter_groups

GatherPhase = tuple[str, bool]
"""Phase in which a unit is gathered, and whether this is the last micro-batch of a step.

The phase is "forward", "evaluation" (a forward without gradients) or "backward".
"""


def on_shard_reads(
    module: FSDPModule, before: Callable[[GatherPhase], None], after: Callable[[], None]
) -> None:
    """Call functions before and after every gather that reads a unit's shards.

    A gather does not read the shards if the unit is gathered already, or if it gathers the shards
    of a secondary partition.

    Args:
        module: A fully sharded unit.
        before: Called when a gather is about to read the shards.
        after: Called when the gather has read them.
    """
    for group in parameter_groups(module):
        _watch_reads(group, before, after)


def _watch_reads(
    group: Any, before: Callable[[GatherPhase], None], after: Callable[[], None]
) -> None:
    unshard = group.unshard
    wait_for_unshard = group.wait_for_unshard
    # A single rank does not communicate. `wait_for_unshard` copies its shards.
    copies_in_wait = group._all_gather_process_group.size() == 1

    def watched_unshard(async_op: bool = False) -> None:
        if group._all_gather_result is not None or group._sharded_state is not ShardedState.SHARDED:
            unshard(async_op)
            return

        if group._training_state is TrainingState.PRE_BACKWARD:
            phase = "backward"
        elif torch.is_grad_enabled():
            phase = "forward"
        else:
            phase = "evaluation"
        before((phase, bool(group.all_reduce_grads)))
        unshard(async_op)
        if not copies_in_wait:
            after()

    def watched_wait() -> None:
        reads_shards = copies_in_wait and group._all_gather_result is not None
        wait_for_unshard()
        if reads_shards:
            after()

    group.unshard = watched_unshard
    group.wait_for_unshard = watched_wait


def _free_nothing() -> None:
    """Do nothing. It replaces `free_unsharded_param` of parameters in shared memory."""


def gather_in_place(
    module: FSDPModule,
    full_buffers: Sequence[torch.Tensor],
    begin: Callable[[], None],
    finish: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """Make a unit read its gathered parameters from buffers that all ranks share.

    The unit must compute in the dtype of its shards, because nothing is cast or copied.

    Args:
        module: A fully sharded unit.
        full_buffers: One buffer per parameter, with the padded shards of all ranks in the order of
            the ranks. This rank's shard is a view of it (`replace_shard_buffers`).
        begin: Called when a gather starts.
        finish: Called to wait for a gather.
        release: Called after a reshard outside training.
    """
    group = parameter_groups(module)[0]
    for p, buffer in zip(group.fsdp_params, full_buffers, strict=True):
        p.all_gather_outputs = [buffer]
        # The buffers outlive the unit's gathers and are not allocated by torch.
        p.free_unsharded_param = _free_nothing
    reshard = group.reshard
    started_gather = SimpleNamespace(all_gather_event=None, all_gather_work=None)

    def unshard(async_op: bool = False) -> None:
        in_backward = group._training_state is TrainingState.PRE_BACKWARD
        if in_backward and not group.unshard_in_backward:
            # torch prefetches an embedding like any other unit, but its backward reads no weight.
            return
        if group._all_gather_result is None and not group.is_unsharded:
            begin()
            group._all_gather_result = started_gather

    def wait_for_unshard() -> None:
        if group._all_gather_result is None:
            return
        group._all_gather_result = None
        finish()
        with outside_of_transforms():
            for p in group.fsdp_params:
                p.init_unsharded_param()
            group._to_unsharded()

    def reshard_and_release() -> None:
        state = group._training_state
        was_gathered = group.is_unsharded
        in_training_forward = state is TrainingState.FORWARD and torch.is_grad_enabled()
        in_training = state is TrainingState.POST_BACKWARD or in_training_forward
        reshard()
        if was_gathered and group.is_sharded and not in_training:
            release()

    group.unshard = unshard
    group.wait_for_unshard = wait_for_unshard
    group.reshard = reshard_and_release


def follow_root(
    root: FSDPModule, *, embeddings: Sequence[FSDPModule], heads: Sequence[FSDPModule]
) -> None:
    """Gather and free outer units as described in Note [Life of an outer unit].

    Args:
        root: The sharded model.
        embeddings: Units of embeddings, in the order in which they are gathered.
        heads: Units of heads.
    """
    _OuterUnits(
        root,
        [_OuterUnit(module) for module in embeddings],
        [_OuterUnit(module) for module in heads],
    )


class _OuterUnits:
    """Hooks of the root unit that gather and free the outer units."""

    def __init__(
        self, root: FSDPModule, embeddings: Sequence[_OuterUnit], heads: Sequence[_OuterUnit]
    ) -> None:
        assert isinstance(root, nn.Module)
        self._embeddings = embeddings
        self._units = [*embeddings, *heads]
        for unit in embeddings:
            # The backward of an embedding does not read the weight.
            unit.group.unshard_in_backward = False
        state: Any = root._get_fsdp_state()
        self._root_pre_backward = state._pre_backward
        state._pre_backward = self._pre_backward
        # These hooks run after torch's pre-forward hook and before torch's post-forward hook of the
        # root.
        root.register_forward_pre_hook(self._before_forward)
        root.register_forward_hook(self._after_forward, prepend=True)
        root.register_forward_hook(self._leave_forward, always_call=True)

    def _before_forward(self, *_: object) -> None:
        for unit in self._units:
            unit.begin()
        for unit in self._embeddings:
            unit.gather(TrainingState.FORWARD)

    def _after_forward(self, *_: object) -> None:
        for unit in self._units:
            unit.end()
            # Other ranks may have run the unit, and all ranks must issue the same gathers.
            if not unit.has_run:
                unit.gather(TrainingState.FORWARD)
        for unit in self._embeddings:
            if not unit.has_run and not unit.is_read_elsewhere:
                unit.free()

    def _leave_forward(self, *_: object) -> None:
        for unit in self._units:
            unit.end()

    def _pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = self._root_pre_backward(gradient)
        # Another forward may have freed these units in the meantime. Their own backward hooks are
        # not enough, because their own forward may not have run.
        for unit in self._units:
            if unit.is_read_elsewhere:
                unit.gather(TrainingState.PRE_BACKWARD)
        return gradient


class _OuterUnit:
    """Unit outside the blocks, with its state in the running forward of the model."""

    def __init__(self, module: FSDPModule) -> None:
        assert isinstance(module, nn.Module)
        self._state: Any = module._get_fsdp_state()
        (self.group,) = parameter_groups(module)
        self.is_read_elsewhere = False
        """True if code outside the unit's own forward reads its parameters."""
        self.has_run = False
        """True after the unit's forward has run in this forward of the model."""
        self._model_runs = False
        self._unit_runs = False
        self._awaits_backward = False
        """True while a registered hook at the end of a call's backward has not run."""
        self._register_post_backward = self.group._register_post_backward_hook
        self._pre_forward = self.group.pre_forward
        self._post_forward = self.group.post_forward
        self._post_backward = self.group.post_backward
        self.group.pre_forward = self._before_call
        self.group.post_forward = self._after_call
        self.group.post_backward = self._after_backward
        self.group._register_post_backward_hook = self._watch_inputs
        module._parameters = _WatchedParameters(module._parameters, self._before_read)
        # This hook runs before the hooks of the user. If those read the weight, it counts as a read
        # by other code, because the backward of the user's hook needs the weight.
        module.register_forward_hook(self._leave_call, prepend=True)
        state: Any = self._state

        def watch_output(output: Any) -> Any:
            # torch warns if the output is a view, because an in-place operation drops the hook.
            # That is harmless here: a head stays gathered, and an embedding's backward needs no
            # weight.
            if torch.is_grad_enabled():
                # `watch_shards` passes the tensors of objects in a list.
                for leaf in tree_leaves(output):
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        leaf.register_hook(state._pre_backward)
            return output

        state._register_pre_backward_hook = watch_output

    def begin(self) -> None:
        """Record that the model's forward begins."""
        self._model_runs = True
        self._unit_runs = False
        self.has_run = False

    def end(self) -> None:
        """Record that the model's forward has returned or raised an error."""
        self._model_runs = False
        self._unit_runs = False

    def gather(self, state: TrainingState) -> None:
        """Gather the unit if it is not gathered. Collective."""
        group = self.group
        # torch prepares the units of the modules that the model has in its first forward. The unit
        # of a module that was replaced before is never prepared, and the module does not run.
        if group.is_unsharded or self._state._is_root is None:
            return
        # torch gathers nothing in a backward where this is False, as it is for embeddings.
        unshard_in_backward = group.unshard_in_backward
        group.unshard_in_backward = True
        try:
            with group.use_training_state(state):
                group.unshard()
                group.wait_for_unshard()
        finally:
            group.unshard_in_backward = unshard_in_backward

    def free(self) -> None:
        """Reshard a gathered unit, unless it stays gathered after a forward."""
        with self.group.use_training_state(TrainingState.FORWARD):
            self.group.reshard()

    def _before_call(self, *args: Any) -> Any:
        self._unit_runs = True
        return self._pre_forward(*args)

    def _leave_call(self, *_: object) -> None:
        self._unit_runs = False

    def _after_call(self, *args: Any) -> Any:
        self._unit_runs = False
        self.has_run = True
        return self._post_forward(*args)

    def _watch_inputs(self, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._awaits_backward or self.is_read_elsewhere:
            return args, kwargs
        self._awaits_backward = True
        return self._register_post_backward(args, kwargs)

    def _after_backward(self, *args: Any) -> None:
        self._awaits_backward = False
        self._post_backward(*args)

    def _before_read(self) -> None:
        if not self._model_runs or self._unit_runs:
            return
        if not self.is_read_elsewhere:
            self.is_read_elsewhere = True
            # Without this mesh torch does not free the unit after its forward.
            self.group.post_forward_mesh_info = None
        self.gather(TrainingState.FORWARD)


class _WatchedParameters(dict[str, Any]):
    """Parameters of a module by name. Calls a function before parameters are read."""

    def __init__(self, parameters: dict[str, Any], before_read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._before_read = before_read

    def __getitem__(self, name: str) -> Any:
        self._before_read()
        return super().__getitem__(name)

    def items(self) -> Any:
        self._before_read()
        return super().items()

    def values(self) -> Any:
        self._before_read()
        return super().values()
