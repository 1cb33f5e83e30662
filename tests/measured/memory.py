"""Bytes that a rank really holds, by kind, from the storages of its tensors: the measured side of the ledger.

Storages are counted once each, padding included, so views and tied weights do not count twice.
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
    """Run one `train_batch` and return the bytes of every kind of `ledger.MEMORY_KINDS` that it held on this rank."""
    held = dict.fromkeys(MEMORY_KINDS, 0)
    forward = engine.sharded.forward
    micro_batches_seen = 0

    def between(model, piece):
        nonlocal micro_batches_seen
        if micro_batches_seen:  # what is left of the micro-batch before
            held["gathered_parameters"] = max(
                held["gathered_parameters"], unsharded_parameter_bytes(model)
            )
            held["unsharded_gradients"] = max(
                held["unsharded_gradients"], unsharded_gradient_bytes(model)
            )
        micro_batches_seen += 1
        return forward(model, piece)

    residuals = engine.hooks.find(Residuals)
    parameters = list(
        engine.model.parameters()
    )  # in a backward, the model would name gathered ones

    def before_update():
        held["parameters"] = storage_bytes(parameters)
        held["gradients"] = max(
            held["gradients"], storage_bytes(p.grad for p in parameters if p.grad is not None)
        )
        held["compression"] = storage_bytes(residuals.tensors()) if residuals is not None else 0

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
    states = engine.optimizer.state.values()
    held["optimizer"] = storage_bytes(
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    )
    return held


def measure_activations(engine, piece):
    """Run forward and loss of one micro-batch, for real and without a backward, and return the bytes that it keeps for one: `activations`
    and `logits` of `ledger.ACTIVATION_KINDS`, and `blocks`, those of the blocks alone."""
    model, blocks, offloaded = (
        engine.model,
        engine.parts.blocks,
        engine.hooks.find(OffloadedActivations),
    )
    piece = to_device(piece, engine.device)
    known = [
        *model.parameters(),
        *model.buffers(),
        *(leaf for leaf in tree_leaves(piece) if isinstance(leaf, torch.Tensor)),
    ]
    factor = torch.ones((), dtype=torch.float64, device=engine.device)
    live = Recorder(known=[*known, factor])
    unwatch = watch(model, {name: index for index, name in enumerate(blocks)}, live)
    try:
        with live:
            for tell in engine.hooks.before_microbatch:
                tell(True)
            loss_fn = engine._required_loss()
            with engine.sharded.logits_for(loss_fn):
                total = loss_fn(engine.sharded.forward(model, piece), piece)[0]
                total = total * factor.to(total.dtype)  # as the engine scales it
            if offloaded is not None:
                offloaded.store.drain()
            live.forget(unsharded_parameters(model))
            kept = dict(live.bytes)
            del total
    finally:
        unwatch()
        free_gathered(model)
    of_blocks = sum(kept.get(index, 0) for index in range(len(blocks)))
    return {
        "activations": of_blocks + kept.get(OUTSIDE, 0),
        "logits": kept.get(HEAD, 0),
        "blocks": of_blocks,
    }


_APART = -3
"""Unit of messages."""


@dataclass(frozen=True)
class _Taken(PendingReceive):
    """A message that counts from when it is taken on."""

    live: LiveStorages

    def wait(self):
        for tensor in self.tensors:
            self.live.claim(tensor, self.live.unit)
        return super().wait()


@dataclass(frozen=True)
class MeasuredInFlight:
    """What a pipeline's rank held of activations in a step."""

    after: list[tuple[Action, int]]
    """Every action, and the bytes that all micro-batches kept when it had ended: blocks, what is outside of them, head and loss."""


def measure_in_flight(engine, batch):
    """Run one `train_batch` of a pipeline whose parameters are not sharded. Messages in flight between stages do not count, nor do
    gradients of parameters."""
    assert engine.sharded.pipeline is not None
    model, runtime, offloaded = (
        engine.model,
        engine.sharded.pipeline.runtime,
        engine.hooks.find(OffloadedActivations),
    )
    known = [
        *model.parameters(),
        *model.buffers(),
        *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)),
    ]
    live = Recorder(known=known)
    unwatch = watch(model, {name: index for index, name in enumerate(engine.parts.blocks)}, live)
    found: list[tuple[Action, int]] = []
    handed: dict[Message, list[int]] = {}
    """Gradients that wait for another stage of this rank, by their storages."""
    before = 0
    messenger, receive = runtime.messenger, runtime.messenger.receive

    def received(*args, **kwargs):
        unit, live.unit = live.unit, _APART
        arriving = receive(*args, **kwargs)
        live.unit = unit
        return _Taken(arriving.tensors, arriving.works, arriving.source, live)

    def listen(message, tensors):
        if message.payload is Payload.GRADIENT:
            handed[message] = [storage_id(tensor.untyped_storage()) for tensor in tensors]
            for key in handed[message]:
                live.claim_storage(key, _APART)

    def observe(action, done):
        nonlocal before
        live.unit = OUTSIDE if action.kind is Kind.FORWARD else BACKWARD
        if not done:
            before = (
                before if found else live.total
            )  # what the engine has made so far is none of it
            if action.kind in (Kind.BACKWARD, Kind.INPUT):
                for key in handed.pop(
                    Message(Payload.GRADIENT, action.stage + 1, action.microbatch), ()
                ):
                    live.claim_storage(key, BACKWARD)
            return
        messenger.forget_delivered()
        if offloaded is not None:
            offloaded.store.drain()
        found.append((action, live.total - live.bytes[_APART] - before))

    messenger.receive = received  # type: ignore[method-assign]
    runtime.observers.append(observe)
    runtime.listeners.append(listen)
    try:
        with live:
            engine.train_batch(batch)
    finally:
        runtime.observers.remove(observe)
        runtime.listeners.remove(listen)
        messenger.receive = receive  # type: ignore[method-assign]
        unwatch()
    return MeasuredInFlight(found)


@dataclass(frozen=True)
class MeasuredPeak:
    """The most that a step held, counted twice."""

    torch_bytes: int
    """By torch's own tracker."""
    own_bytes: int
    """By the storage tracker `dryrun.storage_tracker`, which also counts the fake tensors of a dry run."""


def step_tensors(model, optimizer, reducer, batch):
    """What exists before a step: parameters and their gradients, buffers, optimizer states, buckets, the batch."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    buckets = (
        [tensor for bucket in reducer.buckets for tensor in (bucket.flat, bucket.wire)]
        if reducer is not None
        else []
    )
    found = [
        *parameters,
        *(p.grad for p in parameters),
        *model.buffers(),
        *states,
        *buckets,
        *tree_leaves(batch),
    ]
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def measure_peak(engine, batch):
    """Run three `train_batch`: one that makes the optimizer's states, and one under each tracker."""
    engine.train_batch(batch)
    existing = step_tensors(engine.model, engine.optimizer, engine.hooks.find(Reducer), batch)
    tracker = StorageTracker()
    tracker.track_external(*[local_tensor(tensor.detach()) for tensor in existing])
    with tracker:
        engine.train_batch(batch)
    own = LiveStorages()
    own.hold(step_tensors(engine.model, engine.optimizer, engine.hooks.find(Reducer), batch))
    with own:
        engine.train_batch(batch)
    return MeasuredPeak(tracker.peak_bytes(engine.device.type), own.peak)
