"""Peak memory of a rank in a training step, and the point of the step at which it occurs.

`step_peak` simulates a step in order. It adds the parameters and gradients of the units, which are
computed (`unit_bytes`), to the tensors of a micro-batch, which are measured. Parameters and
gradients are allocated and freed in the order of torch 2.13's `FSDPParamGroup` or of
`reducer.Reducer`. In a pipeline, the rank's row of the schedule is the order of the computations.
Bytes are sizes of storages. The allocator's rounding and fragmentation are not included.

`dryrun.predicted_peak` measures one micro-batch of a stage on fake tensors, divided into intervals.
An interval ends when a block begins or ends, when the loss is reached, and when a gradient arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.model.facts import ROOT, ModelFacts
from plait.parallel.accounting.ledger import (
    AfterBackward,
    Ledger,
    after_block_backward,
    after_root_backward,
    unit_bytes,
)
from plait.parallel.schedules.schedule import (
    Action,
    Kind,
    Message,
    Payload,
    Schedule,
    destination,
    messages,
)

OUTSIDE = -1
HEAD = -2
LOSS = -3
"""Units that are not blocks.

OUTSIDE: before, between and outside the blocks. HEAD: from the last block's output to the
model's output. LOSS: the loss.
"""

_NAMES = {OUTSIDE: "what is outside the blocks", HEAD: "the head", LOSS: "the loss"}

Direction = Literal["forward", "backward", "weights"]
"""Direction of a computation.

`weights` is the second half of a split backward. The first half is a `backward`.
"""


PEAK_KINDS: dict[str, str] = {
    "parameters": "parameters (their shards)",
    "optimizer": "optimizer states",
    "gradients": "gradients (their shards)",
    "gathered_parameters": "gathered parameters",
    "unsharded_gradients": "unsharded gradients",
    "communication": "buffers of gathers and reductions",
    "activations": "activations of all micro-batches in flight",
    "logits": "logits and loss",
    "temporaries": "temporaries of backward or of the optimizer",
    "messages": "tensors in flight between stages",
    "batch": "the batch",
    "buffers": "buffers of the model",
}
"""Kinds of memory of a peak, with their names for the user."""


@dataclass(frozen=True)
class LiveBytes:
    """Bytes of the live tensors of one micro-batch, by kind."""

    activations: int = 0
    """Tensors of the forward in the blocks and in the modules before them."""
    logits: int = 0
    """Tensors of the forward in head and loss."""
    temporaries: int = 0
    """Tensors of the backward: gradients of activations, and recomputed activations."""
    gradients: int = 0
    """Gradients of a block's parameters, or of a head that is a unit, in the compute dtype."""
    root_gradients: int = 0
    """Gradients of all other parameters outside the blocks."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return (
            self.activations + self.logits + self.temporaries + self.gradients + self.root_gradients
        )


@dataclass(frozen=True)
class Interval:
    """Interval of a forward or backward, with the bytes that are live in it."""

    direction: Direction
    unit: int
    """Index of the block on the rank, or OUTSIDE, HEAD or LOSS."""
    peak: LiveBytes
    """Peak if a gradient is freed as soon as it is added to another or moved to a bucket."""
    peak_with_gradients: LiveBytes
    """Peak if gradients stay until the backward of their unit ends.

    Gradients outside the blocks stay until the backward of the model ends.
    """
    end: LiveBytes
    """Bytes at the end, with gradients."""


@dataclass(frozen=True)
class StageIntervals:
    """Intervals of one micro-batch in one stage, or in the whole model without a pipeline."""

    forward: tuple[Interval, ...]
    backward: tuple[Interval, ...] = ()
    """Unsplit backward. Empty if the schedule has none."""
    inputs: tuple[Interval, ...] = ()
    """First half of a split backward. Empty if no backward is split."""
    weights: tuple[Interval, ...] = ()
    """Second half of a split backward."""


@dataclass(frozen=True)
class StepFacts:
    """Measurements of a rank's step on fake tensors."""

    stages: Mapping[int, StageIntervals]
    boundary_bytes: int
    """Bytes of a message between two stages."""
    batch_bytes: int
    """Bytes of the input of all micro-batches of a step."""
    buffer_bytes: int
    """Bytes of the buffers of the rank's model."""
    optimizer_temporary_bytes: int
    """Most bytes that the optimizer step holds besides its states."""
    exchanges_reductions: bool = False
    """True if a reduce-scatter is an exchange into a buffer as large as its input, as on CPUs.

    See `comm.collectives`.
    """


Unit = int | str
"""Index of a block, name of an outer unit, or ROOT."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of a rank."""

    peak_bytes: int
    moment: str
    """Point of the step at which the peak occurs, e.g. `backward of model.layers.3`."""
    kinds: Mapping[str, int]
    """Bytes at the peak by kind (see PEAK_KINDS)."""
    phases: Mapping[str, int]
    """Largest number of bytes in each phase of the step: forward, backward, optimizer step."""


def step_peak(
    facts: StepFacts,
    *,
    ledger: Ledger,
    model: ModelFacts,
    zero: int,
    schedule: Schedule | None,
    pp_rank: int = 0,
) -> Peak:
    """Return the peak of a step after the first, when the optimizer has its states.

    Args:
        facts: Measurements of the rank's step.
        ledger: The ledger of one candidate.
        model: The rank's part of the model.
        zero: The ZeRO stage.
        schedule: The schedule of a pipeline, or None.
        pp_rank: The rank on the pp axis.
    """
    simulation = _StepSimulation(facts, ledger, model, zero, schedule, pp_rank)
    for action in simulation.row:
        simulation.run(action)
    simulation.update()
    return simulation.peak()


class _StepSimulation:
    """Simulation of one step of one rank, which tracks the bytes that it holds."""

    def __init__(
        self,
        facts: StepFacts,
        ledger: Ledger,
        model: ModelFacts,
        zero: int,
        schedule: Schedule | None,
        pp_rank: int,
    ) -> None:
        self.facts = facts
        self.zero = zero
        self.schedule = schedule
        self.names = model.blocks
        self.units = unit_bytes(model, ledger)
        self.embeddings = model.outer.embeddings
        self.head: Unit = model.outer.head or ROOT
        self.ranks = int(ledger.dp_shard[0])
        self.replicas = int(ledger.dp_replicate[0])
        self.sharded = self.ranks > 1 or ledger.compute_bytes is not None

        count = int(ledger.accumulation[0])
        self.row: Sequence[Action]
        self.expected: dict[int, list[Message]] = {}
        """Messages that are still to be received, by the rank that sends them."""
        if schedule is None:
            # Forward and backward of each micro-batch in turn.
            self.row = [
                Action(0, kind, index)
                for index in range(count)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            ]
            self.last_stage = 0
        else:
            self.row = schedule.ranks[pp_rank]
            self.last_stage = schedule.stages - 1
            for (source, to), sent in messages(schedule).items():
                if to == pp_rank:
                    self.expected[source] = list(sent)
        self.backwards_left = dict.fromkeys(facts.stages, count)
        self.root_users = {0, self.last_stage} & set(facts.stages)
        """Stages of this rank that compute gradients of the root unit."""
        self.blocks = {
            index: [interval.unit for interval in stage.forward if interval.unit >= 0]
            for index, stage in facts.stages.items()
        }

        self.constant = {
            "parameters": int(ledger.memory["parameters"][0]),
            "optimizer": int(ledger.memory["optimizer"][0]),
            "batch": facts.batch_bytes,
            "buffers": facts.buffer_bytes,
        }
        """Bytes that do not change during the step, by kind."""
        self.has_buckets = not self.sharded and self.replicas > 1
        # Gradients live in the buckets, which stay.
        if self.has_buckets:
            self.constant["gradients"] = int(ledger.memory["gradients"][0])
            units = self.units.values()
            if any(unit.gradients != unit.sharded_gradients for unit in units):
                # Separate buffers in the dtype of the reduction.
                self.constant["communication"] = sum(unit.gradients for unit in units)

        self.gathered: dict[Unit, int] = {}
        """Gathered parameters."""
        self.gathering: dict[Unit, int] = {}
        """Flat buffers of all-gathers whose parameters have not been copied out yet."""
        self.last_gather = 0
        """Flat buffer of the last all-gather of a forward, which stays until the next one."""
        self.forward_order: list[int] = []
        """Units in the order in which their forwards ended."""
        self.unsharded_gradients: dict[Unit, int] = {}
        self.gradient_shards: dict[Unit, int] = {}
        self.partial_shards: dict[Unit, int] = {}
        """Gradients that are reduced over dp_shard, but not yet over dp_replicate."""
        self.reduce_input = 0
        """Input of the last reduction, which stays until the next one."""
        self.replica_buffers = 0
        """Buffers of the sums over dp_replicate, which stay until the end of the backward."""
        self.in_flight: dict[tuple[int, int], LiveBytes] = {}
        """Bytes that each (stage, micro-batch) keeps between its computations."""
        self.now = LiveBytes()
        """Bytes of the running computation."""
        self.receiving: set[Message] = set()
        self.local_messages: set[Message] = set()
        """Messages between two stages of this rank."""
        self.sending = 0

        self.phase = "forward"
        self.place = ""
        """Micro-batch and stage of the running computation, for descriptions."""
        self.best = 0
        self.best_moment = ""
        self.best_kinds: dict[str, int] = {}
        self.phases: dict[str, int] = {}

    def _record(
        self,
        moment: str,
        *,
        alive: LiveBytes | None = None,
        buffers: int = 0,
        unsharded_gradients: int = 0,
        gradient_shards: int = 0,
    ) -> None:
        """Update the peak with the bytes that exist at one point of the step.

        Args:
            moment: Description of this point.
            alive: Bytes of the running computation, `self.now` by default.
            buffers: Communication buffers that exist at this point only.
            unsharded_gradients: Unsharded gradients that exist at this point only.
            gradient_shards: Shards of gradients that exist at this point only.
        """
        total = _sum([alive or self.now, *self.in_flight.values()])
        local_gradients = [m for m in self.local_messages if m.payload is Payload.GRADIENT]
        message_count = len(self.receiving) + len(local_gradients)
        kinds = {
            **self.constant,
            "gathered_parameters": sum(self.gathered.values()),
            "gradients": (
                self.constant.get("gradients", 0)
                + sum(self.gradient_shards.values())
                + gradient_shards
            ),
            "unsharded_gradients": (
                sum(self.unsharded_gradients.values())
                + total.gradients
                + total.root_gradients
                + unsharded_gradients
            ),
            "communication": (
                self.constant.get("communication", 0)
                + sum(self.gathering.values())
                + sum(self.partial_shards.values())
                + self.last_gather
                + self.reduce_input
                + self.replica_buffers
                + buffers
            ),
            "activations": total.activations,
            "logits": total.logits,
            "temporaries": total.temporaries,
            "messages": message_count * self.facts.boundary_bytes + self.sending,
        }
        total_bytes = sum(kinds.values())
        self.phases[self.phase] = max(total_bytes, self.phases.get(self.phase, 0))
        if total_bytes > self.best:
            self.best = total_bytes
            self.best_moment = f"{moment}{self.place}"
            self.best_kinds = kinds

    def _interval_name(self, interval: Interval) -> str:
        if interval.direction == "weights":
            return "gradients of weights"
        return f"{interval.direction} of {self._unit_name(interval.unit)}"

    def _unit_name(self, unit: Unit) -> str:
        if isinstance(unit, str):
            return unit
        if unit >= 0:
            return self.names[unit]
        return _NAMES[unit]

    def peak(self) -> Peak:
        """Return the peak so far."""
        kinds = {kind: self.best_kinds.get(kind, 0) for kind in PEAK_KINDS}
        return Peak(self.best, self.best_moment, kinds, dict(self.phases))

    def run(self, action: Action) -> None:
        """Simulate one action of the schedule."""
        stage = self.facts.stages[action.stage]
        self.place = ""
        if self.schedule is not None:
            self.place = f", micro-batch {action.microbatch}"
        if len(self.facts.stages) > 1:
            self.place += f" of stage {action.stage}"
        self.phase = "backward"
        if action.kind is Kind.FORWARD:
            self.phase = "forward"
            self._forward(action, stage)
        elif action.kind is Kind.WEIGHT:
            self._weights(action, stage)
        else:
            self._backward(action, stage)

    def update(self) -> None:
        """Simulate the optimizer step."""
        self.phase = "optimizer step"
        self.place = ""
        self._record(
            "optimizer step", alive=LiveBytes(temporaries=self.facts.optimizer_temporary_bytes)
        )

    def _forward(self, action: Action, stage: StageIntervals) -> None:
        shared = 0
        if action.stage > 0:
            shared = self._receive(Message(Payload.ACTIVATION, action.stage - 1, action.microbatch))
        self.now = LiveBytes()
        blocks = self.blocks[action.stage]
        self._gather(ROOT, forward=True)
        for name in self.embeddings:
            self._gather(name, forward=True)

        for interval in stage.forward:
            if interval.unit >= 0:
                self._gather(interval.unit, forward=True)
            elif interval.unit == HEAD:
                self._gather(self.head, forward=True)
            elif interval.unit == LOSS:
                self.last_gather = 0
            self._compute(interval, blocks=blocks, shared=shared)
            if interval.unit >= 0:
                self.forward_order.append(interval.unit)
            if self.zero == 3:
                # Embeddings run outside the blocks, and the first such interval frees them.
                freed: Sequence[Unit] = self.embeddings
                if interval.unit >= 0:
                    freed = (interval.unit,)
                for unit in freed:
                    self.gathered.pop(unit, None)

        self.forward_order.append(ROOT)
        self.last_gather = 0
        self.in_flight[action.stage, action.microbatch] = self.now
        self.now = LiveBytes()
        if action.stage < self.last_stage:
            self._send(Message(Payload.ACTIVATION, action.stage, action.microbatch))

    def _backward(self, action: Action, stage: StageIntervals) -> None:
        if action.stage < self.last_stage:
            self._receive(Message(Payload.GRADIENT, action.stage + 1, action.microbatch))
        self.now = self.in_flight.pop((action.stage, action.microbatch))
        shared = stage.forward[-1].end.activations - self.now.activations
        is_first_half = action.kind is Kind.INPUT
        intervals = stage.inputs if is_first_half else stage.backward
        # If some backwards of a schedule are split, the others reduce at their end too
        # (`techniques.pipeline_parallel.StagedZero`).
        reduces_late = self.schedule is not None and self.schedule.splits_backward
        has_root = False
        blocks = self.blocks[action.stage]
        for interval in intervals:
            if interval.unit != LOSS and not has_root:
                has_root = True
                self._gather(ROOT, forward=False)
                self._prefetch(blocks[-1:])
            if interval.unit >= 0:
                self._gather(interval.unit, forward=False)
                self._prefetch(self._previous_in_forward(interval.unit, blocks))
            self._compute(interval, blocks=blocks, shared=shared)
            if interval.unit >= 0 and not is_first_half:
                self._finish_gradients(
                    interval.unit, self.now.gradients, action.stage, only_keep=reduces_late
                )
                self.now = replace(self.now, gradients=0)
            elif interval.unit == HEAD and self.head != ROOT:
                self._finish_gradients(self.head, self.now.gradients, action.stage)
                self.now = replace(self.now, gradients=0)

        if reduces_late and not is_first_half:
            self._finish_gradients(ROOT, self.now.root_gradients, action.stage, only_keep=True)
            self.now = replace(self.now, root_gradients=0)
            for unit in blocks:
                self._finish_gradients(unit, 0, action.stage)
        if is_first_half:
            self.forward_order.clear()
            self.in_flight[action.stage, action.microbatch] = self.now
        else:
            self._end_backward(action.stage)
        self.now = LiveBytes()
        if action.stage > 0:
            self._send(Message(Payload.GRADIENT, action.stage, action.microbatch))

    def _weights(self, action: Action, stage: StageIntervals) -> None:
        self.now = self.in_flight.pop((action.stage, action.microbatch))
        shared = stage.inputs[-1].end.activations - self.now.activations
        blocks = self.blocks[action.stage]
        for interval in stage.weights:
            self._compute(interval, blocks=blocks, shared=shared, is_second_half=True)

        # The gradients of all blocks exist now. They are reduced block by block.
        gradients = self.now.gradients
        self.now = LiveBytes(root_gradients=self.now.root_gradients)
        total = sum(self.units[unit].gradients for unit in blocks) or 1
        shares = {unit: gradients * self.units[unit].gradients // total for unit in blocks}
        for unit in blocks:
            remaining = sum(shares[other] for other in blocks if other > unit)
            self.now = replace(self.now, gradients=shares[unit] + remaining)
            self._finish_gradients(unit, shares[unit], action.stage)
        self.now = replace(self.now, gradients=0)
        self._end_backward(action.stage)

    def _compute(
        self,
        interval: Interval,
        *,
        blocks: Sequence[int],
        shared: int,
        is_second_half: bool = False,
    ) -> None:
        """Simulate an interval of computation.

        Args:
            interval: The interval.
            blocks: The blocks of the stage.
            shared: Bytes of activations that this stage shares with a previous stage on this rank,
                where they are counted already.
            is_second_half: Whether the interval is in the second half of a split backward.
        """
        unit = interval.unit
        if is_second_half:
            # The second half keeps the gradients of all blocks, so any of them stands for all.
            unit = blocks[0]
        owner: Unit = unit
        if unit in (HEAD, LOSS):
            owner = self.head

        # Gradients that are added to existing ones, or moved to buckets, do not stay.
        adds = self.has_buckets or self._adds(owner)
        adds_root = (
            self.has_buckets
            or self._adds(ROOT)
            or any(self._adds(name) for name in self.embeddings)
        )
        end = interval.end
        if adds:
            peaks = [interval.peak]
            end = replace(end, gradients=0, root_gradients=0)
        elif adds_root:
            peaks = [interval.peak, replace(interval.peak_with_gradients, root_gradients=0)]
            end = replace(end, root_gradients=0)
        else:
            peaks = [interval.peak_with_gradients]
        for alive in peaks:
            self._record(self._interval_name(interval), alive=_without_shared(alive, shared))
        self.now = _without_shared(end, shared)

    def _gather(self, unit: Unit, *, forward: bool) -> None:
        """Gather the parameters of a unit, unless they have been prefetched."""
        if not self.sharded or unit in self.gathered:
            return
        self._prefetch([unit])
        sizes = self.units[unit]
        if forward:
            self.last_gather = 0
        self.gathered[unit] = sizes.gathered
        buffers = sizes.last_parameter if self.ranks == 1 else 0
        self._record(f"gather of {self._unit_name(unit)}", buffers=buffers)
        flat = self.gathering.pop(unit, 0)
        if forward:
            self.last_gather = flat

    def _prefetch(self, units: Sequence[Unit]) -> None:
        """Start to gather units."""
        if not self.sharded or self.ranks == 1:
            return
        for unit in units:
            if unit in self.gathered or unit in self.gathering:
                continue
            self.gathering[unit] = self.units[unit].gathered
            self._record(f"gather of {self._unit_name(unit)}", buffers=self.units[unit].cast_shards)

    def _previous_in_forward(self, unit: int, blocks: Sequence[int]) -> Sequence[int]:
        """Return the block that the backward of block `unit` prefetches, or nothing, as a list.

        The prefetched block is the one whose forward ran just before the forward of `unit`. torch
        forgets the order when another backward ends, and then prefetches nothing.
        """
        if unit == blocks[0] or unit not in self.forward_order:
            return ()
        last = len(self.forward_order) - 1 - self.forward_order[::-1].index(unit)
        return self.forward_order[last - 1 : last]

    def _end_backward(self, stage: int) -> None:
        """Reduce the root unit and then the embeddings, and free the flat buffers."""
        remaining = self.now.root_gradients
        gradients_of: dict[Unit, int] = {ROOT: 0}
        for name in self.embeddings:
            gradients_of[name] = min(self.units[name].computed_gradients, remaining)
        gradients_of[ROOT] = max(0, remaining - sum(gradients_of.values()))
        for unit, gradients in gradients_of.items():
            self._finish_gradients(unit, gradients, stage)
            remaining -= gradients
            self.now = replace(self.now, root_gradients=remaining)
        self.now = replace(self.now, root_gradients=0)
        self.reduce_input = 0
        self.replica_buffers = 0
        self.forward_order.clear()
        self.backwards_left[stage] -= 1

    def _finish_gradients(
        self, unit: Unit, gradients: int, stage: int, *, only_keep: bool = False
    ) -> None:
        """Simulate the end of a unit's backward.

        Args:
            unit: The unit.
            gradients: Bytes of its new gradients, which are part of `self.now`.
            stage: The pipeline stage whose backward has ended.
            only_keep: Whether the gradients are kept to be reduced later.
        """
        sizes = self.units[unit]
        if self.has_buckets:
            return
        # A single process: gradients stay where they are computed.
        if not self.sharded:
            if gradients or unit in self.gradient_shards:
                self.gradient_shards[unit] = sizes.sharded_gradients
            return

        rule = AfterBackward(False, False, False)
        if not only_keep:
            rule = self._rule(unit, stage)
        has_unsharded = unit in self.unsharded_gradients
        if rule.free and (not rule.reduce or has_unsharded or gradients):
            self.gathered.pop(unit, None)
        if rule.reduce:
            if has_unsharded:
                self._reduce(unit, 0, is_last=rule.last)
            elif gradients:
                self._reduce(unit, gradients, is_last=rule.last)
        elif gradients or has_unsharded:
            if sizes.casts_gradients and not has_unsharded:
                self._record(
                    f"cast of gradients of {self._unit_name(unit)}",
                    unsharded_gradients=sizes.gradients - gradients + sizes.last_parameter,
                )
            self.unsharded_gradients[unit] = sizes.gradients

    def _reduce(self, unit: Unit, gradients: int, *, is_last: bool) -> None:
        """Simulate the reduction of a unit, with `gradients` bytes that are part of `self.now`."""
        sizes = self.units[unit]
        name = f"reduction of {self._unit_name(unit)}"
        self.reduce_input = 0
        self._record(name, buffers=sizes.reduce_input)
        self.unsharded_gradients.pop(unit, None)
        self.reduce_input = sizes.reduce_input
        if unit == ROOT or unit in self.embeddings:
            self.now = replace(self.now, root_gradients=max(0, self.now.root_gradients - gradients))
        else:
            self.now = replace(self.now, gradients=max(0, self.now.gradients - gradients))

        casts = sizes.reduce_output != sizes.sharded_gradients
        buffers = sizes.reduce_output
        if self.ranks == 1 or self.facts.exchanges_reductions:
            # On one rank torch divides into a separate buffer, and copies.
            buffers += sizes.reduce_input
        gradient_shards = sizes.sharded_gradients if casts else 0
        self._record(name, buffers=buffers, gradient_shards=gradient_shards)

        if self.replicas > 1:
            if not is_last:
                self.partial_shards[unit] = sizes.reduce_output
                return
            self.partial_shards.pop(unit, None)
            if casts:
                self.replica_buffers += sizes.reduce_output
        self.gradient_shards[unit] = sizes.sharded_gradients

    def _adds(self, unit: Unit) -> bool:
        """Return True if new gradients of the unit are added at once to an unsharded gradient."""
        return unit in self.unsharded_gradients and not self.units[unit].casts_gradients

    def _rule(self, unit: Unit, stage: int) -> AfterBackward:
        if unit == ROOT:
            return after_root_backward(
                self.zero, self.backwards_left, ran=stage, users=self.root_users
            )
        return after_block_backward(self.zero, self.backwards_left, ran=stage, block_stage=stage)

    def _receive(self, message: Message) -> int:
        """Simulate a receive. As in the runtime, it also starts the next one from the same rank.

        Returns:
            Bytes of the message that the sending stage also holds, because it is on this rank.
        """
        assert self.schedule is not None
        if message in self.local_messages:
            self.local_messages.remove(message)
            if message.payload is Payload.ACTIVATION:
                return self.facts.boundary_bytes
            return 0
        expected = self.expected[self.schedule.stage_ranks[message.stage]]
        while message not in self.receiving:
            self.receiving.add(expected.pop(0))
        self.receiving.remove(message)
        if expected:
            self.receiving.add(expected.pop(0))
        return 0

    def _send(self, message: Message) -> None:
        assert self.schedule is not None
        if destination(self.schedule, message) is None:
            self.local_messages.add(message)
        elif message.payload is Payload.GRADIENT:
            self.sending = self.facts.boundary_bytes
        else:
            # An activation stays for the backward anyway, and is counted there.
            self.sending = 0


def _without_shared(alive: LiveBytes, shared: int) -> LiveBytes:
    return replace(alive, activations=alive.activations - shared)


def _sum(parts: Sequence[LiveBytes]) -> LiveBytes:
    total = LiveBytes()
    for part in parts:
        total = LiveBytes(
            activations=total.activations + part.activations,
            logits=total.logits + part.logits,
            temporaries=total.temporaries + part.temporaries,
            gradients=total.gradients + part.gradients,
            root_gradients=total.root_gradients + part.root_gradients,
        )
    return total
