"""Every private name of torch that Plait uses exists and does what Plait needs.

Run this file first on a new release of torch.
"""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait._torch import (
    attention,
    gathering,
    groups,
    ignored_changes,
    modules,
    operators,
    passes,
    pipelining,
    starting,
    tensors,
    unit_order,
    units,
    zeroing,
)
from plait.comm.collectives import AllToAllReduceScatter
from plait.errors import InputError
from tests import fused_attention
from tests.measured.storage_tracker import StorageTracker


@pytest.fixture(autouse=True)
def two_ranks():
    """Initialise rank 1 of a fake world of 2."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(mesh=None):
    """Return a block and a root with 3 rows, sharded over 2 ranks or the last axis of `mesh`."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    mesh = mesh or init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def distributed(tensor, dim=0):
    """Return a DTensor that is split over both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)


def have_gradients(module):
    return all(parameter.grad is not None for parameter in module.parameters())


def test_after_backward():
    """The callback runs once, after the last gradient."""
    x = torch.ones(2, requires_grad=True)
    order = []
    x.register_hook(lambda grad: passes.after_backward(lambda: order.append("after")))
    x.register_post_accumulate_grad_hook(lambda p: order.append("gradient"))
    (x * 2).sum().backward()
    assert order == ["gradient", "after"]


def test_keeps_graph():
    x = torch.ones(1, requires_grad=True)
    y = x * x
    answers = []
    y.register_hook(lambda grad: answers.append(passes.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert answers == [True, False]


def test_graph_task():
    """A backward has a number, and a backward inside it has another one."""
    x = torch.ones(2, requires_grad=True)
    tasks = []

    def record(grad):
        tasks.append(passes.graph_task())

    def inner_backward(grad):
        with torch.enable_grad():
            y = torch.ones(2, requires_grad=True)
            y.register_hook(record)
            y.sum().backward()

    for hook in (record, inner_backward, record):
        x.register_hook(hook)
    x.sum().backward()
    before, inside, after = tasks
    assert before is not None
    assert before == after != inside
    assert passes.graph_task() is None


@pytest.mark.parametrize("keep", [True, False])
def test_reset_failed_step(keep):
    """All units are sharded after an exception in a forward. Earlier gradients stay on request.

    The earlier micro-batches leave gradients of shards, and gradients that are not reduced.
    """
    model = sharded()
    assert isinstance(model, FSDPModule)
    # Nothing has run yet.
    passes.reset_failed_step(model, keep_gradients=keep)
    model(torch.ones(2, 4)).sum().backward()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    reduced = [p.grad.to_local().clone() for p in model.parameters()]
    unreduced = units.unsharded_gradient_bytes(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert unreduced
    assert units.unsharded_parameter_bytes(model)

    passes.reset_failed_step(model, keep_gradients=keep)
    assert not units.unsharded_parameter_bytes(model)
    if keep:
        assert units.unsharded_gradient_bytes(model) == unreduced
        for p, gradient in zip(model.parameters(), reduced, strict=True):
            assert torch.equal(p.grad.to_local(), gradient)
    units.drop_gradients(model)
    assert not units.unsharded_gradient_bytes(model)
    assert not units.has_unreduced(units.sharded_modules(model))
    model(torch.ones(2, 4)).sum().backward()


def test_backward_was_interrupted():
    """It is true from an exception in a backward until the reset."""
    model = sharded()
    assert isinstance(model, FSDPModule)
    during = []

    def fail(_):
        during.append(passes.backward_was_interrupted(model))
        raise RuntimeError("in the backward")

    assert not passes.backward_was_interrupted(model)
    inputs = torch.ones(2, 4, requires_grad=True)
    inputs.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the backward"):
        model(inputs).sum().backward()
    assert during == [False]
    assert passes.backward_was_interrupted(model)
    passes.reset_failed_step(model, keep_gradients=False)
    assert not passes.backward_was_interrupted(model)
    model(torch.ones(2, 4)).sum().backward()
    assert not passes.backward_was_interrupted(model)


@pytest.mark.parametrize("keep", [True, False])
def test_reset_partial_reductions(keep):
    """Gradients that are reduced over the shards, but not over the replicas, stay on request."""
    model = sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 4)).sum().backward()
    groups = units.all_parameter_groups(model)
    outputs = [group._partial_reduce_output for group in groups]
    assert all(output is not None for output in outputs)
    assert units.has_unreduced(units.sharded_modules(model))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    passes.reset_failed_step(model, keep_gradients=keep)
    if keep:
        assert [group._partial_reduce_output for group in groups] == outputs
    else:
        units.drop_gradients(model)
        assert not units.has_unreduced(units.sharded_modules(model))
    model.set_requires_all_reduce(True)
    model(torch.ones(2, 4)).sum().backward()
    assert not units.has_unreduced(units.sharded_modules(model))


def test_wait_for_offloaded_gradients():
    """torch itself waits after it has released the memory, which is too late."""
    model = sharded()
    assert isinstance(model, FSDPModule)
    units.wait_for_offloaded_gradients(model)
    group = units.all_parameter_groups(model)[0]
    states = []

    class Event:
        def synchronize(self):
            states.append(group._all_reduce_state)

    loss = model(torch.ones(2, 4)).sum()
    finalize = group.finalize_backward
    memory = SimpleNamespace(event=None)

    def finalize_with_copies():
        group._all_reduce_state = memory
        group.fsdp_params[0].grad_offload_event = Event()
        finalize()

    group.finalize_backward = finalize_with_copies
    loss.backward()
    assert states == [memory, None]
    assert group.fsdp_params[0].grad_offload_event is None


def test_has_gradient_hooks():
    """Hooks on the gradient and hooks after its accumulation both count."""
    layer = nn.Linear(2, 2)
    assert not modules.has_gradient_hooks(layer.weight)
    layer.weight.register_hook(lambda gradient: gradient)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert modules.has_gradient_hooks(layer.weight)
    assert modules.has_gradient_hooks(layer.bias)


def test_sharded_state():
    """Gathered parameters and unsharded gradients are counted in bytes."""
    model = sharded()
    assert len(units.sharded_modules(model)) == 2
    assert units.gathered_parameters(model[0]) == []
    assert units.unsharded_parameter_bytes(model) == 0
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model(torch.ones(1, 4)).sum().backward()
    (_, weight), (_, bias) = units.gathered_parameters(model[0])
    assert weight.shape == (3, 4)
    assert bias.shape == (3,)
    # Rows are padded, so that each rank has equally many.
    assert units.unsharded_parameter_bytes(model) == 4 * (4 * 4 + 4 + 4 * 3 + 4)
    assert units.unsharded_gradient_bytes(model) == 4 * (3 * 4 + 3 + 4 * 3 + 4)
    units.reduce_unused_parameters(model)


@dataclasses.dataclass
class HiddenStates:
    states: torch.Tensor
    others: list[torch.Tensor]


class CyclicObject:
    def __init__(self, states, others):
        self.states = states
        self.others = others
        self.itself = self


class ReturnsObject(nn.Module):
    """Module that returns tensors in an object that pytrees do not open, one of them in a list."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.kind(self.first(x).cos(), [self.second(x).cos()])


class ReadsObject(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = ReturnsObject(kind)
        self.head = nn.Linear(4, 4)

    def forward(self, x, *, nested):
        hidden = self.inner(x * self.head.weight.sum())
        return HiddenStates(hidden.others[0] if nested else hidden.states, [])


@pytest.mark.parametrize("kind", [HiddenStates, CyclicObject])
@pytest.mark.parametrize("nested", [False, True])
def test_outputs_in_objects(nested, kind):
    """The backward of a unit that returned an object gathers the unit before it computes."""
    model = ReadsObject(kind)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.inner, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    reads = []
    for unit in units.sharded_modules(model):
        ignored_changes.watch_shards(unit)
        gathering.on_shard_reads(unit, lambda moment: reads.append(moment[0]), lambda: None)
    outputs = []
    model.inner.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    loss = model(torch.ones(1, 4), nested=nested).states.sum()
    for tensor in (outputs[0].states, *outputs[0].others):
        # torch sets hooks on tensors in dataclasses itself, and the root returns one of them, too.
        states = [hook.__self__ for hook in tensor._backward_hooks.values()]
        assert len(states) == len(set(states))
    assert reads == ["forward"] * 2
    loss.backward()
    assert reads[2:] == ["backward"] * 2
    assert units.unsharded_parameter_bytes(model) == 0
    assert have_gradients(model.inner.second if nested else model.inner.first)
    assert model.head.weight.grad is not None


def recorded_inputs(unit):
    """Return the list that inputs of the unit's reduce-scatters are added to."""
    inputs = []

    class RecordingReduceScatter(AllToAllReduceScatter):
        def __call__(self, output_tensor, input_tensor, *args, **kwargs):
            inputs.append(input_tensor.clone())
            super().__call__(output_tensor, input_tensor, *args, **kwargs)

    unit.set_custom_reduce_scatter(RecordingReduceScatter())
    return inputs


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_zeros_are_reduced_for_unused_parameters():
    unit = HalfUsed()
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    units.reduce_unused_parameters(unit)
    inputs = recorded_inputs(unit)
    unit(torch.ones(1, 3)).sum().backward()
    # The fake group need not write the output of a reduce-scatter, so only its input is compared.
    assert have_gradients(unit)
    used = unit.used.weight.numel() + unit.used.bias.numel()
    (buffer,) = inputs
    assert buffer.count_nonzero() == used


def test_windows_and_locals():
    """The second of two ranks has two of five rows."""
    tensor = distributed(torch.arange(15.0).view(5, 3))
    assert tensors.local_window(tensor) == (slice(3, 5), slice(0, 3))
    assert torch.equal(tensors.local_tensor(tensor), torch.arange(9.0, 15.0).view(2, 3))
    plain = torch.ones(2)
    assert tensors.local_tensor(plain) is plain


def test_grouped_by_device_and_dtype():
    """The order of the groups does not depend on that of the tensors."""
    double = torch.ones(2, dtype=torch.float64)
    single = torch.ones(0)
    meta = torch.ones(1, device="meta")
    grouped = operators.grouped_by_device_and_dtype
    assert grouped([double, single, meta, single, double]) == [[1, 3], [0, 4], [2]]
    assert grouped([meta, double, single]) == [[2], [1], [0]]


def test_kernels_for_many_tensors():
    values = [torch.ones(2), torch.ones(3)]
    operators.foreach_mul_(values, 3.0)
    norms = torch.stack(operators.foreach_norm(values, 2.0))
    torch.testing.assert_close(norms, torch.tensor([18.0, 27.0]).sqrt())
    # The factor 2^-26 would be 0 in float16, to which foreach_mul_ rounds it on GPUs.
    half = torch.full((2,), 48.0, dtype=torch.float16)
    operators.foreach_unscale_([half], torch.zeros(()), torch.tensor(2.0**-26))
    assert half.tolist() == [48 * 2.0**-26] * 2


def test_active_function_modes():
    """A mode is not active while it runs itself."""
    inside = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            inside.append(operators.function_modes())
            return func(*args, **(kwargs or {}))

    assert not operators.function_modes()
    with Mode() as mode:
        assert operators.function_modes() == [mode]
        torch.zeros(1).sin()
    assert inside[-1] == []


def test_transforms_of_torch_func():
    """A forward inside jvp can create a parameter, and make a tensor require a gradient."""
    parameters = []
    tensor = torch.ones(2)

    def forward(x):
        with operators.outside_of_transforms():
            parameters.append(nn.Parameter(torch.ones(2).clone()))
        with operators.allowing_requires_grad():
            tensor.requires_grad_(True)
        return (parameters[0] * tensor * x).sum()

    output, _ = torch.func.jvp(forward, (torch.ones(2),), (torch.ones(2),))
    output.backward()
    assert parameters[0].grad is not None
    assert tensor.grad is not None


def test_failed_operators_of_fake_tensors_are_not_logged(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    # Records of torch's loggers do not reach the root logger.
    log.addHandler(caplog.handler)
    try:
        with operators.FakeTensorMode():
            for records, context in ((0, operators.without_failed_operators()), (1, nullcontext())):
                with context, pytest.raises(RuntimeError, match="k not in range"):
                    torch.empty(3).topk(5)
                assert len(caplog.records) == records
    finally:
        log.removeHandler(caplog.handler)


def test_custom_reduce_scatter():
    """`fully_shard` calls the custom reduce-scatter instead of the collective."""
    assert issubclass(AllToAllReduceScatter, units.ReduceScatter)
    model = sharded()
    root, block = map(recorded_inputs, units.sharded_modules(model))
    model(torch.ones(1, 4)).sum().backward()
    # The 3 rows of the block are padded to 4.
    assert [tensor.numel() for tensor in root] == [16]
    assert [tensor.numel() for tensor in block] == [20]


def test_unused_parameters_of_accumulated_steps():
    """Gradients are reduced in float32 if micro-batches of bfloat16 use different parameters."""
    unit = HalfUsed()
    unit.late = nn.Linear(3, 3)
    unit.forward = lambda x, late: unit.late(x) if late else unit.used(x)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    # A second call changes nothing.
    units.reduce_unused_parameters(unit)
    units.reduce_unused_parameters(unit)
    inputs = recorded_inputs(unit)
    x = torch.full((1, 3), 2.0)
    for uses in ((False, False), (False, True), (True, True)):
        for index, late in enumerate(uses):
            unit.set_requires_gradient_sync(index == 1)
            unit(x, late).sum().backward()
    assert len(inputs) == 3
    for buffer in inputs:
        assert buffer.dtype == torch.float32
        # Gradients of nine weights (2 each) and three biases (1 each), before the division.
        assert buffer.sum() == 2 * (9 * 2 + 3)


@pytest.mark.parametrize("two_dtypes", [False, True])
def test_order_of_reduced_gradients(two_dtypes):
    """`reduced_shapes` has the order of sent gradients, and `gathered_shapes` that of shards."""
    unit = nn.Module()
    sizes = {"first": (2, 3), "second": (4,), "third": (2, 5), "fourth": (6, 1)}
    for name, size in sizes.items():
        unit.register_parameter(name, nn.Parameter(torch.ones(size)))
    if two_dtypes and hasattr(torch.Tensor, "grad_dtype"):
        unit.second.grad_dtype = torch.float64
    unit.fourth.requires_grad_(False)
    unit.forward = lambda: (
        unit.first.sum() * 1 + unit.second.sum() * 2 + unit.third.sum() * 3 + unit.fourth.sum()
    )
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    inputs = recorded_inputs(unit)
    unit().backward()
    # Each parameter has another gradient, so that the lengths of equal runs are those of shards.
    runs = torch.unique_consecutive(inputs[0].view(2, -1)[0], return_counts=True)[1].tolist()
    shapes = [numel for _, numel, trainable in units.reduced_shapes(unit) if trainable]
    assert shapes == runs
    if not two_dtypes:
        assert units.reduced_shapes(unit) == units.gathered_shapes(unit)
    gathered = [(dimensions, numel) for dimensions, numel, _ in units.gathered_shapes(unit)]
    assert gathered == [(2, 3), (1, 2), (2, 5), (2, 3)]


def test_schedule_actions():
    """Overlapped pairs of torch's tables become two actions, and idle slots are omitted."""
    actions = partial(pipelining.schedule_actions, pp=2, stages_per_rank=2, microbatches=1)
    zbv = [(0, "F", 0), (3, "F", 0), (3, "I", 0), (3, "W", 0), (0, "I", 0), (0, "W", 0)]
    assert actions("ScheduleZBVZeroBubble")[0] == zbv
    looped = [(1, "F", 0), (3, "F", 0), (3, "B", 0), (1, "B", 0)]
    assert actions("ScheduleLoopedBFS")[1] == looped
    for row in actions("ScheduleDualPipeV", microbatches=4):
        assert len([kind for _, kind, _ in row if kind != "W"]) == 4 * 2 * 2
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        actions("ScheduleInterleaved1F1B", pp=4, microbatches=11)


def test_a_forward_that_ends_early_and_a_late_reduction():
    """Hooks of the root are set on a given tensor. Unreduced gradients are reduced on request."""
    model = sharded()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)

    class EndOfForward(Exception):
        pass

    def end(*_):
        raise EndOfForward

    handle = model[-1].register_forward_hook(end)
    with pytest.raises(EndOfForward):
        model(torch.ones(1, 4))
    handle.remove()
    output = passes.leave_forward(model, model[0](torch.ones(1, 4)))
    output.sum().backward()
    assert units.unsharded_gradient_bytes(model) > 0
    model.set_requires_gradient_sync(True)
    passes.reduce_now(model, units.sharded_modules(model))
    assert units.unsharded_gradient_bytes(model) == 0


def test_expect_backward_of_a_tensor_in_an_object():
    """The root's parameters, which another backward freed, are gathered again."""
    model = sharded()
    model.register_forward_hook(lambda module, args, output: SimpleNamespace(inner=output))
    first, second = (
        passes.expect_backward(model, model(torch.ones(1, 4)).inner.sum()) for _ in range(2)
    )
    first.backward()
    assert units.unsharded_parameter_bytes(model) == 0
    second.backward()
    assert have_gradients(model)
    plain = torch.ones(1)
    assert passes.expect_backward(nn.Linear(1, 1), plain) is plain


def test_fake_tensors_and_their_storages():
    """Fake tensors have sizes without memory. Views share a key."""
    with operators.FakeTensorMode():
        tensor = torch.empty(1 << 40)
    assert tensor.untyped_storage().nbytes() == 1 << 42
    assert tensors.storage_bytes([tensor, tensor.view(2, -1), torch.ones(1)]) == (1 << 42) + 4
    assert groups.FakeStore() is not None
    assert operators.tree_map(lambda leaf: leaf + 1, {"a": (1, [2])}) == {"a": (2, [3])}


def test_operators_by_name():
    """A name stands for all overloads."""
    assert operators.operator_named("aten.mm") is torch.ops.aten.mm
    for name in ("aten.no_such", "no_such.mm", "mm"):
        assert operators.operator_named(name) is None


def test_gathered_buffers():
    """Every unit has buffers once it is gathered."""
    model = sharded()
    assert tensors.storage_bytes(units.unsharded_parameters(model)) == 0
    model(torch.ones(1, 4))
    gathered_bytes = tensors.storage_bytes(units.unsharded_parameters(model))
    assert gathered_bytes == units.unsharded_parameter_bytes(model) > 0


def test_collectives_of_fake_tensors():
    """A dispatch mode outside the fake one returns finished work, so that nothing waits."""

    class NoCollectives(operators.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                return args[0], groups.finished_work()
            return func(*args, **(kwargs or {}))

    with operators.FakeTensorMode():
        x = torch.ones(2**40)
        with NoCollectives():
            dist.all_reduce(x)
        assert isinstance(x, operators.FakeTensor)


@pytest.mark.parametrize("assigns", [False, True])
def test_writes_to_gathered_parameters(assigns):
    """Writes are noticed, also after `load_state_dict(assign=True)` has replaced the parameters."""
    model = sharded()
    writes = ignored_changes.GatheredWrites(model)
    if assigns:
        model.load_state_dict(model.state_dict(), assign=True)
    model[0].register_forward_pre_hook(lambda module, _: module.weight.data.mul_(0.5))
    model(torch.ones(1, 4)).sum().backward()
    for module in units.sharded_modules(model):
        module.reshard()
    names, flags = writes.take()
    written = dict(zip(names, flags.tolist(), strict=True))
    assert written == {"0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False}
    writes.is_watching = False
    model(torch.ones(1, 4)).sum().backward()
    assert writes.take() is None


def test_default_allocation():
    size = (2, 3)
    buffer = units.DefaultAllocMixin().allocate(size, dtype=torch.int16, device=torch.device("cpu"))
    assert buffer.shape == size
    assert buffer.dtype == torch.int16


def test_custom_all_gather():
    """`fully_shard` calls it instead of the collective, with an output that it has allocated."""
    calls = []

    class RecordingAllGather(units.AllGather):
        def allocate(self, size, *, dtype, device):
            calls.append(("allocate", tuple(size)))
            return torch.zeros(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append(("gather", input_tensor.numel()))

    model = sharded()
    for module in units.sharded_modules(model):
        module.set_custom_all_gather(RecordingAllGather())
    model(torch.ones(1, 4))
    # The root is gathered first. The 3 rows of the block are padded to 4.
    assert calls == [("allocate", (16,)), ("gather", 8), ("allocate", (20,)), ("gather", 10)]


def test_timeout_of_a_group():
    """New groups do not inherit gloo's timeout. Otherwise `copy_timeout` would be unnecessary."""
    dist.destroy_process_group()
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
    assert groups.timeout_of(dist.group.WORLD) == 77.0
    other = dist.new_group([0])
    assert groups.timeout_of(other) != 77.0
    groups.copy_timeout(other, dist.group.WORLD)
    assert groups.timeout_of(other) == 77.0


def test_shard_buffers():
    """Parameters and padding stay when buffers are replaced. The next forward reads new buffers."""
    model = sharded()
    unit = units.sharded_modules(model)[1]
    parameters = list(model.parameters())
    before = [p.detach().to_local().clone() for p in unit.parameters()]
    # The second of two ranks has one row of three, padded to two.
    assert [buffer.numel() for buffer in units.shard_buffers(unit)] == [2 * 4, 2]
    copies = []

    def copy(buffer):
        copies.append(buffer.clone())
        return copies[-1]

    units.replace_shard_buffers(unit, copy)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    model(torch.ones(1, 4))
    unit.reshard()
    for index, parameter in enumerate(unit.parameters()):
        assert units.shard_buffers(unit)[index] is copies[index]
        assert parameter.to_local().data_ptr() == copies[index].data_ptr()
        assert torch.equal(parameter.to_local(), before[index])


def test_bytes_of_storages():
    """Each storage counts once. A DTensor counts with its local part."""
    plain = torch.ones(6)
    split = distributed(torch.ones(8))
    local_bytes = split.to_local().untyped_storage().nbytes()
    assert tensors.storage_bytes([plain, plain[:2], split]) == 6 * 4 + local_bytes


def test_on_resize():
    """`fully_shard` frees and allocates by resizing. The callback is called inside the context."""
    storage = torch.ones(4).untyped_storage()
    sizes = []
    with tensors.on_resize(lambda storage: sizes.append(storage.nbytes())):
        storage.resize_(0)
        storage.resize_(16)
    storage.resize_(0)
    assert sizes == [0, 16]


def test_around_shape_inference():
    """The context is entered when an operator of a DTensor is run on a fake of the full shape."""
    entered = []

    @contextmanager
    def enter():
        entered.append(True)
        yield

    tensor = distributed(torch.ones(6, 7))
    with tensors.around_shape_inference(enter):
        tensor.cosh()
    before = len(entered)
    assert before
    tensor.sinh()
    assert len(entered) == before


def test_process_group_of():
    """A collective's arguments contain its group, boxed or by name."""
    group = dist.group.WORLD
    assert groups.process_group_of((torch.ones(1), group.boxed())).size() == 2
    assert groups.process_group_of((torch.ones(1), group.group_name)).group_name == group.group_name


def test_consistent_names_of_split_groups():
    """Names follow from ranks, a number and their order.

    torch's own names depend on the groups that a process is a member of.
    """
    naming = distributed_c10d._hash_ranks_to_str
    torch_name = naming([0, 1])

    def name():
        return distributed_c10d._process_group_name([0, 1], use_hashed_name=True)

    with groups.consistent_split_names(3):
        first = name()
        second = name()
    with groups.consistent_split_names(3):
        assert name() == first
    assert len({first, second, torch_name}) == 3
    assert distributed_c10d._hash_ranks_to_str is naming
    # Groups of the same ranks need different names.
    dist.new_group([0, 1])
    assert distributed_c10d._hash_ranks_to_str([0, 1]) != torch_name


def test_storage_tracker_counts_resizes():
    """The tracker counts existing storages, new ones, and those that are resized in place."""
    existing = torch.zeros(100)
    tracker = StorageTracker()
    tracker.track_external(existing)
    with tracker:
        tensor = torch.zeros(50)
        tensor.untyped_storage().resize_(4 * 300)
        tensor.untyped_storage().resize_(0)
        del tensor
        torch.zeros(10).add_(1)
    # torch counts at the next operator, and not at the resize.
    assert tracker.peak_bytes("cpu") == 4 * 150
    with tracker:
        tensor = torch.zeros(50)
        tensor.untyped_storage().resize_(4 * 300)
        torch.zeros(10)
    assert tracker.peak_bytes("cpu") == 4 * 410


def test_delivered_at_once():
    """A message to a missing rank is complete inside the context. Since torch 2.15 it always is."""
    work = dist.isend(torch.zeros(2), 0)
    assert work is not None
    before = work.is_completed()
    with groups.delivered_at_once():
        assert work.is_completed()
    assert work.is_completed() == before


def test_begin_sharded():
    """All units share the root's state before any forward."""
    model = sharded()
    passes.begin_sharded(model)
    root, block = [module._get_fsdp_state() for module in units.sharded_modules(model)]
    assert root._is_root
    assert not block._is_root
    assert block._comm_ctx is root._comm_ctx
    passes.begin_sharded(nn.Linear(2, 2))


def test_runs_forward():
    """It is true from the beginning of the root's forward to its end."""
    model = sharded()
    running = []
    *_, block = units.sharded_modules(model)
    block.register_forward_hook(lambda *_: running.append(passes.runs_forward(model)))
    model(torch.ones(1, 4))
    assert running == [True]
    assert not passes.runs_forward(model)


def test_on_shard_reads():
    """Each gather is reported once, before and after. A gathered unit is not reported."""
    events = []
    model = sharded()
    for index, unit in enumerate(units.sharded_modules(model)):
        before = partial(lambda index, moment: events.append((index, *moment)), index)
        gathering.on_shard_reads(unit, before, partial(events.append, index))
    output = model(torch.ones(1, 4))
    assert events == [(0, "forward", True), 0, (1, "forward", True), 1]

    # Both units stay gathered until the backward.
    events.clear()
    model.set_requires_all_reduce(False)
    output.sum().backward()
    assert events == []

    for unit in units.sharded_modules(model):
        unit.set_reshard_after_forward(True)
    with torch.no_grad():
        output = model(torch.ones(1, 4))
    assert events == [(0, "evaluation", False), 0, (1, "evaluation", False), 1]
    output = model(torch.ones(1, 4))
    events.clear()
    output.sum().backward()
    assert events == [(0, "backward", False), 0, (1, "backward", False), 1]


def test_gather_in_place():
    """Units compute with the given tensors. torch neither copies nor frees them."""
    model = sharded()
    events = []
    buffers = []
    for index, unit in enumerate(units.sharded_modules(model)):
        gathered = []
        for shard in units.shard_buffers(unit):
            # torch cannot free memory of NumPy.
            gathered.append(torch.from_numpy(np.arange(2 * shard.numel(), dtype=np.float32)))
        rows = iter([tensor.view(2, -1)[1] for tensor in gathered])
        units.replace_shard_buffers(unit, lambda buffer, rows=rows: next(rows))
        names = ("begin", "finish", "release")
        callbacks = [partial(events.append, (index, name)) for name in names]
        gathering.gather_in_place(unit, gathered, *callbacks)
        buffers += gathered
    root_weight, root_bias, weight, bias = buffers
    x = torch.ones(1, 4)

    def expected():
        block = x @ weight.view(4, 4)[:3].T + bias[:3]
        return block @ root_weight.view(4, 3).T + root_bias

    gathers = [(0, "begin"), (0, "finish"), (1, "begin"), (1, "finish")]
    output = model(x)
    assert torch.equal(output, expected())
    assert events == gathers
    assert units.unsharded_parameter_bytes(model) == 0
    # The backward does not release the tensors: the reduction before the update does.
    output.sum().backward()
    assert events == gathers
    assert have_gradients(model)

    events.clear()
    weight += 1
    with torch.no_grad():
        assert torch.equal(model(x), expected())
    for unit in units.sharded_modules(model):
        unit.reshard()
        unit.reshard()
    assert events == [*gathers, (0, "release"), (1, "release")]

    # Only a forward that no backward follows releases a unit.
    events.clear()
    for unit in units.sharded_modules(model):
        unit.set_reshard_after_forward(True)
    model(x)
    assert (1, "release") not in events
    with torch.no_grad():
        model(x)
    assert events.count((1, "release")) == 1


class EmbeddingAndHead(nn.Module):
    """Model that records its gathered bytes at four points of a pass."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(4))
        self.reads_embedding = False
        self.gathered_bytes = []

    def record(self, *_):
        self.gathered_bytes.append(units.unsharded_parameter_bytes(self))

    def forward(self, ids):
        self.record()
        hidden = self.embed(ids) * self.scale
        self.record()
        if self.reads_embedding:
            hidden = hidden @ self.embed.weight.t() @ self.embed.weight
        hidden.register_hook(self.record)
        # The head returns a view, and the model does not.
        return self.head(hidden[None]) + 1


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_follow_root():
    """An embedding is gathered with the root and freed after its forward.

    A head is freed after its backward. An embedding that other code reads stays gathered.
    """
    model = EmbeddingAndHead()
    embed = fully_shard(model.embed, reshard_after_forward=True)
    head = fully_shard(model.head, reshard_after_forward=False)
    root = fully_shard(model, reshard_after_forward=False)
    gathering.follow_root(root, embeddings=[embed], heads=[head])
    table = 4 * 8 * 4
    layer = 4 * (8 * 4 + 8)
    scale = 4 * 4

    def step():
        model.gathered_bytes.clear()
        loss = model(torch.arange(3)).sum()
        model.record()
        loss.backward()
        return list(model.gathered_bytes)

    assert step() == [table + scale, scale, layer + scale, scale]
    # The read gathers the embedding again, which from then on is not freed.
    model.reads_embedding = True
    assert step() == [table + scale, scale, table + layer + scale, table + scale]
    assert step() == [table + scale, table + scale, table + layer + scale, table + scale]
    # Nor does it matter that something else has freed it.
    loss = model(torch.arange(3)).sum()
    for module in (embed, head, root):
        module.reshard()
    loss.backward()
    assert units.unsharded_parameter_bytes(model) == 0
    assert have_gradients(model)


class SkippingModel(nn.Sequential):
    """Model that skips the given blocks."""

    def forward(self, hidden, skipped=()):
        for index, block in enumerate(self):
            hidden = hidden if index in skipped else block(hidden)
        return hidden


@pytest.mark.parametrize("skipped", [(), (1,), (0, 2), (0, 1, 2)])
def test_unit_order(skipped):
    """A fixed order gathers all units forwards and reduces them backwards, also skipped ones.

    ZeRO stage 3 has no fixed order, but records which units are used.
    """
    for is_fixed in (True, False):
        model = SkippingModel(*(nn.Linear(4, 4) for _ in range(3)))
        for block in model:
            fully_shard(block, reshard_after_forward=not is_fixed)
        root = fully_shard(model, reshard_after_forward=False)
        order = unit_order.UnitOrder(root, is_fixed=is_fixed)
        units.reduce_unused_parameters(model)
        digests = []
        for skips in ((), skipped):
            out = model(torch.ones(2, 4, requires_grad=True), skips)
            out.sum().backward()
            digests.append(order.digest)
            collectives = order.take()
            names = [order.difference([[code], []])[0] for code in collectives]
            for module in (*model, root):
                module.reshard()
            if is_fixed:
                gathers = ["gathering of 0", "gathering of 1", "gathering of 2"]
                assert names == [*gathers, "reduction of 2", "reduction of 1", "reduction of 0"]
        assert (digests[0] == digests[1]) == (is_fixed or not skipped)


def test_watch_shards():
    """A change that would be ignored is refused in the forward of its unit."""
    model = sharded()
    for unit in units.sharded_modules(model):
        ignored_changes.watch_shards(unit)
    # Parameters that were gathered in inference mode can be trained.
    with torch.inference_mode():
        model(torch.ones(1, 4))
    model(torch.ones(1, 4)).sum().backward()
    for module in units.sharded_modules(model):
        module.reshard()
    shard = model[0].weight
    with pytest.raises(InputError, match=r"0.weight is read by the loss itself"):
        shard.full_tensor().square().sum().backward()
    with pytest.raises(InputError, match=r"0.weight is read by the loss itself"):
        torch.ones((), requires_grad=True) + shard.square().sum()
    handle = shard.register_hook(lambda grad: grad)
    with pytest.raises(InputError, match="has a hook on its gradient"):
        model(torch.ones(1, 4))
    handle.remove()
    shard.data = shard.data * 2
    with pytest.raises(InputError, match="was assigned to"):
        model(torch.ones(1, 4))


def test_sum_before_reading():
    """Reading a number of a partial sum reduces it."""
    tensors.sum_before_reading()
    total = distributed(torch.arange(4.0)).sum()
    assert total.placements[0].is_partial()
    # The sum of a fake group is the local part, so only the collective can be noticed.
    with CommDebugMode() as collectives:
        float(total)
    assert collectives.get_total_counts() == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_uneven_splits(dim):
    """A gradient is split and laid out like its parameter, without communication."""
    tensors.keep_uneven_gradients_split()
    shape = (3, 7) if dim else (7, 3)
    parameter = nn.Parameter(distributed(torch.arange(21.0).view(shape), dim))
    # The first of the two ranks has four.
    assert parameter.to_local().shape[dim] == 3
    with CommDebugMode() as collectives:
        for _ in range(2):
            local = parameter.to_local()
            (local.t() * torch.arange(9.0).view(3, 3)).sum().backward()
    assert collectives.get_total_counts() == 0
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements == (Shard(dim),)
    assert gradient.stride() == parameter.stride()
    assert gradient.to_local().is_contiguous()
    assert torch.equal(gradient.to_local(), 2 * torch.arange(9.0).view(3, 3).t())


def test_observe_zero_grad():
    """Observers are called after the gradients are zeroed, for subclasses too, while they live."""
    calls = []

    class Observer:
        def after_zero_grad(self, owner, *, set_to_none):
            assert module.weight.grad is None
            calls.append((owner, set_to_none))

    class OverridingModule(nn.Linear):
        def zero_grad(self):
            self.weight.grad = None

    class OverridingOptimizer(torch.optim.SGD):
        def zero_grad(self, set_to_none=False):
            module.weight.grad = None

    class CallingOptimizer(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    module = OverridingModule(2, 2)
    earlier = CallingOptimizer(module.parameters())
    module(torch.ones(2)).sum().backward()
    observer = Observer()
    # A second registration does not call it twice.
    zeroing.observe_zero_grad(observer.after_zero_grad, module)
    zeroing.observe_zero_grad(observer.after_zero_grad, module)
    optimizer = torch.optim.AdamW(module.parameters())
    overriding = OverridingOptimizer(module.parameters())
    calling = CallingOptimizer(module.parameters())
    other = nn.Linear(2, 2)
    optimizer.zero_grad()
    module.zero_grad()
    overriding.zero_grad()
    overriding.zero_grad(True)
    calling.zero_grad()
    earlier.zero_grad()
    other.zero_grad(set_to_none=False)
    expected = [(optimizer, True), (module, True), (overriding, False), (overriding, True)]
    expected += [(calling, False), (earlier, False), (other, False)]
    assert calls == expected

    del observer
    optimizer.zero_grad()
    assert len(calls) == len(expected)


def test_forget_meshes():
    """An operator's result has the mesh of the first call with an equal mesh."""
    first, second, third = (distributed(torch.arange(8.0)) for _ in range(3))
    assert first.detach().device_mesh is second.detach().device_mesh
    tensors.forget_meshes()
    assert third.detach().device_mesh is third.device_mesh


def test_contents_of_a_module():
    """Dictionaries of tensors are the module's own. `state_without_tensors` returns a copy."""
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("seen", torch.ones(1), persistent=False)
    assert modules.direct_parameters(norm).keys() == {"weight", "bias"}
    assert not modules.direct_children(norm)
    buffers = {"running_mean", "running_var", "num_batches_tracked", "seen"}
    assert modules.direct_buffers(norm).keys() == buffers
    assert modules.is_persistent(norm, "running_mean")
    assert not modules.is_persistent(norm, "seen")
    modules.direct_buffers(norm)["seen"] = torch.zeros(1)
    assert not norm.seen.any()
    state, children, names = modules.state_without_tensors(norm)
    assert names.keys() == {"weight", "bias"} | modules.direct_buffers(norm).keys()
    children["added"] = nn.Identity()
    assert state["eps"] == norm.eps
    assert not modules.direct_children(norm)


def test_hooks_of_a_module():
    module = nn.Linear(1, 1)
    for kind, register in (
        ("forward_pre", module.register_forward_pre_hook),
        ("forward", module.register_forward_hook),
        ("backward_pre", module.register_full_backward_pre_hook),
        ("backward", module.register_full_backward_hook),
    ):
        registry = modules.hooks_of(module, kind)
        handle = register(print)
        assert len(registry) == 1
        handle.remove()
        assert not registry


def test_modules_of_torch():
    """Modules that drop out, hide their initialisation, or were compiled are recognised."""
    for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout):
        assert issubclass(kind, modules.DROPOUTS)
    for module in (nn.MultiheadAttention(2, 1), nn.Linear(1, 1)):
        assert modules.reset_method(module)
    assert not modules.reset_method(nn.ReLU())
    layer = nn.Linear(1, 1)
    assert not modules.is_compiled(layer)
    layer.compile(backend="eager")
    assert modules.is_compiled(layer)


def test_writes_and_views():
    tensor = torch.ones(4)
    before = tensors.version_of(tensor)
    tensor.add_(1)
    assert tensors.version_of(tensor) == before + 1
    assert not tensors.is_view(tensor)
    assert tensors.is_view(tensor[:2])
    assert tensors.storage_id(tensor.untyped_storage()) == tensors.storage_key(tensor[2:])
    assert tensors.storage_key(tensor) != tensors.storage_key(torch.ones(4))


def test_names_and_schemas_of_operators():
    """A schema says which argument an operator writes to."""
    assert operators.operator_name(torch.ops.c10d.allreduce_.default) == "allreduce_"
    schema = operators.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert schema.arguments[0].alias_info.is_write
    assert schema.arguments[1].alias_info is None


def test_flatten_mesh():
    """A flattened mesh has one dimension for all of its ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    assert groups.flatten_mesh(mesh).shape == (2,)


def test_scale_rates():
    """Schedules inside another one are scaled, too."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    modules.scale_rates(schedule, [3.0])
    assert inner[0].base_lrs == inner[1].base_lrs == [3.0]
    assert schedule.get_last_lr() == [3.0]


def test_take_processes_from():
    """torch's agent uses the process that it is offered, and starts one if there is none."""
    ready = [subprocess.Popen([sys.executable, "-c", ""])]
    requests = []

    def take(arguments, environment, files):
        requests.append((list(arguments), environment["NAME"], files))
        return ready.pop() if ready else None

    def start():
        return get_subprocess_handler(
            sys.executable, ("-c", "print(1)"), {"NAME": "x"}, None, None, 0
        ).proc

    offered = ready[0]
    with starting.take_processes_from(take):
        processes = [start(), start()]
    processes.append(start())
    assert processes[0] is offered
    assert all(process.wait() == 0 for process in processes)
    assert len(set(processes)) == 3
    # The last process was started outside the context.
    assert requests == [([sys.executable, "-c", "print(1)"], "x", (None, None))] * 2


def attention_results(kernel, shapes, dtype, device, band):
    """Return output, log-sum-exp and gradients of attention between zeros of these shapes."""
    inputs = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    output, log_sum_exp = kernel.forward(inputs, band, 0.5)
    softmax = attention.Softmax(output, output, log_sum_exp)
    return output, log_sum_exp, *kernel.backward(inputs, softmax, band, 0.5)


def shapes_and_dtypes(results):
    return [(result.shape, result.dtype) for result in results]


@pytest.mark.parametrize(
    "band",
    [attention.Band(), attention.Band(None, 0), attention.Band(5, None), attention.Band(4, 2)],
    ids=str,
)
def test_flash_attention_has_the_shapes_of_its_reference(band):
    """CUDA's operator has, on meta, the shapes and dtypes of the reference that other tests use."""
    shapes = ((2, 4, 10, 20), (2, 2, 13, 20), (2, 2, 13, 12))
    with fused_attention.registered("CPU"):
        meta = attention_results(attention.FLASH, shapes, torch.bfloat16, "meta", band)
        reference = attention_results(attention.FLASH, shapes, torch.bfloat16, "cpu", band)
    assert shapes_and_dtypes(meta) == shapes_and_dtypes(reference)
    for actual, expected in zip(meta[:2], reference[:2], strict=True):
        assert actual.stride() == expected.stride()
    assert shapes_and_dtypes(meta)[1] == ((2, 4, 10), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_efficient_attention_has_the_shapes_of_its_reference(dtype):
    """The operator itself pads the log-sum-exp to 32 queries."""
    shapes = ((2, 4, 10, 20), (2, 4, 10, 20), (2, 4, 10, 12))
    band = attention.Band(None, 0)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    with fused_attention.registered("CPU"):
        meta = attention_results(attention.EFFICIENT, shapes, dtype, "meta", band)
        reference = attention_results(attention.EFFICIENT, shapes, dtype, "cpu", band)
        for device in ("meta", "cpu"):
            aligned = torch.zeros(2, 4, 10, 24, dtype=dtype, device=device)
            padded = operator(aligned, aligned, aligned, None, True, 0.0, True, scale=0.5)[1]
            assert padded.shape == (2, 4, 32)
    assert shapes_and_dtypes(meta) == shapes_and_dtypes(reference)


def test_reasons_against_a_kernel(monkeypatch):
    # The capability of another device than this machine has.
    monkeypatch.setattr(attention, "_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    with fused_attention.registered("CUDA"):
        assert attention.why_not_flash(device, torch.bfloat16, 128) == ""
        assert attention.why_not_efficient(torch.float32) == ""
        assert "float32" in attention.why_not_flash(device, torch.float32, 128)
        assert "not 264" in attention.why_not_flash(device, torch.bfloat16, 264)
        assert "float64" in attention.why_not_efficient(torch.float64)
        assert "float64" in attention.why_not_flex(torch.float64, 64)
        assert "not 8" in attention.why_not_flex(torch.bfloat16, 8)
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            assert "enable_flash_sdp" in attention.why_not_flash(device, torch.bfloat16, 128)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        monkeypatch.setattr(attention, "_capability", lambda device: (8, 9))
        assert "8.9" in attention.why_not_flash(device, torch.bfloat16, 200)
        assert attention.why_not_flash(device, torch.bfloat16, 256) == ""
        monkeypatch.setattr(attention, "_capability", lambda device: (7, 0))
        assert "8.0" in attention.why_not_flash(device, torch.float16, 128)
    if torch.version.cuda is None:
        assert "no FlashAttention" in attention.why_not_flash(device, torch.bfloat16, 128)


def test_attention_of_cpus_computes_parts():
    """The backward takes output and log-sum-exp of a softmax over more keys than it is given."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.5)
    gradients = torch.autograd.grad(expected, inputs, torch.ones_like(expected))
    with torch.no_grad():
        output, log_sum_exp = attention.CPU.forward(inputs, attention.Band(), 0.5)
        softmax = attention.Softmax(torch.ones_like(output), output, log_sum_exp)
        halves = []
        for keys, values in zip(key.split(3, 2), value.split(3, 2), strict=True):
            inputs = (query, keys, values)
            halves.append(attention.CPU.backward(inputs, softmax, attention.Band(), 0.5))
    queries, keys, values = zip(*halves, strict=True)
    actual = (sum(queries), torch.cat(keys, 2), torch.cat(values, 2))
    torch.testing.assert_close(actual, gradients)


def test_view_base():
    """The base is that of several views, with and without gradients."""
    tensor = torch.zeros(2, 1, 6)
    with torch.no_grad():
        assert operators.view_base(tensor[:, 0]) is tensor
    assert operators.view_base(tensor[:, 0, 2:]) is tensor
    assert operators.view_base(tensor) is tensor


def test_leaves_of_graph():
    first = torch.ones(2, requires_grad=True)
    second = torch.ones(2, requires_grad=True)
    output = (first * second).sum() + first.exp().sum() + torch.ones(2).sum()
    assert set(passes.leaves_of_graph(output)) == {first, second}
    assert not list(passes.leaves_of_graph(torch.ones(2).sum()))


def test_has_tensor_hooks():
    tensor = torch.ones(2, requires_grad=True)
    assert not modules.has_tensor_hooks(tensor)
    handle = tensor.register_hook(lambda gradient: gradient)
    assert modules.has_tensor_hooks(tensor)
    handle.remove()
    assert not modules.has_tensor_hooks(tensor)
