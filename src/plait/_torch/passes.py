"""Forward and backward passes of sharded models, and state of the running autograd pass.

A pipeline stage runs the forward of its sharded root in parts. It therefore takes the steps that
`fully_shard` takes at the beginning and the end of a forward and of a backward.

After a failed pass the state of the root is reset. torch has `FSDPModule.reset_iter_state` for this
since 2.13, and `reset_pass` does the same in earlier releases. torch's reset also drops results of
earlier micro-batches: partial reductions in 2.13 and 2.14, and all gradients since 2.15.
`GradientSnapshot` preserves them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from plait._torch.units import all_parameter_groups, parameter_groups, sharded_modules
from plait.errors import InputError


class GradientSnapshot:
    """Gradients of a sharded model at the time of construction, reduced and unreduced.

    Args:
        model: The sharded root, which is not changed before `restore`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups = all_parameter_groups(model)
        self._partial = [group._partial_reduce_output for group in self._groups]
        self._layouts = [dict(_partial_layout(group)) for group in self._groups]
        self._gradients = [
            (parameter, parameter.grad)
            for group in self._groups
            for p in group.fsdp_params
            for parameter in (p.sharded_param, getattr(p, "_unsharded_param", None))
            if parameter is not None
        ]

    def restore(self) -> None:
        """Assign the gradients to their parameters and the partial reductions to their units."""
        for group, partial, layout in zip(self._groups, self._partial, self._layouts, strict=True):
            group._partial_reduce_output = partial
            _partial_layout(group).update(layout)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _partial_layout(group: Any) -> dict[Any, tuple[int, int]]:
    """Return the position of each parameter in a partial reduction.

    Before torch 2.15 the positions never change, and torch does not record them.
    """
    return getattr(group, "_partial_reduce_output_layout", {})


def reset_pass(root: Any) -> None:
    """Reset a sharded root as `reset_iter_state` does since torch 2.13.

    Args:
        root: FSDP state of the root module, as torch 2.11 and 2.12 have it.
    """
    stream = root._device_handle.current_stream()
    context = root._comm_ctx
    reductions = _take_reductions(context)
    # Collectives may still use these buffers on other streams, and dropping them frees the memory.
    for state in (context.all_gather_state, *reductions):
        if state is not None:
            _wait_for(stream, state.event)
    context.all_gather_state = None
    context.post_forward_order.clear()

    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
    for group in all_parameter_groups(root._modules[0]):
        _reset_group(group, stream)

    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _take_reductions(context: Any) -> list[Any]:
    """Remove and return the reduce-scatters whose inputs are still referenced.

    torch 2.11 keeps at most one, 2.12 keeps a list.
    """
    if hasattr(context, "reduce_scatter_states"):
        reductions = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
        return reductions

    reductions = [context.reduce_scatter_state]
    context.reduce_scatter_state = None
    return reductions


def _reset_group(group: Any, stream: Any) -> None:
    """Wait for a unit's collectives and reshard its parameters. Its gradients are not changed."""
    all_gather = group._all_gather_result
    if all_gather is not None:
        _wait_for(stream, all_gather.all_gather_event)
        if isinstance(all_gather.all_gather_work, dist.Work):
            all_gather.all_gather_work.wait()
        group._all_gather_result = None

    _wait_for(stream, group._post_reduce_event)
    group._post_reduce_event = None
    if group._all_reduce_state is not None:
        _wait_for(stream, group._all_reduce_state.event)
        group._all_reduce_state = None

    # Later all-gathers read the shards that an earlier resharding has written on another stream.
    group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._reshard_after_forward_event = None

    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _wait_for(stream: Any, event: torch.Event | None) -> None:
    if event is not None:
        stream.wait_event(event)


def begin_sharded(model: nn.Module) -> None:
    """Initialize the FSDP state of a sharded root and of its units now.

    torch does this in the root's first forward. Units that are not part of the model at that time,
    such as the blocks of another pipeline stage, would each become a root: they would prefetch
    nothing and keep their gathered buffers.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def runs_forward(model: nn.Module) -> bool:
    """Return True while the forward of a sharded root runs."""
    assert isinstance(model, FSDPModule)
    return model._get_fsdp_state()._training_state is TrainingState.FORWARD


def leave_forward(model: nn.Module, output: Any) -> Any:
    """Leave the forward state of a sharded root after an exception interrupted its forward.

    Args:
        model: The root. A model that is not sharded is left unchanged.
        output: Replaces the result of the interrupted forward.

    Returns:
        The output, whose backward gathers the root.
    """
    if not isinstance(model, FSDPModule):
        return output
    return model._get_fsdp_state()._post_forward(model, (), output)


def expect_backward(model: nn.Module, output: Any) -> Any:
    """Register FSDP's root pre-backward hook of `model` on `output`, and return `output`.

    torch does this for tensors that it finds in the result of the root's `forward`. It does not
    search objects of unknown classes.
    """
    if not isinstance(model, FSDPModule):
        return output
    return model._get_fsdp_state()._register_pre_backward_hook(output)


def reduce_now(model: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Reduce the gradients of `units` and free their parameters, as at the end of a backward.

    Collective. The flags of each unit (`set_requires_gradient_sync`, for example) are respected.
    Call this outside a backward pass only.

    Args:
        model: The sharded root.
        units: Units of the root.
    """
    for unit in units:
        for group in parameter_groups(unit):
            group.post_backward()
    state = model._get_fsdp_state()
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):
        # Since torch 2.15 the callback reads this attribute, which a backward pass would have set.
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def backward_was_interrupted(model: nn.Module) -> bool:
    """Return whether an exception has ended the last backward of a sharded root.

    Autograd drops the callbacks of a backward that raises an error. torch's callback reduces the
    gradients of the remaining units and resets the state of the pass. Without `reset_failed_step`,
    the following backwards would not queue the callback again.
    """
    if not isinstance(model, FSDPModule) or graph_task() is not None:
        return False
    return model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def reset_failed_step(model: nn.Module, *, keep_gradients: bool) -> None:
    """Restore the state of a sharded root between two micro-batches after a failed pass.

    Call this on all ranks after an exception in the forward or the backward. Afterwards all units
    are sharded and no collective is pending.

    Args:
        model: The root. A model that is not sharded or has not run is left unchanged.
        keep_gradients: Whether the gradients of earlier micro-batches are preserved, reduced or
            not. Otherwise the caller must drop them.
    """
    if not isinstance(model, FSDPModule):
        return
    state = model._get_fsdp_state()
    if state._is_root is None:
        return
    gradients = GradientSnapshot(model)
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        reset_pass(state)
    if keep_gradients:
        gradients.restore()


def allow_two_runs(ctx: Any) -> None:
    """Declare in `forward` of an autograd Function that its backward may run twice.

    A pipeline that splits its backward pass computes the gradients of the Function's weights later
    than those of its inputs. The backward must therefore not change the saved tensors.
    """
    ctx.plait_allows_two_runs = True


def allows_two_runs(node: Node) -> bool:
    """Return whether the Function of a graph node has called `allow_two_runs`."""
    return hasattr(node, "plait_allows_two_runs")


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once at the end of the running backward pass.

    Call this function only inside a backward pass.
    """
    Variable._execution_engine.queue_callback(callback)


def _do_nothing() -> None:
    pass


def around_backward(
    model: nn.Module,
    *,
    begin: Callable[[], None] = _do_nothing,
    before_end: Callable[[], None] = _do_nothing,
    end: Callable[[], None] = _do_nothing,
) -> None:
    """Call functions in every backward pass through a fully sharded model.

    Every rank that takes part in the reductions calls all of these functions.

    Args:
        model: The root.
        begin: Called before the first unit is gathered or reduces gradients.
        before_end: Called when autograd has computed all gradients, before torch reduces the units
            whose backward did not run.
        end: Called after the reductions of all units were started.
    """
    for module in sharded_modules(model):
        state: Any = module._get_fsdp_state()
        state._register_root_post_backward_final_callback = _with_begin(state, begin)
        state._root_post_backward_final_callback = _with_end(state, before_end, end)


def _with_begin(state: Any, begin: Callable[[], None]) -> Callable[[], None]:
    register = state._register_root_post_backward_final_callback

    def begin_and_register() -> None:
        # All units share the context. The first unit whose backward begins sets the flag.
        if not state._state_ctx.post_backward_final_callback_queued:
            begin()
        register()

    return begin_and_register


def _with_end(
    state: Any, before_end: Callable[[], None], end: Callable[[], None]
) -> Callable[[], None]:
    finish = state._root_post_backward_final_callback

    def finish_and_end() -> None:
        before_end()
        finish()
        end()

    return finish_and_end


def graph_task() -> int | None:
    """Return a number that identifies the running backward pass, or None outside of one.

    A backward inside another one, as in a reentrant checkpoint, has a different number.
    """
    task = torch._C._current_graph_task_id()
    return None if task < 0 else task


def keeps_graph() -> bool:
    """Return whether the running backward pass retains the graph (`retain_graph=True`).

    The result is True under `torch.compile`, which traces a backward before its caller is known.
    """
    return torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()


def differentiable_once(remedy: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a Function's `backward` whose own derivative is not implemented.

    The derivative raises InputError. torch's `once_differentiable` returns constants if the
    gradient that the backward receives is a constant, such as that of a sum, so terms of a gradient
    penalty would be missing without an error.

    Args:
        remedy: What computes the same with a derivative, for the message.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def refuse_derivative(ctx: Any, *gradients: torch.Tensor) -> Any:
            # True in a backward with `create_graph=True` only.
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            return tuple(
                _NoDerivative.apply(result, torch.zeros((), requires_grad=True), remedy)
                if isinstance(result, torch.Tensor)
                else result
                for result in results
            )

        return refuse_derivative

    return decorate


class _NoDerivative(torch.autograd.Function):
    """Identity whose backward raises InputError."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, _requires_gradient: torch.Tensor, remedy: str
    ) -> torch.Tensor:
        ctx.remedy = remedy
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        raise InputError(
            "a gradient was differentiated (create_graph=True), whose second derivative is not"
            f" implemented here; {ctx.remedy}"
        )


def leaves_of_graph(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors that the backward of `output` reaches."""
    nodes: list[Any] = []
    if output.grad_fn is not None:
        nodes.append(output.grad_fn)
    visited = set(nodes)

    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            # An `AccumulateGrad` node, which only leaves have.
            yield node.variable
        successors = {function for function, _ in node.next_functions if function is not None}
        nodes.extend(successors - visited)
        visited |= successors
