"""The step over files: bits of torch's own step for every kind of optimizer, and reading, computing and writing at the same time."""

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
    """A parameter of several slices, some that share a piece, and one of a single element."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(300, 111), nn.Linear(7, 5), nn.Linear(1, 1)])


def train(optimizer, parameters, steps=3, before=lambda: None):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            if step == 1 and index == 2:
                continue  # a step that leaves one unused
            (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
        before()
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
    ("kind", "pieces"), [*((kind, "many pieces") for kind in SPECS), ("AdamW", "one piece")]
)
def test_same_bits_as_torch(tmp_path, kind, pieces):
    buffer = ALIGNED * 16 if pieces == "many pieces" else 10**9
    spec = OptimizerSpec(type=kind, params=SPECS[kind])
    plain, filed = model(), model()
    theirs = build_optimizer(spec, plain.named_parameters())
    train(theirs, list(plain.parameters()))
    arena = Arena(tmp_path)
    tier = DiskTier(arena, buffer_bytes=buffer)
    tier.adopt(filed, states=large_states(lambda named: build_optimizer(spec, named)))
    reserved = arena.reserved_bytes
    ours = build_optimizer(spec, filed.named_parameters())
    tier.drive(ours)
    train(ours, list(filed.parameters()))
    for a, b in zip(plain.parameters(), filed.parameters(), strict=True):
        assert torch.equal(a, b)
        first, second = theirs.state[a], ours.state[b]
        assert set(first) == set(second)
        for name, value in first.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, second[name]), name
                assert arena.holds(second[name]) or value.shape != a.shape or not value.ndim
            else:
                assert value == second[name]
    assert arena.reserved_bytes == reserved, "what was reserved at the start was enough"


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
    """Tensors with packed numbers, like torchao's states of 8 bits."""


class KeepsPacked(torch.optim.Optimizer):
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
    tier.drive(KeepsPacked(parameters.parameters()))
    with pytest.raises(ModelError, match="`exp_avg` of the optimizer is a Packed"):
        train(tier._optimizer, list(parameters.parameters()), steps=1)


SECONDS = 20
"""Long enough for any machine. It is only reached if something waits for a later event."""


class Interlocked(Arena):
    """Arena whose transfers wait for events that must precede their end.

    The reading of a piece waits for the computation of the piece before, the writing of a piece for the computation of the next.
    """

    def __init__(self, folder, *, pieces, tensors):
        super().__init__(folder)
        self.on = False
        self.tensors = tensors  # that are read per piece
        self.read = self.written = 0
        self.asked = [threading.Event() for _ in range(pieces + 1)]
        self.computed = [threading.Event() for _ in range(pieces + 1)]
        self.met = []

    def transfer(self, size, *, reading):
        if not self.on:
            return
        if reading:
            piece, self.read = self.read // self.tensors, self.read + 1
            self.asked[piece].set()
            if piece:
                self.met.append(self.computed[piece - 1].wait(SECONDS))
        else:
            # A gradient is not written.
            piece, self.written = self.written // (self.tensors - 1), self.written + 1
            if piece < len(self.computed) - 2:
                self.met.append(self.computed[piece + 1].wait(SECONDS))


def test_reading_computing_and_writing_at_the_same_time(tmp_path):
    """While a piece is computed, the next one is requested and the one before is written, and nothing waits for either.

    Otherwise the test would hang until the timeout.
    """
    pieces = 8
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(ALIGNED)) for _ in range(pieces))
    arena = Interlocked(tmp_path, pieces=pieces, tensors=3)
    # There is room for pieces that a late thread still writes.
    tier = DiskTier(arena, buffer_bytes=ALIGNED * 16, buffer_count=3 * pieces)
    tier.adopt(parameters, states=2)
    optimizer = torch.optim.AdamW(parameters.parameters(), fused=True)
    tier.drive(optimizer)
    inner = tier._inner_step
    count = 0

    def watched(*args):
        nonlocal count
        if arena.on:
            arena.computed[count].set()
            if count + 1 < pieces:
                arena.met.append(arena.asked[count + 1].wait(SECONDS))
            count += 1
        inner(*args)

    def grads():
        for parameter in parameters:
            parameter.grad = tier._gradients[parameter].zero_()

    tier._inner_step = watched
    grads()
    optimizer.step()  # makes the states
    grads()
    arena.on = True
    optimizer.step()
    assert count == pieces and (arena.read, arena.written) == (3 * pieces, 2 * pieces)
    assert len(arena.met) == 3 * (pieces - 1) + 2 * (pieces - 1) + (pieces - 1) and all(arena.met)


def test_no_more_pieces_than_buffers(tmp_path):
    """Pieces that arrive, are computed and leave are counted at every event."""

    class Counting(Arena):
        held = most = 0
        counts = False
        lock = threading.Lock()  # two threads count

        def fetch(self, tensor, *, write):
            with self.lock:
                if self.counts:
                    self.held += tensor.nbytes
                    self.most = max(self.most, self.held)
            super().fetch(tensor, write=write)

        def evict(self, tensor, *, written=True):
            super().evict(tensor, written=written)
            with self.lock:
                if self.counts and self.holds(tensor):
                    self.held -= tensor.nbytes

    for buffers in (2, 4, 7):
        parameters = nn.ParameterList(nn.Parameter(torch.zeros(ALIGNED)) for _ in range(16))
        arena = Counting(tmp_path)
        tier = DiskTier(arena, buffer_bytes=ALIGNED * 16, buffer_count=buffers)
        tier.adopt(parameters, states=2)
        optimizer = torch.optim.AdamW(parameters.parameters(), fused=True)
        tier.drive(optimizer)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = tier._gradients[parameter].zero_()
            optimizer.step()
            arena.counts = True
        assert arena.held == 0 and 2 * 12 * ALIGNED <= arena.most <= buffers * 12 * ALIGNED
