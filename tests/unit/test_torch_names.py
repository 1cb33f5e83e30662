"""Every private torch name that Plait uses exists and does what Plait needs. Run this first on a new torch."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from contextlib import nullcontext
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
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
    unit_order,
    units,
    zeroing,
)
from plait._torch import tensors as dtensor
from plait._torch import tensors as storage
from plait.comm.collectives import AllToAllReduceScatter
from plait.errors import InputError
from tests import fused_attention
from tests.measured.storage_tracker import StorageTracker


@pytest.fixture(autouse=True)
def two_ranks():
    """Rank 1 of a fake world of 2."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


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
    y, found = x * x, []
    y.register_hook(lambda grad: found.append(passes.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert found == [True, False]


def test_graph_task():
    """A backward has a number, a backward inside of it has another one, and there is none outside."""
    x, found = torch.ones(2, requires_grad=True), []

    def inner(grad):
        found.append(passes.graph_task())
        with torch.enable_grad():
            y = torch.ones(2, requires_grad=True)
            y.register_hook(lambda grad: found.append(passes.graph_task()))
            y.sum().backward()
        found.append(passes.graph_task())

    x.register_hook(inner)
    x.sum().backward()
    assert found[0] is not None and found[0] == found[2] != found[1]
    assert passes.graph_task() is None


@pytest.mark.parametrize("keep", [True, False])
def test_reset_failed_step(keep):
    """After an exception in a forward all units are sharded. Earlier gradients stay on request.

    The earlier micro-batches leave gradients of shards, and gradients that are not reduced.
    """
    model = sharded()
    assert isinstance(model, FSDPModule)
    passes.reset_failed_step(model, keep_gradients=keep)  # nothing has run
    model(torch.ones(2, 4)).sum().backward()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    reduced = [p.grad.to_local().clone() for p in model.parameters()]
    unreduced = units.unsharded_gradient_bytes(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert unreduced and units.unsharded_parameter_bytes(model)

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
    """A backward that raised is known until the reset, and nested forwards do not report it."""
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
    assert during == [False] and passes.backward_was_interrupted(model)
    passes.reset_failed_step(model, keep_gradients=False)
    assert not passes.backward_was_interrupted(model)
    model(torch.ones(2, 4)).sum().backward()
    assert not passes.backward_was_interrupted(model)


@pytest.mark.parametrize("keep", [True, False])
def test_reset_partial_reductions(keep):
    """Sums over the shards that wait for the sum over the replicas stay on request."""
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
    """The wait comes before torch's own, which follows the release of the memory."""
    model = sharded()
    assert isinstance(model, FSDPModule)
    units.wait_for_offloaded_gradients(model)
    group = units.all_parameter_groups(model)[0]
    held = []

    class Event:
        def synchronize(self):
            held.append(group._all_reduce_state)

    loss = model(torch.ones(2, 4)).sum()
    finalize = group.finalize_backward
    memory = SimpleNamespace(event=None)

    def finalize_with_copies():
        group._all_reduce_state = memory
        group.fsdp_params[0].grad_offload_event = Event()
        finalize()

    group.finalize_backward = finalize_with_copies
    loss.backward()
    assert held == [memory, None]
    assert group.fsdp_params[0].grad_offload_event is None


def test_has_gradient_hooks():
    """Hooks on the gradient and hooks after its accumulation both count."""
    one, other, plain = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.register_hook(lambda gradient: gradient)
    other.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [modules.has_gradient_hooks(p) for p in (one, other, plain)] == [True, True, False]


def sharded(mesh=None):
    """A block and a root with 3 rows over 2 ranks, or over the last dimension of `mesh`."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    mesh = mesh or init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def test_sharded_state():
    """Units, gathered copies and unsharded gradients are found and measured."""
    model = sharded()
    assert len(units.sharded_modules(model)) == 2
    assert units.gathered_parameters(model[0]) == []
    assert units.unsharded_parameter_bytes(model) == 0
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model(torch.ones(1, 4)).sum().backward()
    pairs = units.gathered_parameters(model[0])
    assert [tuple(unsharded.shape) for _, unsharded in pairs] == [(3, 4), (3,)]
    # Rows are padded, so that each rank has equally many.
    assert units.unsharded_parameter_bytes(model) == 4 * (4 * 4 + 4 + 4 * 3 + 4)
    assert units.unsharded_gradient_bytes(model) == 4 * (3 * 4 + 3 + 4 * 3 + 4)
    units.reduce_unused_parameters(model)


@dataclasses.dataclass
class Hidden:
    states: torch.Tensor
    others: list[torch.Tensor]


class Envelope:
    def __init__(self, states, others):
        self.states, self.others = states, others
        self.sender = self  # a cycle


class ReturnsObject(nn.Module):
    """Returns tensors in an object that pytrees do not open, some of them in a list."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.kind(self.first(x).cos(), [self.second(x).cos()])


class ReadsObject(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.head = ReturnsObject(kind), nn.Linear(4, 4)

    def forward(self, x, *, nested):
        hidden = self.inner(x * self.head.weight.sum())
        return Hidden(hidden.others[0] if nested else hidden.states, [])


@pytest.mark.parametrize("kind", [Hidden, Envelope])
@pytest.mark.parametrize("nested", [False, True])
def test_outputs_in_objects(nested, kind):
    """The backward of a unit that returned an object gathers the unit before it computes."""
    model, mesh = ReadsObject(kind), init_device_mesh("cpu", (2,))
    fully_shard(model.inner, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    seen = []
    for unit in units.sharded_modules(model):
        ignored_changes.watch_shards(unit)
        gathering.on_shard_reads(unit, lambda when: seen.append(when[0]), lambda: None)
    outputs = []
    model.inner.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    loss = model(torch.ones(1, 4), nested=nested).states.sum()
    for tensor in (outputs[0].states, *outputs[0].others):
        # The root returns one of them too.
        states = [hook.__self__ for hook in tensor._backward_hooks.values()]
        assert len(states) == len(set(states)), "torch finds those of dataclasses itself"
    assert seen == ["forward"] * 2
    loss.backward()
    assert seen[2:] == ["backward"] * 2
    assert units.unsharded_parameter_bytes(model) == 0
    used = (model.inner.second if nested else model.inner.first, model.head)
    assert all(layer.weight.grad is not None for layer in used)


def recorded(unit):
    """Return the list that inputs of the unit's reduce-scatters are added to."""
    inputs = []

    class Recorded(AllToAllReduceScatter):
        def __call__(self, output_tensor, input_tensor, *args, **kwargs):
            inputs.append(input_tensor.clone())
            super().__call__(output_tensor, input_tensor, *args, **kwargs)

    unit.set_custom_reduce_scatter(Recorded())
    return inputs


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_zeros_are_reduced_for_unused_parameters():
    """B2: a unit reduces zeros for parameters that a backward did not reach."""
    unit = HalfUsed()
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    units.reduce_unused_parameters(unit)
    reduced = recorded(unit)
    unit(torch.ones(1, 3)).sum().backward()
    # The fake group need not write the output of a reduce-scatter, so its numbers say nothing.
    assert all(p.grad is not None for p in unit.parameters())
    used = unit.used.weight.numel() + unit.used.bias.numel()
    assert [buffer.count_nonzero() for buffer in reduced] == [used]


def test_windows_and_locals():
    """This is the last rank of an uneven split."""
    rows, mesh = torch.arange(15.0).view(5, 3), init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)
    assert dtensor.local_window(tensor) == (slice(3, 5), slice(0, 3))
    assert torch.equal(dtensor.local_tensor(tensor), torch.arange(9.0, 15.0).view(2, 3))
    plain = torch.ones(2)
    assert dtensor.local_tensor(plain) is plain


def test_grouped_by_device_and_dtype():
    """The order of the groups does not depend on that of the tensors."""
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(0)
    far = torch.ones(1, device="meta")
    grouped = operators.grouped_by_device_and_dtype
    assert grouped([wide, narrow, far, narrow, wide]) == [[1, 3], [0, 4], [2]]
    assert grouped([far, wide, narrow]) == [[2], [1], [0]]


def test_kernels_for_many_tensors():
    """Norms, in-place products, and a product with more digits than its tensors have.

    On GPUs a 0-dimensional factor would be rounded to the tensors' dtype.
    """
    tensors = [torch.ones(2), torch.ones(3)]
    operators.foreach_mul_(tensors, 3.0)
    norms = [float(norm) for norm in operators.foreach_norm(tensors, 2.0)]
    assert norms == pytest.approx([18**0.5, 27**0.5])
    halves = [torch.full((2,), 48.0, dtype=torch.float16)]
    operators.foreach_unscale_(halves, torch.zeros(()), torch.tensor(2.0**-26))
    assert halves[0].tolist() == [48 * 2.0**-26] * 2, "2^-26 is 0 in float16"


def test_function_modes_that_are_on():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(operators.function_modes())
            return func(*args, **(kwargs or {}))

    seen = []
    assert not operators.function_modes()
    with Mode() as mode:
        assert operators.function_modes() == [mode]
        torch.zeros(1).sin()
    assert seen[-1] == []  # off where it runs itself


def test_transforms_of_torch_func():
    """A parameter that a forward inside of jvp creates or changes is one of the model's."""

    def forward(x):
        with operators.outside_of_transforms():
            found.append(nn.Parameter(torch.ones(2).clone()))
        with operators.allowing_requires_grad():
            frozen.requires_grad_(True)
        return (found[0] * frozen * x).sum()

    found, frozen = [], torch.ones(2)
    output, _ = torch.func.jvp(forward, (torch.ones(2),), (torch.ones(2),))
    output.backward()
    assert found[0].grad is not None
    assert frozen.grad is not None


def test_failed_operators_of_fake_tensors_are_not_logged(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)  # torch's loggers have handlers of their own
    try:
        with operators.FakeTensorMode():
            for shown, around in ((0, operators.without_failed_operators()), (1, nullcontext())):
                with around, pytest.raises(RuntimeError, match="k not in range"):
                    torch.empty(3).topk(5)
                assert len(caplog.records) == shown
    finally:
        log.removeHandler(caplog.handler)


def test_custom_reduce_scatter():
    """`fully_shard` calls the custom reduce-scatter instead of the collective."""
    assert issubclass(AllToAllReduceScatter, units.ReduceScatter)
    model = sharded()
    inputs = [recorded(module) for module in units.sharded_modules(model)]
    model(torch.ones(1, 4)).sum().backward()
    sizes = sorted(tensor.numel() for tensors in inputs for tensor in tensors)
    assert sizes == [16, 20], "both units, rows padded to both ranks"


def test_unused_parameters_of_accumulated_steps():
    """Gradients are reduced in float32 where micro-batches of bfloat16 use different parameters."""
    unit = HalfUsed()
    unit.late = nn.Linear(3, 3)
    unit.forward = lambda x, late: unit.late(x) if late else unit.used(x)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    units.reduce_unused_parameters(unit)
    units.reduce_unused_parameters(unit)
    sent = recorded(unit)
    x = torch.full((1, 3), 2.0)
    for uses in ((False, False), (False, True), (True, True)):
        for index, late in enumerate(uses):
            unit.set_requires_gradient_sync(index == 1)
            unit(x, late).sum().backward()
    assert [buffer.dtype for buffer in sent] == [torch.float32] * 3
    # Sums of the gradients of nine weights (2 each) and three biases (1 each), before the division.
    assert [float(buffer.sum()) for buffer in sent] == [2 * (9 * 2 + 3)] * 3


@pytest.mark.parametrize("own_dtype", [False, True])
def test_order_of_reduced_gradients(own_dtype):
    """Gradients are sent in the order of `reduced_shapes`, shards in that of `gathered_shapes`."""
    unit = nn.Module()
    sizes = {"first": (2, 3), "second": (4,), "third": (2, 5), "fourth": (6, 1)}
    for name, size in sizes.items():
        unit.register_parameter(name, nn.Parameter(torch.ones(size)))
    if own_dtype and hasattr(torch.Tensor, "grad_dtype"):
        unit.second.grad_dtype = torch.float64
    unit.fourth.requires_grad_(False)
    unit.forward = lambda: (
        unit.first.sum() * 1 + unit.second.sum() * 2 + unit.third.sum() * 3 + unit.fourth.sum()
    )
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    sent = recorded(unit)
    unit().backward()
    runs = torch.unique_consecutive(sent[0].view(2, -1)[0], return_counts=True)[1].tolist()
    shapes = [numel for _, numel, trainable in units.reduced_shapes(unit) if trainable]
    assert shapes == runs
    if not own_dtype:
        assert units.reduced_shapes(unit) == units.gathered_shapes(unit)
    gathered = [(dimensions, numel) for dimensions, numel, _ in units.gathered_shapes(unit)]
    assert gathered == [(2, 3), (1, 2), (2, 5), (2, 3)]


def test_schedule_actions():
    """Torch's generators run on a stand-in. Overlapped pairs become two actions, and idle slots are left out."""

    def actions(name, *, pp=2, microbatches=1):
        return pipelining.schedule_actions(
            name, pp=pp, stages_per_rank=2, microbatches=microbatches
        )

    zbv = [(0, "F", 0), (3, "F", 0), (3, "I", 0), (3, "W", 0), (0, "I", 0), (0, "W", 0)]
    assert actions("ScheduleZBVZeroBubble")[0] == zbv
    looped = [(1, "F", 0), (3, "F", 0), (3, "B", 0), (1, "B", 0)]
    assert actions("ScheduleLoopedBFS")[1] == looped
    dual = actions("ScheduleDualPipeV", microbatches=4)
    assert {len(row) - sum(kind == "W" for _, kind, _ in row) for row in dual} == {4 * 2 * 2}
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        actions("ScheduleInterleaved1F1B", pp=4, microbatches=11)


def test_a_forward_that_is_left_and_a_late_reduction():
    """The root's hooks are set on another tensor than its output, and kept gradients are reduced on request."""
    model = sharded()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)

    class Left(Exception):
        pass

    def leave(*_):
        raise Left

    handle = model[-1].register_forward_hook(leave)
    with pytest.raises(Left):
        model(torch.ones(1, 4))
    handle.remove()
    output = passes.leave_forward(model, model[0](torch.ones(1, 4)))
    output.sum().backward()
    assert units.unsharded_gradient_bytes(model) > 0
    model.set_requires_gradient_sync(True)
    passes.reduce_now(model, units.sharded_modules(model))
    assert units.unsharded_gradient_bytes(model) == 0


def test_a_backward_starts_behind_an_unknown_object():
    """The root's parameters, which another backward freed, are gathered again."""
    model = sharded()
    model.register_forward_hook(lambda module, args, output: SimpleNamespace(inner=output))
    first, second = (
        passes.expect_backward(model, model(torch.ones(1, 4)).inner.sum()) for _ in range(2)
    )
    first.backward()
    assert units.unsharded_parameter_bytes(model) == 0
    second.backward()
    assert all(p.grad is not None for p in model.parameters())
    plain = torch.ones(1)
    assert passes.expect_backward(nn.Linear(1, 1), plain) is plain


def test_fake_tensors_and_their_storages():
    """Fake tensors have sizes without memory. Views share a key."""
    with operators.FakeTensorMode():
        tensor = torch.empty(1 << 40)
    assert tensor.untyped_storage().nbytes() == 1 << 42
    assert storage.storage_bytes([tensor, tensor.view(2, -1), torch.ones(1)]) == (1 << 42) + 4
    assert groups.FakeStore() is not None
    assert operators.tree_map(lambda leaf: leaf + 1, {"a": (1, [2])}) == {"a": (2, [3])}


def test_operators_by_name():
    """A name gives all overloads at once."""
    assert operators.operator_named("aten.mm") is torch.ops.aten.mm
    for name in ("aten.no_such", "no_such.mm", "mm"):
        assert operators.operator_named(name) is None


def test_gathered_buffers():
    """Every unit has buffers once it is gathered."""
    model = sharded()
    assert all(not t.untyped_storage().nbytes() for t in units.unsharded_parameters(model))
    model(torch.ones(1, 4))
    storages = [t.untyped_storage() for t in units.unsharded_parameters(model)]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    assert sum(sizes.values()) == units.unsharded_parameter_bytes(model) > 0


def test_fake_tensors_and_a_collective_that_is_not_carried_out():
    """A dispatch mode outside the fake one answers for the collective, so that nothing waits."""

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
    """Writes are seen, also if `load_state_dict(assign=True)` replaces the parameters after the units are known."""
    model = sharded()
    writes = ignored_changes.GatheredWrites(model)
    if assigns:
        model.load_state_dict(model.state_dict(), assign=True)
    model[0].register_forward_pre_hook(lambda module, _: module.weight.data.mul_(0.5))
    model(torch.ones(1, 4)).sum().backward()
    for module in units.sharded_modules(model):
        module.reshard()
    compared = writes.take()
    assert compared is not None
    names, flags = compared
    assert [name for name, flag in zip(names, flags.tolist(), strict=True) if flag] == ["0.weight"]
    assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    writes.is_watching = False
    model(torch.ones(1, 4)).sum().backward()
    assert writes.take() is None


def test_default_allocation():
    size = (2, 3)
    buffer = units.DefaultAllocMixin().allocate(size, dtype=torch.int16, device=torch.device("cpu"))
    assert (tuple(buffer.shape), buffer.dtype) == (size, torch.int16)


def test_custom_all_gather():
    """`fully_shard` asks it for the output and calls it instead of the collective."""
    calls = []

    class Counted(units.AllGather):
        def allocate(self, size, *, dtype, device):
            calls.append(("allocate", tuple(size)))
            return torch.zeros(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append(("gather", input_tensor.numel()))

    model = sharded()
    for module in units.sharded_modules(model):
        module.set_custom_all_gather(Counted())
    model(torch.ones(1, 4))
    # The root comes first. Rows are padded to both ranks.
    assert calls == [("allocate", (16,)), ("gather", 8), ("allocate", (20,)), ("gather", 10)]


def test_timeout_of_a_group():
    """gloo's timeout is in seconds. If torch passes it to new groups, `copy_timeout` is not needed any more."""
    dist.destroy_process_group()
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
    assert groups.timeout_of(dist.group.WORLD) == 77.0
    other = dist.new_group([0])
    assert groups.timeout_of(other) != 77.0
    groups.copy_timeout(other, dist.group.WORLD)
    assert groups.timeout_of(other) == 77.0


def test_shard_buffers():
    """Buffers are replaced in place: parameters and padding stay, and the next forward gathers from the new buffers."""
    model = sharded()
    unit = units.sharded_modules(model)[1]
    before = [p.detach().to_local().clone() for p in unit.parameters()]
    names = [id(p) for p in model.parameters()]
    # The second of two ranks has one row of three.
    assert [buffer.numel() for buffer in units.shard_buffers(unit)] == [2 * 4, 2]
    made = []
    units.replace_shard_buffers(unit, lambda buffer: made.append(buffer.clone()) or made[-1])
    assert names == [id(p) for p in model.parameters()]
    model(torch.ones(1, 4))
    unit.reshard()
    buffers = zip(made, units.shard_buffers(unit), strict=True)
    assert all(current is buffer for buffer, current in buffers)
    for buffer, parameter, value in zip(made, unit.parameters(), before, strict=True):
        assert parameter.to_local().data_ptr() == buffer.data_ptr()
        assert torch.equal(parameter.to_local(), value)


def test_bytes_of_storages():
    """Each storage counts once, and of a DTensor this rank's part."""
    plain = torch.ones(6)
    mesh = init_device_mesh("cpu", (2,))
    split = distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)
    local = split.to_local().untyped_storage().nbytes()
    assert storage.storage_bytes([plain, plain[:2], split]) == 6 * 4 + local


def test_on_resize():
    """The callback sees how `fully_shard` frees and takes memory, only inside the context."""
    tensor, seen = torch.ones(4), []
    with storage.on_resize(lambda storage: seen.append(storage.nbytes())):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16)
    tensor.untyped_storage().resize_(0)
    assert seen == [0, 16]


def test_around_shape_inference():
    """The context is entered when a DTensor's operator is tried on its full shape, and not after."""
    from contextlib import contextmanager

    entered = []

    @contextmanager
    def enter():
        entered.append(True)
        yield

    mesh = init_device_mesh("cpu", (2,))
    sharded_tensor = distribute_tensor(torch.ones(6, 7), mesh, [Shard(0)])
    with dtensor.around_shape_inference(enter):
        sharded_tensor.cosh()
    before = len(entered)
    assert before
    sharded_tensor.sinh()
    assert len(entered) == before


def test_process_group_of():
    """The group is found in a collective's arguments, boxed or by name."""
    group = dist.group.WORLD
    assert groups.process_group_of((torch.ones(1), group.boxed())).size() == 2
    assert groups.process_group_of((torch.ones(1), group.group_name)).group_name == group.group_name


def test_splits_named_alike():
    """Names follow from ranks, a number and their order. torch's own follow from the groups that a process is in."""
    naming = distributed_c10d._hash_ranks_to_str
    torchs = naming([0, 1])

    def name():
        return distributed_c10d._process_group_name([0, 1], use_hashed_name=True)

    with groups.consistent_split_names(3):
        first, second = name(), name()
    with groups.consistent_split_names(3):
        again = name()
    assert first == again and len({first, second, torchs}) == 3
    assert distributed_c10d._hash_ranks_to_str is naming
    # Groups of the same ranks need different names.
    dist.new_group([0, 1])
    assert distributed_c10d._hash_ranks_to_str([0, 1]) != torchs


def test_storage_tracker_counts_resizes():
    """The tracker counts existing storages, new ones, and those that are resized in place."""
    existing = torch.zeros(100)
    tracker = StorageTracker()
    tracker.track_external(existing)
    with tracker:
        made = torch.zeros(50)
        made.untyped_storage().resize_(4 * 300)
        made.untyped_storage().resize_(0)
        del made
        torch.zeros(10).add_(1)
    # torch looks at the next operator, and not at the resize.
    assert tracker.peak_bytes("cpu") == 4 * 150
    with tracker:
        made = torch.zeros(50)
        made.untyped_storage().resize_(4 * 300)
        torch.zeros(10)
    assert tracker.peak_bytes("cpu") == 4 * 410


def test_delivered_at_once():
    """A message to a rank that does not exist is complete inside the context. Since torch 2.15 it always is."""
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
    root, *blocks = [module._get_fsdp_state() for module in units.sharded_modules(model)]
    assert root._is_root and blocks and not any(block._is_root for block in blocks)
    assert all(block._comm_ctx is root._comm_ctx for block in blocks)
    passes.begin_sharded(nn.Linear(2, 2))


def test_runs_forward():
    """It is true from the beginning of the root's forward to its end."""
    model = sharded()
    running = []
    *_, block = units.sharded_modules(model)
    block.register_forward_hook(lambda *_: running.append(passes.runs_forward(model)))
    model(torch.ones(1, 4))
    assert running == [True] and not passes.runs_forward(model)


def test_reads_of_shards_are_told():
    """Each gather is reported once, with its moment. A unit that is gathered already is not reported."""
    told = []
    model = sharded()
    for index, unit in enumerate(units.sharded_modules(model)):
        before = partial(lambda index, when: told.append((index, *when)), index)
        gathering.on_shard_reads(unit, before, partial(told.append, index))
    output = model(torch.ones(1, 4))
    assert told == [(0, "forward", True), 0, (1, "forward", True), 1]
    told.clear()
    model.set_requires_all_reduce(False)
    output.sum().backward()
    assert told == [], "kept from the forward"
    for unit in units.sharded_modules(model):
        unit.set_reshard_after_forward(True)
    with torch.no_grad():
        output = model(torch.ones(1, 4))
    assert told == [(0, "evaluation", False), 0, (1, "evaluation", False), 1]
    output = model(torch.ones(1, 4))
    told.clear()
    output.sum().backward()
    assert told == [(0, "backward", False), 0, (1, "backward", False), 1]


def test_gather_in_place():
    """A unit computes with the given tensors, in training and in evaluation. torch copies and frees nothing."""
    model = sharded()
    told, wholes = [], []
    for index, unit in enumerate(units.sharded_modules(model)):
        sizes = [2 * buffer.numel() for buffer in units.shard_buffers(unit)]
        # NumPy's memory, which torch cannot free.
        whole = [torch.from_numpy(np.arange(size, dtype=np.float32)) for size in sizes]
        rows = iter([tensor.view(2, -1)[1] for tensor in whole])
        units.replace_shard_buffers(unit, lambda buffer, rows=rows: next(rows))
        words = ("begin", "finish", "give back")
        gathering.gather_in_place(
            unit, whole, *(partial(told.append, (index, word)) for word in words)
        )
        wholes.append(whole)
    gathered = [(0, "begin"), (0, "finish"), (1, "begin"), (1, "finish")]
    x = torch.ones(1, 4)
    output = model(x)
    (root_weight, root_bias), (weight, bias) = wholes
    block = x @ weight.view(4, 4)[:3].T + bias[:3]
    assert torch.equal(output, block @ root_weight.view(4, 3).T + root_bias)
    assert told == gathered
    assert units.unsharded_parameter_bytes(model) == 0
    output.sum().backward()
    assert told == gathered, "an update comes after the reduction, which waits for everyone"
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    told.clear()
    weight += 1
    with torch.no_grad():
        changed = model(x)
    block = x @ weight.view(4, 4)[:3].T + bias[:3]
    assert torch.equal(changed, block @ root_weight.view(4, 3).T + root_bias)
    for unit in units.sharded_modules(model):
        unit.reshard()
        unit.reshard()
    assert told == [*gathered, (0, "give back"), (1, "give back")]
    told.clear()
    for unit in units.sharded_modules(model):
        unit.set_reshard_after_forward(True)
    model(x)
    assert (1, "give back") not in told, "a backward follows"
    with torch.no_grad():
        model(x)
    assert told.count((1, "give back")) == 1


class Ends(nn.Module):
    """An embedding and a head that record the gathered bytes at four points of a pass."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(4))
        self.reads, self.held = False, []

    def forward(self, ids):
        self.held.append(units.unsharded_parameter_bytes(self))
        hidden = self.embed(ids) * self.scale
        self.held.append(units.unsharded_parameter_bytes(self))
        if self.reads:
            hidden = hidden @ self.embed.weight.t() @ self.embed.weight
        hidden.register_hook(lambda _: self.held.append(units.unsharded_parameter_bytes(self)))
        return self.head(hidden[None]) + 1  # the head returns a view, and the model does not


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_follow_root():
    """An embedding is gathered with the root and freed after its forward, a head is freed after its backward.

    An embedding that other code reads stays gathered, also where another forward has freed it. Both are reduced.
    """
    model = Ends()
    embed = fully_shard(model.embed, reshard_after_forward=True)
    head = fully_shard(model.head, reshard_after_forward=False)
    root = fully_shard(model, reshard_after_forward=False)
    gathering.follow_root(root, embeddings=[embed], heads=[head])
    table, layer, scale = 4 * 8 * 4, 4 * (8 * 4 + 8), 4 * 4

    def step():
        model.held.clear()
        loss = model(torch.arange(3)).sum()
        model.held.insert(2, units.unsharded_parameter_bytes(model))
        loss.backward()
        return list(model.held)

    assert step() == [table + scale, scale, layer + scale, scale]
    model.reads = True
    assert step() == [table + scale, scale, table + layer + scale, table + scale]
    assert step() == [table + scale, table + scale, table + layer + scale, table + scale]
    loss = model(torch.arange(3)).sum()
    for module in (embed, head, root):
        module.reshard()
    loss.backward()
    assert units.unsharded_parameter_bytes(model) == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


class Skips(nn.Sequential):
    """Leaves out the given blocks."""

    def forward(self, hidden, skipped=()):
        for index, block in enumerate(self):
            hidden = hidden if index in skipped else block(hidden)
        return hidden


@pytest.mark.parametrize("skipped", [(), (1,), (0, 2), (0, 1, 2)])
def test_unit_order(skipped):
    """Whatever is skipped, units are gathered from the first to the last and reduced from the last to the first.

    Stage 3 records what is used.
    """
    for is_fixed in (True, False):
        model = Skips(*(nn.Linear(4, 4) for _ in range(3)))
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
                gathered = [f"gathering of {index}" for index in range(3)]
                assert names == [*gathered, *(f"reduction of {index}" for index in (2, 1, 0))]
        assert (digests[0] == digests[1]) == (is_fixed or not skipped)


def test_watch_shards():
    """A change that shards cannot see is refused in the forward of its unit. Gathering in inference mode serves training."""
    model = sharded()
    for unit in units.sharded_modules(model):
        ignored_changes.watch_shards(unit)
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
    """Reading a number of a partial sum reduces it. A fake group's sum is this rank's part, so the test sees the collective."""
    dtensor.sum_before_reading()
    mesh = init_device_mesh("cpu", (2,))
    total = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None).sum()
    assert total.placements[0].is_partial()
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as seen:
        float(total)
    assert seen.get_total_counts() == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_uneven_splits(dim):
    """A gradient is split and laid out like its parameter, without communication."""
    from torch.distributed.tensor.debug import CommDebugMode

    dtensor.keep_uneven_gradients_split()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(21.0).view(3, 7) if dim else torch.arange(21.0).view(7, 3)
    split = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    assert split.to_local().shape[dim] == 3, "the second of two ranks"
    parameter = nn.Parameter(split)
    with CommDebugMode() as seen:
        for _ in range(2):
            local = parameter.to_local()
            (local.t() * torch.arange(9.0).view(3, 3)).sum().backward()
    assert seen.get_total_counts() == 0
    gradient = parameter.grad
    assert isinstance(gradient, DTensor) and gradient.placements == (Shard(dim),)
    assert gradient.stride() == parameter.stride()
    assert gradient.to_local().is_contiguous()
    assert torch.equal(gradient.to_local(), 2 * torch.arange(9.0).view(3, 3).t())


def test_zero_grad_tells_its_observers():
    """Observers are called after the gradients are zeroed, for subclasses too, and as long as they live."""

    class Observer:
        def after_zero_grad(self, owner, *, set_to_none):
            calls.append((owner, set_to_none, module.weight.grad))

    class OwnModule(nn.Linear):
        def zero_grad(self):
            self.weight.grad = None

    class OwnOptimizer(torch.optim.SGD):
        def zero_grad(self, set_to_none=False):
            module.weight.grad = None

    class Calling(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    calls = []
    module = nn.Sequential(OwnModule(2, 2))[0]
    before = Calling(module.parameters())
    module(torch.ones(2)).sum().backward()
    observer = Observer()
    zeroing.observe_zero_grad(observer.after_zero_grad, module)
    zeroing.observe_zero_grad(observer.after_zero_grad, module)
    optimizer = torch.optim.AdamW(module.parameters())
    own, calling = OwnOptimizer(module.parameters()), Calling(module.parameters())
    optimizer.zero_grad()
    module.zero_grad()
    own.zero_grad()
    own.zero_grad(True)
    calling.zero_grad()
    before.zero_grad()
    other = nn.Linear(2, 2)
    other.zero_grad(set_to_none=False)
    expected = [(optimizer, True), (module, True), (own, False), (own, True)]
    expected += [(calling, False), (before, False), (other, False)]
    assert calls == [(*call, None) for call in expected]
    del observer
    optimizer.zero_grad()
    assert len(calls) == len(expected)


def test_forget_meshes():
    """An operator's result has the mesh of the first call with such a mesh, until that is forgotten."""
    meshes = [init_device_mesh("cpu", (2,)) for _ in range(3)]
    whole = torch.arange(8.0)
    one, two, three = (
        distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for mesh in meshes
    )
    assert one.detach().device_mesh is two.detach().device_mesh
    dtensor.forget_meshes()
    assert three.detach().device_mesh is meshes[2]


def test_what_a_module_owns():
    """Dictionaries are those in place, a copy of the rest is independent, and hooks are found by kind."""
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("seen", torch.ones(1), persistent=False)
    assert modules.direct_parameters(norm).keys() == {"weight", "bias"}
    assert not modules.direct_children(norm)
    buffers = {"running_mean", "running_var", "num_batches_tracked", "seen"}
    assert modules.direct_buffers(norm).keys() == buffers
    assert [modules.is_persistent(norm, name) for name in ("running_mean", "seen")] == [True, False]
    modules.direct_buffers(norm)["seen"] = torch.zeros(1)
    assert not norm.seen.any()
    state, children, tensors = modules.state_without_tensors(norm)
    assert tensors.keys() == {"weight", "bias"} | modules.direct_buffers(norm).keys()
    children["added"] = nn.Identity()
    assert state["eps"] == norm.eps and not modules.direct_children(norm)
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    registries = [modules.hooks_of(norm, kind) for kind in kinds]
    norm.register_forward_pre_hook(print)
    norm.register_forward_hook(print)
    norm.register_full_backward_pre_hook(print)
    handle = norm.register_full_backward_hook(print)
    assert [len(registry) for registry in registries] == [1, 1, 1, 1]
    handle.remove()
    assert not registries[-1]


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
    """Writes are counted, and views are known."""
    tensor = torch.ones(4)
    before = storage.version_of(tensor)
    tensor.add_(1)
    assert storage.version_of(tensor) == before + 1
    assert [storage.is_view(x) for x in (tensor, tensor[:2])] == [False, True]
    assert storage.storage_id(tensor.untyped_storage()) == storage.storage_key(tensor[2:])
    assert storage.storage_key(tensor) != storage.storage_key(torch.ones(4))


def test_names_and_schemas_of_operators():
    """An overload has a name, and a schema that says what it writes to."""
    assert operators.operator_name(torch.ops.c10d.allreduce_.default) == "allreduce_"
    schema = operators.schema_of(torch.ops.aten.add_.Tensor)
    aliases = [argument.alias_info for argument in schema.arguments]
    assert [alias.is_write for alias in aliases if alias] == [True] and schema.is_mutable


def test_flattened():
    """A flattened mesh has one dimension for all of its ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    assert groups.flatten_mesh(mesh).shape == (2,)


def test_scale_rates():
    """Schedules inside of another one are scaled too."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    modules.scale_rates(schedule, [3.0])
    assert [one.base_lrs for one in inner] == [[3.0], [3.0]] and schedule.get_last_lr() == [3.0]


def test_started_by():
    """The agent's handler takes the process that it is given, and starts one if it is given none."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

    given = subprocess.Popen([sys.executable, "-c", ""])
    asked = []

    def give(arguments, environment, files):
        asked.append((list(arguments), environment["NAME"], files))
        return given if len(asked) == 1 else None

    with starting.take_processes_from(give):
        handlers = [
            get_subprocess_handler(sys.executable, ("-c", "print(1)"), {"NAME": "x"}, None, None, 0)
            for _ in range(2)
        ]
    later = get_subprocess_handler(sys.executable, ("-c", ""), {"NAME": "x"}, None, None, 0)
    assert [handler.proc is given for handler in [*handlers, later]] == [True, False, False]
    assert [handler.proc.wait() for handler in [*handlers, later]] == [0, 0, 0]
    assert asked == [([sys.executable, "-c", "print(1)"], "x", (None, None))] * 2


@pytest.mark.parametrize(
    "band",
    [attention.Band(), attention.Band(None, 0), attention.Band(5, None), attention.Band(4, 2)],
    ids=str,
)
def test_flash_attention_has_the_shapes_of_its_reference(band):
    """On meta, the CUDA operator's outputs, log-sum-exp and gradients have the shapes and dtypes of the tests' reference."""
    shapes, found = ((2, 4, 10, 20), (2, 2, 13, 20), (2, 2, 13, 12)), []
    with fused_attention.registered("CPU"):
        for device in ("meta", "cpu"):
            inputs = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in shapes]
            output, log_sum_exp = attention.FLASH.forward(inputs, band, 0.5)
            softmax = attention.Softmax(output, output, log_sum_exp)
            gradients = attention.FLASH.backward(inputs, softmax, band, 0.5)
            outputs = [(x.shape, x.dtype, x.stride()) for x in (output, log_sum_exp)]
            found.append(outputs + [(x.shape, x.dtype) for x in gradients])
    assert found[0] == found[1]
    assert found[0][1][:2] == ((2, 4, 10), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_efficient_attention_has_the_shapes_of_its_reference(dtype):
    """The operator's log-sum-exp is padded to 32 queries."""
    found, raw = [], []
    band = attention.Band(None, 0)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    with fused_attention.registered("CPU"):
        for device in ("meta", "cpu"):
            inputs = [
                torch.zeros(2, 4, 10, width, dtype=dtype, device=device) for width in (20, 20, 12)
            ]
            aligned = [torch.zeros(2, 4, 10, 24, dtype=dtype, device=device)] * 3
            raw.append(operator(*aligned, None, True, 0.0, True, scale=0.5)[1].shape)
            output, log_sum_exp = attention.EFFICIENT.forward(inputs, band, 0.5)
            softmax = attention.Softmax(output, output, log_sum_exp)
            gradients = attention.EFFICIENT.backward(inputs, softmax, band, 0.5)
            found.append([(x.shape, x.dtype) for x in (output, log_sum_exp, *gradients)])
    assert found[0] == found[1] and raw == [(2, 4, 32)] * 2


def test_kernels_that_a_device_lacks_are_named(monkeypatch):
    """Each reason says what is missing, whatever device this machine has."""
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
    """The backward takes the output and the log-sum-exp of a softmax over more keys. Gradients of both halves are those of all keys."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.5)
    gradients = torch.autograd.grad(expected, inputs, torch.ones_like(expected))
    with torch.no_grad():
        output, log_sum_exp = attention.CPU.forward(inputs, attention.Band(), 0.5)
        softmax = attention.Softmax(torch.ones_like(output), output, log_sum_exp)
        queries, keys, values = zip(
            *(
                attention.CPU.backward((query, *tensors), softmax, attention.Band(), 0.5)
                for tensors in zip(key.split(3, 2), value.split(3, 2), strict=True)
            ),
            strict=True,
        )
    actual = (sum(queries), torch.cat(keys, 2), torch.cat(values, 2))
    torch.testing.assert_close(actual, gradients)


def test_views_know_what_they_are_views_of():
    """The base is found through several views, with and without gradients."""
    tensor = torch.zeros(2, 1, 6)
    with torch.no_grad():
        assert operators.view_base(tensor[:, 0]) is tensor
    assert operators.view_base(tensor[:, 0, 2:]) is tensor and operators.view_base(tensor) is tensor


def test_leaves_of_graph():
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    output = (first * second).sum() + first.exp().sum() + torch.ones(2).sum()
    assert {id(leaf) for leaf in passes.leaves_of_graph(output)} == {id(first), id(second)}
    assert not list(passes.leaves_of_graph(torch.ones(2).sum()))


def test_hooks_of_a_tensor_are_seen():
    tensor = torch.ones(2, requires_grad=True)
    assert not modules.has_tensor_hooks(tensor)
    handle = tensor.register_hook(lambda gradient: gradient)
    assert modules.has_tensor_hooks(tensor)
    handle.remove()
    assert not modules.has_tensor_hooks(tensor)
