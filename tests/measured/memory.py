"""Bytes that a rank holds by kind, measured from the storages of its tensors.

Tests compare them with the ledger. Each storage is counted once with its padding, so views and tied
weights do not count twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait._torch.operators import tree_leaves
from plait._torch.tensors import local_tensor, storage_bytes, storage_id
from plait._torch.units import (
    unsharded_gradient_bytes,
    unsharded_parameter_bytes,
    unsharded_parameters,
)
from plait.comm.messages import PendingReceive
from plait.dryrun.recorder import BACKWARD, LiveStorages, Recorder, watch
from plait.parallel.accounting.ledger import MEMORY_KINDS
from plait.parallel.accounting.peak import HEAD, OUTSIDE
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.parallel.data.compression import Residuals
from plait.parallel.data.reducer import Reducer
from plait.parallel.micro_batches import to_device
from plait.parallel.schedules.schedule import Action, Kind, Message, Payload
from plait.parallel.techniques.data_parallel import free_gathered
from tests.measured.storage_tracker import StorageTracker


def measure_step(engine, batch):
    """Run one `train_batch` and return the bytes of every kind of `ledger.MEMORY_KINDS`."""
    measured = dict.fromkeys(MEMORY_KINDS, 0)
    forward = engine.sharded.forward
    micro_batches_seen = 0

    def raise_to(kind, count):
        measured[kind] = max(measured[kind], count)

    def between(model, micro_batch):
        nonlocal micro_batches_seen
        if micro_batches_seen:  # counts what the previous micro-batch leaves
            raise_to("gathered_parameters", unsharded_parameter_bytes(model))
            raise_to("unsharded_gradients", unsharded_gradient_bytes(model))
        micro_batches_seen += 1
        return forward(model, micro_batch)

    residuals = engine.hooks.find(Residuals)
    # During a backward, the model would return gathered parameters.
    parameters = list(engine.model.parameters())

    def before_update():
        measured["parameters"] = storage_bytes(parameters)
        raise_to("gradients", storage_bytes(p.grad for p in parameters if p.grad is not None))
        if residuals is not None:
            measured["compression"] = storage_bytes(residuals.tensors())

    def before_one(_):
        before_update()

    in_backward = engine.stepper.in_backward
    inspectors = in_backward.inspectors if in_backward is not None else []
    inspectors.append(before_one)
    engine.sharded.forward = between
    engine.stepper.before_update.append(before_update)
    try:
        engine.train_batch(batch)
    finally:
        engine.sharded.forward = forward
        engine.stepper.before_update.remove(before_update)
        inspectors.remove(before_one)
    measured["optimizer"] = storage_bytes(
        value for value in _optimizer_states(engine.optimizer) if isinstance(value, torch.Tensor)
    )
    return measured


def _optimizer_states(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def _existing_tensors(model, batch):
    """Return the parameters and buffers of a model and the tensors of a batch."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *leaves]


def measure_activations(engine, micro_batch):
    """Run forward and loss of a micro-batch, and return the bytes that it keeps for a backward.

    Returns:
        `activations` and `logits` of `ledger.ACTIVATION_KINDS`, and `blocks` for the blocks alone.
    """
    model = engine.model
    blocks = engine.parts.blocks
    offloaded = engine.hooks.find(OffloadedActivations)
    micro_batch = to_device(micro_batch, engine.device)
    factor = torch.ones((), dtype=torch.float64, device=engine.device)
    live = Recorder(known=[*_existing_tensors(model, micro_batch), factor])
    unwatch = watch(model, {name: index for index, name in enumerate(blocks)}, live)
    try:
        with live:
            for hook in engine.hooks.before_microbatch:
                hook(True)
            loss_fn = engine._required_loss()
            with engine.sharded.logits_for(loss_fn):
                total = loss_fn(engine.sharded.forward(model, micro_batch), micro_batch)[0]
                total = total * factor.to(total.dtype)  # as the engine scales it
            if offloaded is not None:
                offloaded.store.drain()
            live.forget(unsharded_parameters(model))
            saved = dict(live.bytes)
            del total
    finally:
        unwatch()
        free_gathered(model)

    block_bytes = sum(saved.get(index, 0) for index in range(len(blocks)))
    return {
        "activations": block_bytes + saved.get(OUTSIDE, 0),
        "logits": saved.get(HEAD, 0),
        "blocks": block_bytes,
    }


_MESSAGES = -3
"""Unit of the recorder that messages in flight belong to."""


@dataclass(frozen=True)
class _CountedReceive(PendingReceive):
    """A message that counts as an activation when the stage waits for it."""

    live: LiveStorages

    def wait(self):
        for tensor in self.tensors:
            self.live.claim(tensor, self.live.unit)
        return super().wait()


@dataclass(frozen=True)
class MeasuredInFlight:
    """Activations that a pipeline rank held in a step.

    Attributes:
        after: Every action, and the bytes that all micro-batches kept when it had ended, in blocks,
            outside of them, in the head and in the loss.
    """

    after: list[tuple[Action, int]]


def measure_in_flight(engine, batch):
    """Run one `train_batch` of a pipeline whose parameters are not sharded.

    Messages in flight between stages and gradients of parameters do not count.
    """
    assert engine.sharded.pipeline is not None
    model = engine.model
    runtime = engine.sharded.pipeline.runtime
    messenger = runtime.messenger
    receive = messenger.receive
    offloaded = engine.hooks.find(OffloadedActivations)
    live = Recorder(known=_existing_tensors(model, batch))
    unwatch = watch(model, {name: index for index, name in enumerate(engine.parts.blocks)}, live)
    after: list[tuple[Action, int]] = []
    # Storages of gradients that wait for another stage of this rank.
    waiting: dict[Message, list[int]] = {}
    bytes_before = 0

    def counted_receive(*args, **kwargs):
        unit = live.unit
        live.unit = _MESSAGES
        arriving = receive(*args, **kwargs)
        live.unit = unit
        return _CountedReceive(arriving.tensors, arriving.works, arriving.source, live)

    def listen(message, tensors):
        if message.payload is Payload.GRADIENT:
            waiting[message] = [storage_id(tensor.untyped_storage()) for tensor in tensors]
            for key in waiting[message]:
                live.claim_storage(key, _MESSAGES)

    def observe(action, done):
        nonlocal bytes_before
        live.unit = OUTSIDE if action.kind is Kind.FORWARD else BACKWARD
        if not done:
            if not after:
                bytes_before = live.total  # created by the engine before the first action
            if action.kind in (Kind.BACKWARD, Kind.INPUT):
                message = Message(Payload.GRADIENT, action.stage + 1, action.microbatch)
                for key in waiting.pop(message, ()):
                    live.claim_storage(key, BACKWARD)
            return
        messenger.forget_delivered()
        if offloaded is not None:
            offloaded.store.drain()
        after.append((action, live.total - live.bytes[_MESSAGES] - bytes_before))

    messenger.receive = counted_receive
    runtime.observers.append(observe)
    runtime.listeners.append(listen)
    try:
        with live:
            engine.train_batch(batch)
    finally:
        runtime.observers.remove(observe)
        runtime.listeners.remove(listen)
        messenger.receive = receive
        unwatch()
    return MeasuredInFlight(after)


@dataclass(frozen=True)
class MeasuredPeak:
    """Peak memory of a step, counted twice.

    Attributes:
        torch_bytes: Peak according to torch's tracker.
        dry_run_bytes: Peak according to the tracker of dry runs, which can also count fake tensors.
    """

    torch_bytes: int
    dry_run_bytes: int


def step_tensors(engine, batch):
    """Return the tensors that exist before a step, including gradients and buckets."""
    reducer = engine.hooks.find(Reducer)
    buckets = reducer.buckets if reducer is not None else []
    tensors = [
        *_existing_tensors(engine.model, batch),
        *(parameter.grad for parameter in engine.model.parameters()),
        *_optimizer_states(engine.optimizer),
        *(tensor for bucket in buckets for tensor in (bucket.flat, bucket.wire)),
    ]
    return [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]


def measure_peak(engine, batch):
    """Run three `train_batch`: one that creates optimizer states, and one under each tracker."""
    engine.train_batch(batch)
    tracker = StorageTracker()
    tracker.track_external(*[local_tensor(x.detach()) for x in step_tensors(engine, batch)])
    with tracker:
        engine.train_batch(batch)
    live = LiveStorages()
    live.hold(step_tensors(engine, batch))
    with live:
        engine.train_batch(batch)
    return MeasuredPeak(tracker.peak_bytes(engine.device.type), live.peak)
