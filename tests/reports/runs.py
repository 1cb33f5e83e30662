"""Training loops that run unchanged in one plain process and on data-parallel ranks.

A situation is a function of a `Run`. In one process the run has the data of all ranks; on a layout
each process has its own. Gradients are means over ranks and micro-batches in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.reports.models import inputs

Mode = Literal["engine", "own"]


def adamw(parameters):
    """AdamW with decay, so that a zero gradient and a missing one give different weights."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters):
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain(value):
    """The full tensor of a value that may be sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def recorded(value):
    """A number, list or tensor as a full tensor on the CPU."""
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=torch.float64)
    return plain(value).detach().cpu().clone()


@dataclass(frozen=True)
class Result:
    """Numbers of a run.

    Attributes:
        weights: Parameters after each step, by name.
        losses: Losses by data-parallel rank, in the order of their backwards.
        notes: Other numbers that the situation recorded, by data-parallel rank.
    """

    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))


class Run:
    """A situation's run in this process alone."""

    def __init__(self, world):
        self.world = world
        self.ranks = list(range(world))
        self.rank = 0
        self.accumulation = 1
        self.clipping = 0.0
        self.result = Result()

    def start(self, model, optimizer=adamw, *, accumulation=1, clipping=0.0, **sections):
        """Prepare the model, on a layout with more sections of a configuration.

        Returns:
            What the loop calls.
        """
        self.sections = sections
        self.module = model
        self.accumulation = accumulation
        self.clipping = clipping
        return self._prepare(optimizer)

    def _prepare(self, optimizer):
        self.optimizer = optimizer(list(self.module.parameters()))
        return self.module

    def each_rank(self):
        """Data-parallel ranks whose samples this process computes."""
        for rank in self.ranks:
            self.rank = rank
            yield rank

    @contextmanager
    def accumulating(self):
        """Surround a micro-batch that is not its step's last."""
        yield

    def train(self, loss, steps=3):
        """Run steps of one micro-batch. `loss(step, rank)` returns the loss of a rank."""
        for step in range(steps):
            for rank in self.each_rank():
                self.backward(loss(step, rank))
            self.step()

    def backward(self, loss, **options):
        """Run the backward of the mean loss of a micro-batch."""
        self.result.losses[self.rank].append(float(loss.detach()))
        self._backward(loss, **options)

    def _backward(self, loss, **options):
        (loss / (self.world * self.accumulation)).backward(**options)

    def share(self, gradient):
        """A gradient of a rank's outputs, as part of the mean over ranks."""
        return gradient / self.world

    def step(self):
        """Update, drop the gradients, and record the weights."""
        self._step()
        self.record()

    def _step(self):
        if self.clipping:
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clipping)
            self.note(norm, everywhere=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop(self):
        """Drop the gradients of the step so far."""
        self.optimizer.zero_grad()

    def record(self):
        """Record the weights."""
        weights = {name: full_tensor_on_cpu(p) for name, p in self.module.named_parameters()}
        self.result.weights.append(weights)

    def note(self, value, *, everywhere=False):
        """Record a number of this rank, or one that all ranks must have."""
        for rank in self.ranks if everywhere else [self.rank]:
            self.result.notes[rank].append(recorded(value))

    def close(self):
        """End the run."""


class RankRun(Run):
    """The run of one data-parallel rank."""

    def __init__(self, rank, world, stage, parallel, zero):
        super().__init__(world)
        self.ranks = [rank]
        self.rank = rank
        self._stage = stage
        self._parallel = parallel
        self._zero = zero

    def config(self):
        """A configuration as a user would write it."""
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "zero_optimization": {"stage": self._stage, **self._zero},
            **({"parallel": self._parallel} if self._parallel else {}),
            **self.sections,
        }

    def share(self, gradient):
        return gradient


class OwnLoopRun(RankRun):
    """`plait.parallelize` where a loop has DistributedDataParallel or `fully_shard`."""

    def _prepare(self, optimizer):
        self.sharded = plait.parallelize(self.module, self.config())
        self.optimizer = optimizer(list(self.module.parameters()))
        return self.module

    @contextmanager
    def accumulating(self):
        with self.sharded.accumulate():
            yield

    def _backward(self, loss, **options):
        (loss / self.accumulation).backward(**options)

    def _step(self):
        if self.clipping:
            self.note(self.sharded.step(self.optimizer).grad_norm)
            return
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self):
        self.sharded.close()


class EngineRun(RankRun):
    """`plait.initialize` with `backward` and `step`."""

    def _prepare(self, optimizer):
        self.engine = plait.initialize(self.module, self.config(), optimizer=optimizer)
        self.optimizer = self.engine.optimizer
        return self.engine

    @contextmanager
    def accumulating(self):
        yield
        self.engine.step()

    def _backward(self, loss, **options):
        self.engine.backward(loss, **options)

    def drop(self):
        self.engine.zero_grad()

    def _step(self):
        self.engine.step()
        if self.clipping:
            self.note(self.engine.get_global_grad_norm())

    def close(self):
        self.engine.close()


def train(run, model, *, optimizer=adamw, rows=4, clipping=0.0):
    """Three steps of a model that maps features to logits."""
    call = run.start(model, optimizer, clipping=clipping)
    run.train(lambda step, rank: call(inputs(step, rank, rows=rows)).square().mean())


Situation = Callable[[Run], None]


def in_one_process(situation, world):
    """Run the situation plainly, with the data of `world` ranks."""
    torch.manual_seed(0)
    run = Run(world)
    situation(run)
    return run.result


def on_a_rank(rank, world, situation, mode, stage, parallel, zero=None):
    """Run the situation on a layout. Runs on every rank.

    Returns:
        The numbers, or the message of an error of Plait's.
    """
    kind = EngineRun if mode == "engine" else OwnLoopRun
    run = kind(rank, world, stage, parallel, zero or {})
    try:
        situation(run)
    except plait.PlaitError as error:
        return f"{type(error).__name__}: {error}"
    run.close()
    return run.result


def differences(expected, actual, rank, tolerance):
    """Return the differences between a rank's result and the plain run."""
    lines = []
    if len(expected.weights) != len(actual.weights):
        lines.append(f"{len(actual.weights)} records of weights for {len(expected.weights)}")
    for step, weights in enumerate(zip(expected.weights, actual.weights, strict=False)):
        expected_weights, actual_weights = weights
        different_names = expected_weights.keys() ^ actual_weights.keys()
        if different_names:
            lines.append(f"step {step}: other parameters {sorted(different_names)}")
            continue
        for name, tensor in expected_weights.items():
            error = _error(tensor, actual_weights[name])
            if not error <= tolerance:
                lines.append(f"step {step}: {name} is {error:.2e} off")
    for kind in ("losses", "notes"):
        expected_values = getattr(expected, kind)[rank]
        actual_values = getattr(actual, kind)[rank]
        if len(expected_values) != len(actual_values):
            lines.append(f"{len(actual_values)} {kind} for {len(expected_values)}")
        for index, (expected_value, actual_value) in enumerate(
            zip(expected_values, actual_values, strict=False)
        ):
            error = _error(recorded(expected_value), recorded(actual_value))
            if not error <= tolerance:
                lines.append(f"{kind}[{index}] is {error:.2e} off")
    return lines


def _error(expected, actual):
    """The largest difference, relative to the largest value or 1e-2."""
    if expected.shape != actual.shape:
        return float("inf")
    if torch.equal(expected, actual):  # also without elements, and infinities
        return 0.0
    if not expected.is_complex():
        expected = expected.double()
        actual = actual.double()
    largest = max(float(expected.abs().max()), 1e-2)
    return float((expected - actual).abs().max()) / largest
