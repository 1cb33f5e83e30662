"""Every private or unstable torch name that Plait needs, in one place; each has a test in tests/unit/test_torch_names.py.

A new torch release is checked by running that test. Nothing here holds state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# One kernel for many tensors. The last takes a float32 factor to tensors of 16 bits without rounding it to theirs.
foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules on which `fully_shard` was called, in `model.modules()` order."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def parameter_groups(module: FSDPModule) -> list[Any]:
    """What torch gathers and reduces of one fully sharded unit; torch 2.11 has at most one, under another name."""
    state: Any = module._get_fsdp_state()
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group][: bool(state._fsdp_param_group)]


def _sharded_parameters(module: FSDPModule) -> list[Any]:
    return [p for group in parameter_groups(module) for p in group.fsdp_params]


def shard_buffers(module: FSDPModule) -> list[torch.Tensor]:
    """The flat buffers that hold this rank's shards of one fully sharded unit, padding included."""
    return [p._sharded_param_data for p in _sharded_parameters(module)]


def replace_shard_buffers(module: FSDPModule, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `make(buffer)`, of the same size and content, in place of every buffer of `shard_buffers`; the parameters stay the objects that
    they are."""
    for p in _sharded_parameters(module):
        buffer = make(p._sharded_param_data)
        dim = p.fsdp_placement.dim
        p._sharded_param_data = buffer
        p.sharded_param._local_tensor = buffer.view(p.padded_sharded_param_size).narrow(dim, 0, p.sharded_param._local_tensor.shape[dim])


Moment = tuple[str, bool]
"""When a unit is gathered: "forward", "evaluation" (without gradients) or "backward"; and whether in the last micro-batch of a step."""


def on_shard_reads(module: FSDPModule, before: Callable[[Moment], None], after: Callable[[], None]) -> None:
    """Call `before` when a gather of this unit is about to read its shards, and `after` when it has read them. A gather of a unit that is
    already unsharded, or from other shards (those of a secondary partition), reads none."""
    for group in parameter_groups(module):
        _watch_reads(group, before, after)


def _watch_reads(group: Any, before: Callable[[Moment], None], after: Callable[[], None]) -> None:
    unshard, wait_for_unshard = group.unshard, group.wait_for_unshard
    alone = group._all_gather_process_group.size() == 1  # then the copy is made by the wait

    def watched_unshard(async_op: bool = False) -> None:
        if group._all_gather_result is not None or group._sharded_state is not ShardedState.SHARDED:
            unshard(async_op)
            return
        forward = "forward" if torch.is_grad_enabled() else "evaluation"
        when = "backward" if group._training_state is TrainingState.PRE_BACKWARD else forward
        before((when, bool(group.all_reduce_grads)))
        unshard(async_op)
        if not alone:
            after()

    def watched_wait() -> None:
        reads = alone and group._all_gather_result is not None
        wait_for_unshard()
        if reads:
            after()

    group.unshard, group.wait_for_unshard = watched_unshard, watched_wait


def gather_in_place(
    module: FSDPModule, wholes: Sequence[torch.Tensor], begin: Callable[[], None], finish: Callable[[], None], give_back: Callable[[], None]
) -> None:
    """Make gathering a unit mean to read its parameters where they are: `wholes`, one [ranks x padded shard] a parameter, of which this
    rank's shards are a part already (`replace_shard_buffers`). For units that are computed in the dtype of their shards.

    `begin` is called when a gather starts, `finish` when it is waited for, `give_back` after a reshard outside of training."""
    group = parameter_groups(module)[0]
    for p, whole in zip(group.fsdp_params, wholes, strict=True):
        p.all_gather_outputs = [whole]
        p.free_unsharded_param = lambda: None  # nothing was allocated for it
    reshard, began = group.reshard, SimpleNamespace(all_gather_event=None, all_gather_work=None)

    def unshard(async_op: bool = False) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            begin()
            group._all_gather_result = began

    def wait_for_unshard() -> None:
        if group._all_gather_result is not None:
            group._all_gather_result = None
            finish()
            for p in group.fsdp_params:
                p.init_unsharded_param()
            group._to_unsharded()

    def reshard_and_give_back() -> None:
        state, gathered = group._training_state, group.is_unsharded
        trains = state is TrainingState.POST_BACKWARD or (state is TrainingState.FORWARD and torch.is_grad_enabled())
        reshard()
        if gathered and group.is_sharded and not trains:
            give_back()

    group.unshard, group.wait_for_unshard, group.reshard = unshard, wait_for_unshard, reshard_and_give_back


def gathered_parameters(module: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(sharded, unsharded) pairs of one fully sharded unit, for parameters that were gathered at least once.

    Autograd accumulates into the unsharded one; torch then reduces into the sharded one.
    """
    return [(p.sharded_param, p._unsharded_param) for p in _sharded_parameters(module) if hasattr(p, "_unsharded_param")]


def shard_shapes(module: FSDPModule) -> list[tuple[int, int, bool]]:
    """(dimensions, elements of this rank's padded shard, trainable) of one unit's parameters, in the order in which their shards are
    laid out for collectives."""
    return [
        (len(p.padded_sharded_param_size), p.padded_sharded_param_size.numel(), bool(p.sharded_param.requires_grad))
        for p in _sharded_parameters(module)
    ]


def begin_sharded(model: nn.Module) -> None:
    """Let a sharded root know its units now. By itself it looks for them in its first forward, and those that are not in the model then
    (blocks of another pipeline stage) would each be a root of their own: nothing gathered ahead, buffers kept."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def leave_forward(model: nn.Module, output: Any) -> Any:
    """End the forward of a sharded root whose `forward` was left by an exception, with `output` in its result's place."""
    return model._get_fsdp_state()._post_forward(model, (), output) if isinstance(model, FSDPModule) else output


def expect_backward(model: nn.Module, output: Any) -> Any:
    """`output`, whose backward makes a sharded root `model` ready first. torch expects that of the tensors that it finds in what `forward`
    returns, and does not look into objects of classes that it does not know."""
    return model._get_fsdp_state()._register_pre_backward_hook(output) if isinstance(model, FSDPModule) else output


def reduce_now(model: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Run the end of backward for `units` of the sharded root `model`: reduce and free as their flags say. Outside of a backward pass."""
    for unit in units:
        for group in parameter_groups(unit):
            group.post_backward()
    model._get_fsdp_state()._root_post_backward_final_callback()


def input_gradients(
    outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None, inputs: list[torch.Tensor], weights: Iterator[nn.Parameter]
) -> list[dict[str, Any]]:
    """Gradients of `inputs` only, into their `grad`; returns what the gradients of `weights` can be computed from later."""
    # torch cuts the outputs off the graph in place at the end, which a view does not allow.
    outputs = [tensor.clone() if tensor._is_view() else tensor for tensor in outputs]
    return stage_backward_input(outputs, gradients, inputs, weights)[1]


def _gathered(model: nn.Module) -> list[Any]:
    return [p for module in sharded_modules(model) for p in _sharded_parameters(module) if hasattr(p, "_unsharded_param")]


def unsharded_parameter_bytes(model: nn.Module) -> int:
    """Bytes of gathered (unsharded) parameters that are allocated now, padding included; none for those that are read in place."""
    storages = (tensor.untyped_storage() for p in _gathered(model) for tensor in p.all_gather_outputs)
    return sum(storage.nbytes() for storage in storages if storage.resizable())


def unsharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that hold gathered (unsharded) parameters now."""
    return [tensor for p in _gathered(model) for tensor in (*p.all_gather_outputs, p._unsharded_param)]


def unsharded_gradient_bytes(model: nn.Module) -> int:
    """Bytes of gradients that are kept unsharded now, between micro-batches."""
    grads = (grad for p in _gathered(model) for grad in (p.unsharded_accumulated_grad, p._unsharded_param.grad) if grad is not None)
    return sum(local_tensor(grad).untyped_storage().nbytes() for grad in grads)


def reduce_unused_parameters(model: nn.Module) -> None:
    """Make units reduce zeros for parameters that a backward did not reach, so that ranks that used others issue the same collective."""
    for module in sharded_modules(model):
        setter = getattr(module, "set_reduce_scatter_unused_params", None)
        if setter is not None:
            setter(True, recurse=False)
        for group in parameter_groups(module) if setter is None else ():  # torch < 2.13
            group.post_backward = partial(reduce_with_zeros, group, group.post_backward)


def reduce_with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """`post_backward` of a group, with zeros for gathered parameters without a gradient: what torch 2.13 can be told to do."""
    for p in group.fsdp_params if group.reduce_grads else ():
        gathered = getattr(p, "_unsharded_param", None)
        if gathered is not None and gathered.requires_grad and gathered.grad is None and p.unsharded_accumulated_grad is None:
            gathered.grad = torch.zeros_like(gathered)
    post_backward(*unused)


def local_window(tensor: DTensor) -> tuple[slice, ...]:
    """Which slice of the global tensor this rank holds.

    `fully_shard` over an already split dimension splits the shard again; torch writes that as `_StridedShard` on an outer mesh dimension,
    which is applied last. Shards are torch.chunk's, so the result is one rectangle.
    """
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    splits = [
        (isinstance(p, _StridedShard), axis, p.dim) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard | _StridedShard)
    ]
    for _, axis, dim in sorted(splits):
        chunk = -(-sizes[dim] // tensor.device_mesh.size(axis))
        offset = min(coordinate[axis] * chunk, sizes[dim])
        starts[dim] += offset
        sizes[dim] = min(chunk, sizes[dim] - offset)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory (a DTensor: this rank's part), also for fake ones, which have no address."""
    return int(local_tensor(tensor.detach()).untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind this rank's parts of `tensors`."""
    return sum({storage_key(t): local_tensor(t.detach()).untyped_storage().nbytes() for t in tensors}.values())


@contextmanager
def on_resize(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `tell` with every storage whose size was changed inside: that passes no dispatcher."""
    before: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = before(storage, size)
        tell(storage)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]


@contextmanager
def around_shape_inference(make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `make()` wherever a DTensor's operator runs on its global shape, on fake tensors, to learn the result's shape."""

    class Lock:
        def __enter__(self) -> None:
            self.inside = make()
            self.inside.__enter__()

        def __exit__(self, *problem: Any) -> None:
            self.inside.__exit__(*problem)

    before = ShardingPropagator._fake_mode_lock
    ShardingPropagator._fake_mode_lock = Lock()  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before


def process_group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group that a collective operator is called with: a process group object, or the name of one as last argument."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # another kind of object, e.g. the reduction
                return dist.ProcessGroup.unbox(argument)
    return _resolve_process_group(args[-1])


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective of a gloo group gives up."""
    options: Any = group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())


def give_timeout(group: dist.ProcessGroup, of: dist.ProcessGroup) -> None:
    """Let collectives of `group` give up after the time of `of`. torch gives every new group its own default, not the first group's."""
    for device in group._device_types:
        if hasattr(source := of._get_backend(device), "options"):
            group._get_backend(device)._set_default_timeout(source.options._timeout)


def schedule_actions(name: str, *, pp: int, stages_per_rank: int, microbatches: int) -> list[list[tuple[int, str, int]]]:
    """What torch's pipeline schedule class `name` makes every pp rank do, in order: (stage, "F", "B", "I" or "W", micro-batch).

    Only the class's generator runs, on placeholders for the stages: no process group, no module, and not the lowering to sends and receives
    that its constructor ends with. A forward overlapped with a backward is given as the two, in torch's order. Idle slots are left out.
    """
    from torch.distributed.pipelining import schedules  # only here: it takes long to import

    def no_lowering(self: Any, actions: Any, format: str = "compute_only") -> None:
        self.pipeline_order = actions

    stage = SimpleNamespace(num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=None)
    generator = type(name, (getattr(schedules, name),), {"_prepare_schedule_with_comms": no_lowering})
    table = generator([stage] * stages_per_rank, microbatches).pipeline_order
    return [
        [
            (int(part.stage_index), str(part.computation_type.value), int(part.microbatch_index))
            for action in table[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
        ]
        for rank in range(pp)
    ]


def operator_named(name: str) -> Any | None:
    """`aten.mm` to the operator with all of its overloads; None where this torch has none of that name."""
    namespace, _, operator = name.partition(".")
    with suppress(AttributeError, RuntimeError):
        return getattr(getattr(torch.ops, namespace), operator) if operator else None
    return None


def finished_work() -> Any:
    """What a collective operator returns beside its tensors, for one that was not carried out."""
    return FakeWork().boxed()


@contextmanager
def delivered_at_once() -> Iterator[None]:
    """Messages to ranks that do not exist count as delivered: a fake group's works never say that they are complete."""
    before = FakeWork.is_completed
    FakeWork.is_completed = lambda self: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeWork.is_completed = before  # type: ignore[method-assign]


class StorageTracker(MemTracker):
    """torch's memory tracker without its tables by module, which refuse a module that runs for several micro-batches. Storages, resizes and
    the peak are counted by torch's own code."""

    def __enter__(self) -> StorageTracker:
        self._fake_mode_on_entry = active_fake_mode()
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)
        self._restore_resize()

    def peak_bytes(self, device_type: str) -> int:
        """The most at once on devices of a type."""
        return max(int(snapshot["Total"]) for device, snapshot in self._peak_mem_snap.items() if device.type == device_type)
