"""Patched behaviour of `fully_shard`: units outside of the blocks that are gathered as surely as the
root and freed earlier.

Note [Life of an outer unit]:
The root unit of `fully_shard` is gathered in every forward of the model, whatever the batch makes the
model do. Ranks may therefore use different layers outside of the blocks. A plain unit is gathered when
its own forward runs, and ranks that run different layers would wait for each other forever. Outer units
keep the guarantee of the root: an embedding is gathered with the root, and a head at the end of the
model's forward at the latest.

An embedding is freed when its forward has run, because its backward does not read the weight. Another use
in the same forward gathers it again, so the ranks must agree about that use: the first use on one rank only
is safe, a further one is not. A model whose ranks differ there reads the weight at the start of its forward
on all of them, as other code that reads it does (see below). A head
stays gathered until the backward of its first call in the forward has ended. The backwards of all later
uses have ended by then, because autograd runs the nodes that were made last first.

Other code of the model may read a unit's parameter, for example to multiply with the transposed weight
of the embedding. Such a read gathers the unit. From then on the unit is handled as the root is: it stays
gathered until the end of the backward, and is reduced there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from plait._torch.units import parameter_groups


def follow_root(root: FSDPModule, *, embeddings: Sequence[FSDPModule], heads: Sequence[FSDPModule]) -> None:
    """Gather and free the outer units of the sharded model `root` as described in Note [Life of an outer unit]."""
    assert isinstance(root, nn.Module)
    units = [_OuterUnit(module) for module in (*embeddings, *heads)]
    early = units[: len(embeddings)]
    for unit in early:
        unit.group.unshard_in_backward = False
    state: Any = root._get_fsdp_state()
    root_pre_backward = state._pre_backward

    def before_forward(*_: object) -> None:
        for unit in units:
            unit.begin()
        for unit in early:
            unit.gather(TrainingState.FORWARD)

    def after_forward(*_: object) -> None:
        for unit in units:
            unit.end()
            if not unit.has_run:
                unit.gather(TrainingState.FORWARD)
        for unit in early:
            if not unit.has_run and not unit.is_read_elsewhere:
                unit.free()

    def leave_forward(*_: object) -> None:
        for unit in units:
            unit.end()

    def pre_backward(gradient: torch.Tensor) -> torch.Tensor:
        gradient = root_pre_backward(gradient)
        # Another forward between this one and its backward may have freed them, and their own forward need not have run.
        for unit in units:
            if unit.is_read_elsewhere:
                unit.gather(TrainingState.PRE_BACKWARD)
        return gradient

    state._pre_backward = pre_backward
    # Behind torch's hook in front of the forward, and before torch's hook behind it.
    root.register_forward_pre_hook(before_forward)
    root.register_forward_hook(after_forward, prepend=True)
    root.register_forward_hook(leave_forward, always_call=True)


class _OuterUnit:
    """One unit outside of the blocks, and what the running forward of the model has done with it."""

    def __init__(self, module: FSDPModule) -> None:
        assert isinstance(module, nn.Module)
        (self.group,) = parameter_groups(module)
        self.is_read_elsewhere = False
        """Whether code outside of the unit's own forward reads its parameters."""
        self.has_run = False
        """Whether the unit's forward has run in this forward of the model."""
        self._model_runs = False
        self._runs = False
        self._awaits_backward = False
        """Whether a call in a forward has asked for the end of its backward, which has not come yet."""
        self._register_post_backward = self.group._register_post_backward_hook
        self._pre_forward, self._post_forward = self.group.pre_forward, self.group.post_forward
        self._post_backward = self.group.post_backward
        self.group.pre_forward, self.group.post_forward = self._before_call, self._after_call
        self.group.post_backward, self.group._register_post_backward_hook = self._after_backward, self._watch_inputs
        module._parameters = _WatchedParameters(module._parameters, self._before_read)
        # In front of hooks of the user, which may read the weight, and whose backward needs it.
        module.register_forward_hook(self._leave_call, prepend=True)
        state: Any = module._get_fsdp_state()

        def watch_output(output: Any) -> Any:
            # As torch does, without its warning of in-place operations on a view: the unit is still gathered where they drop the hook.
            if torch.is_grad_enabled() and isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(state._pre_backward)
            return output

        state._register_pre_backward_hook = watch_output

    def begin(self) -> None:
        """The model's forward begins."""
        self._model_runs, self._runs, self.has_run = True, False, False

    def end(self) -> None:
        """The model's forward ends, or was left by an error."""
        self._model_runs = self._runs = False

    def gather(self, state: TrainingState) -> None:
        """Gather the unit if it is not gathered. Collective."""
        group = self.group
        if group.is_unsharded:
            return
        # An embedding is not gathered again in a backward by itself; here somebody else reads it.
        before, group.unshard_in_backward = group.unshard_in_backward, True
        try:
            with group.use_training_state(state):
                group.unshard()
                group.wait_for_unshard()
        finally:
            group.unshard_in_backward = before

    def free(self) -> None:
        """Free a gathered unit where it is freed after a forward."""
        with self.group.use_training_state(TrainingState.FORWARD):
            self.group.reshard()

    def _before_call(self, *args: Any) -> Any:
        self._runs = True
        return self._pre_forward(*args)

    def _leave_call(self, *_: object) -> None:
        self._runs = False

    def _after_call(self, *args: Any) -> Any:
        self._runs, self.has_run = False, True
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
        if not self._model_runs or self._runs:
            return
        if not self.is_read_elsewhere:
            self.is_read_elsewhere = True
            self.group.post_forward_mesh_info = None  # not freed after its own forward
        self.gather(TrainingState.FORWARD)


class _WatchedParameters(dict[str, Any]):
    """The parameters of a module, which calls a function before the module's attributes or all parameters are read."""

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
