"""Optimizer steps on states in files: torch's bits, and reads and writes during the computation."""

import threading

import pytest
import torch
from torch import nn

from plait.config.schema.optimization import OptimizerSpec
from plait.errors import ModelError
from plait.optim.disk_optimizer import ALIGNED, DiskTier, large_states
from plait.optim.optimizer import build_optimizer
from plait.parallel.offload.arena import Arena


def model():
    """Return parameters of several slices, some that share a slice, and two with one element."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(300, 111), nn.Linear(7, 5), nn.Linear(1, 1)])


def train(optimizer, parameters, steps=3):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            # One parameter is not used in one step.
            if step == 1 and index == 2:
                continue
            (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


SPECS = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"amsgrad": True, "adam_w_mode": False},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.1},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
    "Adafactor": {},
    "Muon": {},
}


@pytest.mark.parametrize(
    ("kind", "buffer_bytes"), [*((kind, ALIGNED * 16) for kind in SPECS), ("AdamW", 10**9)]
)
def test_same_bits_as_torch(tmp_path, kind, buffer_bytes):
    """Small buffers hold a part of a parameter, the large one holds all parameters."""
    spec = OptimizerSpec(type=kind, params=SPECS[kind])
    plain = model()
    in_files = model()
    reference = build_optimizer(spec, plain.named_parameters())
    train(reference, list(plain.parameters()))

    arena = Arena(tmp_path)
    tier = DiskTier(arena, buffer_bytes=buffer_bytes)
    tier.adopt(in_files, states=large_states(lambda named: build_optimizer(spec, named)))
    reserved_bytes = arena.reserved_bytes
    optimizer = build_optimizer(spec, in_files.named_parameters())
    tier.drive(optimizer)
    train(optimizer, list(in_files.parameters()))
    assert arena.reserved_bytes == reserved_bytes, "files grew after the start"

    for expected, actual in zip(plain.parameters(), in_files.parameters(), strict=True):
        assert torch.equal(actual, expected)
        state = optimizer.state[actual]
        assert set(state) == set(reference.state[expected])
        for name, value in reference.state[expected].items():
            if not isinstance(value, torch.Tensor):
                assert state[name] == value
                continue
            assert torch.equal(state[name], value), name
            # Only states with the shape of the parameter are large.
            if value.ndim and value.shape == expected.shape:
                assert arena.holds(state[name])


@pytest.mark.parametrize("share", ["all", "none"])
def test_a_transposed_parameter_of_a_model_in_memory(tmp_path, share):
    """The steps equal those of torch, whether or not the states of the parameter are in files."""
    trained = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        module = nn.Linear(7, 5)
        module.weight = nn.Parameter(torch.randn(7, 5).t())
        model = nn.ModuleList([module, nn.Linear(2, 2)])
        optimizer = build_optimizer(OptimizerSpec(), model.named_parameters())
        if folder is not None:
            tier = DiskTier(Arena(folder), buffer_bytes=ALIGNED * 16)
            tier.adopt(model, states=2, units=("",) if share == "all" else ("1",))
            tier.drive(optimizer)
        train(optimizer, list(model.parameters()))
        trained.append(module.weight)
    assert torch.equal(*trained)


def test_schedules_work_and_closures_are_refused(tmp_path):
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    DiskTier(Arena(tmp_path), buffer_bytes=10**6).drive(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ModelError, match="no closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ModelError, match="all parameters at once"):
        DiskTier(Arena(tmp_path), buffer_bytes=10**6).drive(torch.optim.LBFGS(model().parameters()))


class Packed(torch.Tensor):
    """Tensor with packed numbers, like torchao's states of 8 bits."""


class PackedOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                packed = torch.zeros_like(parameter.detach()).as_subclass(Packed)
                self.state[parameter]["exp_avg"] = packed


def test_states_of_another_form_are_refused(tmp_path):
    parameters = model()
    tier = DiskTier(Arena(tmp_path), buffer_bytes=10**6)
    tier.adopt(parameters, states=1)
    optimizer = PackedOptimizer(parameters.parameters())
    tier.drive(optimizer)
    with pytest.raises(ModelError, match="`exp_avg` of the optimizer is a Packed"):
        train(optimizer, list(parameters.parameters()), steps=1)


SECONDS = 20
"""Long enough for any machine. It is only reached if something waits for a later event."""


READ_TENSORS = 3
"""A slice of AdamW is a gradient and two states."""
WRITTEN_TENSORS = 2
"""A gradient is not written."""


class InterlockedArena(Arena):
    """Arena whose transfers end only after the computation of a neighbouring slice.

    The read of a slice waits for the computation of the previous slice. The write of a slice waits
    for the computation of the next one.
    """

    def __init__(self, folder, *, slices):
        super().__init__(folder)
        self.enabled = False
        self.reads = 0
        self.writes = 0
        self.requested = [threading.Event() for _ in range(slices)]
        self.computed = [threading.Event() for _ in range(slices)]
        self.waits = []

    def transfer(self, size, *, reading):
        if not self.enabled:
            return
        if reading:
            index = self.reads // READ_TENSORS
            self.reads += 1
            self.requested[index].set()
            neighbour = index - 1
        else:
            index = self.writes // WRITTEN_TENSORS
            self.writes += 1
            neighbour = index + 1
        if 0 <= neighbour < len(self.computed):
            self.waits.append(self.computed[neighbour].wait(SECONDS))


class CountingArena(Arena):
    """Arena that counts the bytes in memory."""

    def __init__(self, folder):
        super().__init__(folder)
        self.enabled = False
        self.bytes_in_memory = 0
        self.peak_bytes = 0
        # Two threads count.
        self.lock = threading.Lock()

    def fetch(self, tensor, *, write):
        with self.lock:
            if self.enabled:
                self.bytes_in_memory += tensor.nbytes
                self.peak_bytes = max(self.peak_bytes, self.bytes_in_memory)
        super().fetch(tensor, write=write)

    def evict(self, tensor, *, written=True):
        super().evict(tensor, written=written)
        with self.lock:
            if self.enabled and self.holds(tensor):
                self.bytes_in_memory -= tensor.nbytes


def adam_over_files(arena, *, slices, buffers):
    """Return a tier and a function that runs a step over slices of one parameter each."""
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(ALIGNED)) for _ in range(slices))
    tier = DiskTier(arena, buffer_bytes=ALIGNED * 16, buffer_count=buffers)
    tier.adopt(parameters, states=2)
    optimizer = torch.optim.AdamW(parameters.parameters(), fused=True)
    tier.drive(optimizer)

    def step():
        for parameter in parameters:
            # A backward would copy its gradient to this place.
            parameter.grad = tier._gradients[parameter].zero_()
        optimizer.step()

    return tier, step


def test_reading_computing_and_writing_at_the_same_time(tmp_path):
    """While a slice is computed, the next one is read and the previous one is written.

    Any other order waits until the timeout.
    """
    slices = 8
    arena = InterlockedArena(tmp_path, slices=slices)
    # There are enough buffers for slices whose writes wait.
    tier, step = adam_over_files(arena, slices=slices, buffers=3 * slices)
    inner_step = tier._inner_step
    computed = 0

    def interlocked(*args):
        nonlocal computed
        if arena.enabled:
            arena.computed[computed].set()
            if computed + 1 < slices:
                arena.waits.append(arena.requested[computed + 1].wait(SECONDS))
            computed += 1
        inner_step(*args)

    # The computation of a slice has no hook of its own.
    tier._inner_step = interlocked
    # The first step creates the states.
    step()
    arena.enabled = True
    step()
    assert computed == slices
    assert arena.reads == READ_TENSORS * slices
    assert arena.writes == WRITTEN_TENSORS * slices
    assert len(arena.waits) == (READ_TENSORS + WRITTEN_TENSORS + 1) * (slices - 1)
    assert all(arena.waits)


@pytest.mark.parametrize("buffers", [2, 4, 7])
def test_no_more_slices_in_memory_than_buffers(tmp_path, buffers):
    arena = CountingArena(tmp_path)
    _, step = adam_over_files(arena, slices=16, buffers=buffers)
    step()
    arena.enabled = True
    step()
    slice_bytes = READ_TENSORS * 4 * ALIGNED
    assert arena.bytes_in_memory == 0
    assert 2 * slice_bytes <= arena.peak_bytes <= buffers * slice_bytes
