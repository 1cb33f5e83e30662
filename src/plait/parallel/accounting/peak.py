"""The most that a rank holds during a training step, and when: the account of the tensors in
flight, iterated over the step in order.

Three things are put together: what a micro-batch keeps and needs (`timeline_points`, measured),
what the ranks hold and move of parameters and gradients (`unit_bytes`, arithmetic; the order is
that of torch 2.13's `FSDPParamGroup` and of `reducer.Reducer`), and in a pipeline the rank's row of
the schedule. Bytes are those of storages: what an allocator rounds up or cannot reuse comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.model.facts import ROOT, ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.accounting.timeline_points import (
    BESIDE,
    HEAD,
    LOSS,
    PEAK_KINDS,
    Alive,
    Moment,
    StageMoments,
    StepFacts,
)
from plait.parallel.accounting.unit_bytes import unit_bytes
from plait.parallel.accounting.zero_rule import AfterBackward, of_block, of_root
from plait.parallel.schedules.actions import Action, Kind, Message, Payload
from plait.parallel.schedules.schedule import Schedule, destination, messages

Unit = int | str
"""Index of a block, name of an outer unit, or ROOT."""


@dataclass(frozen=True)
class Peak:
    """The peak memory of a rank."""

    peak_bytes: int
    moment: str
    """When, e.g. `backward of model.layers.3`."""
    kinds: Mapping[str, int]
    """Bytes by kind at that point (see PEAK_KINDS)."""
    phases: Mapping[str, int]
    """The most of each part of the step: forward, backward, optimizer step."""


def step_peak(
    facts: StepFacts,
    *,
    ledger: Ledger,
    model: ModelFacts,
    zero: int,
    schedule: Schedule | None,
    pp_rank: int = 0,
) -> Peak:
    """The peak of a step after the first, when the optimizer has its states.

    `ledger` is the account of this one candidate, `model` the rank's part of the model, `zero` the
    ZeRO stage; `schedule` is None without a pipeline.
    """
    walk = _Walk(facts, ledger, model, zero, schedule, pp_rank)
    for action in walk.row:
        walk.run(action)
    walk.update()
    return walk.peak()


class _Walk:
    """One step of one rank."""

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
        self.ranks, self.replicas = int(ledger.dp_shard[0]), int(ledger.dp_replicate[0])
        self.sharded = self.ranks > 1 or ledger.compute_bytes is not None
        count = int(ledger.accumulation[0])
        self.row: Sequence[Action] = (
            _without_pipeline(count) if schedule is None else schedule.ranks[pp_rank]
        )
        self.left = dict.fromkeys(facts.stages, count)
        last = 0 if schedule is None else schedule.stages - 1
        self.last_stage = last
        self.ends = {0, last} & set(facts.stages)
        self.blocks = {
            index: [moment.unit for moment in stage.forward if moment.unit >= 0]
            for index, stage in facts.stages.items()
        }
        states = {kind: int(ledger.memory[kind][0]) for kind in ("parameters", "optimizer")}
        self.constant = {**states, "batch": facts.batch_bytes, "buffers": facts.buffer_bytes}
        self.buckets = not self.sharded and self.replicas > 1
        if self.buckets:  # gradients live in the buckets, which stay
            own = int(ledger.memory["gradients"][0])
            wire = sum(unit.gradients for unit in self.units.values())
            self.constant["gradients"] = own
            casts = any(unit.gradients != unit.sharded_gradients for unit in self.units.values())
            self.constant["communication"] = wire if casts else 0
        self.gathered: dict[Unit, int] = {}
        self.arriving_units: dict[Unit, int] = {}
        """Flat buffers of gathers whose parameters are not copied out yet."""
        self.last_gather = 0
        """The flat buffer of the last gather of a forward, which stays until the next one."""
        self.order: list[int] = []
        """Units by the end of their forward."""
        self.whole: dict[Unit, int] = {}
        self.shards: dict[Unit, int] = {}
        self.partial: dict[Unit, int] = {}
        """Reduced over dp_shard, not yet over dp_replicate."""
        self.reduce_input = 0
        self.across = 0
        """Buffers that the sum over dp_replicate used, until the end of the backward."""
        self.flying: dict[tuple[int, int], Alive] = {}
        """What each micro-batch keeps between its computations."""
        self.now = Alive()
        self.expected = (
            {}
            if schedule is None
            else {
                source: list(row)
                for (source, to), row in messages(schedule).items()
                if to == pp_rank
            }
        )
        self.arriving: set[Message] = set()
        self.here: set[Message] = set()
        self.sending = 0
        self.phase = "forward"
        self.where = ""
        self.best = 0
        self.best_moment = ""
        self.best_kinds: dict[str, int] = {}
        self.phases: dict[str, int] = {}

    def look(
        self,
        moment: str,
        *,
        alive: Alive | None = None,
        buffers: int = 0,
        whole: int = 0,
        shards: int = 0,
    ) -> None:
        """Compare the bytes held now with the peak so far; `buffers`, `whole` and `shards` are held
        at this point only.
        """
        now = self.now if alive is None else alive
        others = self.flying.values()
        kinds = {
            **self.constant,
            "gathered_parameters": sum(self.gathered.values()),
            "gradients": self.constant.get("gradients", 0) + sum(self.shards.values()) + shards,
            "unsharded_gradients": (
                sum(self.whole.values()) + now.gradients + now.root_gradients + whole
            ),
            "communication": (
                self.constant.get("communication", 0)
                + sum(self.arriving_units.values())
                + sum(self.partial.values())
                + self.last_gather
                + self.reduce_input
                + self.across
                + buffers
            ),
            "activations": now.activations + sum(other.activations for other in others),
            "logits": now.logits + sum(other.logits for other in others),
            "temporaries": now.temporaries + sum(other.temporaries for other in others),
            "messages": (
                (len(self.arriving) + len([m for m in self.here if m.payload is Payload.GRADIENT]))
                * self.facts.boundary_bytes
                + self.sending
            ),
        }
        kinds["unsharded_gradients"] += sum(
            other.gradients + other.root_gradients for other in others
        )
        total = sum(kinds.values())
        self.phases[self.phase] = max(total, self.phases.get(self.phase, 0))
        if total > self.best:
            self.best = total
            self.best_moment = f"{moment}{self.where}"
            self.best_kinds = kinds

    def _name(self, moment: Moment) -> str:
        return (
            f"{moment.direction} of {self._unit(moment.unit)}"
            if moment.direction != "weights"
            else "gradients of weights"
        )

    def _unit(self, unit: Unit) -> str:
        names = {BESIDE: "what is outside of the blocks", HEAD: "the head", LOSS: "the loss"}
        if isinstance(unit, str):
            return unit
        return names[unit] if unit < 0 else self.names[unit]

    def peak(self) -> Peak:
        """The result."""
        kinds = {kind: self.best_kinds.get(kind, 0) for kind in PEAK_KINDS}
        return Peak(self.best, self.best_moment, kinds, dict(self.phases))

    def run(self, action: Action) -> None:
        """One computation."""
        stage = self.facts.stages[action.stage]
        self.where = f", micro-batch {action.microbatch}" if self.schedule is not None else ""
        if len(self.facts.stages) > 1:
            self.where += f" of stage {action.stage}"
        self.phase = "forward" if action.kind is Kind.FORWARD else "backward"
        if action.kind is Kind.FORWARD:
            self._forward(action, stage)
        elif action.kind is Kind.WEIGHT:
            self._weights(action, stage)
        else:
            self._backward(action, stage)

    def update(self) -> None:
        """The optimizer's step."""
        self.phase = "optimizer step"
        self.where = ""
        self.look("optimizer step", alive=Alive(temporaries=self.facts.optimizer_temporary_bytes))

    def _forward(self, action: Action, stage: StageMoments) -> None:
        shared = 0
        if action.stage > 0:
            shared = self._take(Message(Payload.ACTIVATION, action.stage - 1, action.microbatch))
        self.now = Alive()
        blocks = self.blocks[action.stage]
        self._gather(ROOT, forward=True)
        for name in self.embeddings:
            self._gather(name, forward=True)
        for moment in stage.forward:
            if moment.unit >= 0:
                self._gather(moment.unit, forward=True)
            elif moment.unit == HEAD:
                self._gather(self.head, forward=True)
            elif moment.unit == LOSS:
                self.last_gather = 0
            self._during(moment, blocks=blocks, shared=shared)
            if moment.unit >= 0:
                self.order.append(moment.unit)
            if self.zero == 3:
                # Embeddings run outside of the blocks, and the first such moment frees them.
                freed: Sequence[Unit] = (moment.unit,) if moment.unit >= 0 else self.embeddings
                for unit in freed:
                    self.gathered.pop(unit, None)
        self.order.append(ROOT)
        self.last_gather = 0
        self.flying[action.stage, action.microbatch] = self.now
        self.now = Alive()
        if action.stage < self.last_stage:
            self._send(Message(Payload.ACTIVATION, action.stage, action.microbatch))

    def _backward(self, action: Action, stage: StageMoments) -> None:
        if action.stage < self.last_stage:
            self._take(Message(Payload.GRADIENT, action.stage + 1, action.microbatch))
        before = self.flying.pop((action.stage, action.microbatch))
        self.now = before
        shared = stage.forward[-1].end.activations - before.activations
        splits = action.kind is Kind.INPUT
        # Where some backwards are split, the others reduce at their end too (`pipeline_zero`).
        late = self.schedule is not None and self.schedule.splits_backward
        reached_root = False
        blocks = self.blocks[action.stage]
        for moment in stage.inputs if splits else stage.backward:
            if moment.unit != LOSS and not reached_root:
                reached_root = True
                self._gather(ROOT, forward=False)
                self._prefetch(blocks[-1:])
            if moment.unit >= 0:
                self._gather(moment.unit, forward=False)
                self._prefetch(self._before(moment.unit, blocks))
            self._during(moment, blocks=blocks, shared=shared)
            if moment.unit >= 0 and not splits:
                self._gradients_made(moment.unit, self.now.gradients, action.stage, only_keep=late)
                self.now = replace(self.now, gradients=0)
            elif moment.unit == HEAD and self.head != ROOT:
                self._gradients_made(self.head, self.now.gradients, action.stage)
                self.now = replace(self.now, gradients=0)
        if late and not splits:
            self._gradients_made(ROOT, self.now.root_gradients, action.stage, only_keep=True)
            self.now = replace(self.now, root_gradients=0)
            for unit in blocks:
                self._gradients_made(unit, 0, action.stage)
        if splits:
            self.order.clear()
            self.flying[action.stage, action.microbatch] = self.now
        else:
            self._end_backward(action.stage)
        self.now = Alive()
        if action.stage > 0:
            self._send(Message(Payload.GRADIENT, action.stage, action.microbatch))

    def _weights(self, action: Action, stage: StageMoments) -> None:
        before = self.flying.pop((action.stage, action.microbatch))
        self.now = before
        shared = stage.inputs[-1].end.activations - before.activations
        blocks = self.blocks[action.stage]
        for moment in stage.weights:
            self._during(moment, blocks=blocks, shared=shared, halves=True)
        made = self.now.gradients
        self.now = Alive(root_gradients=self.now.root_gradients)
        whole = sum(self.units[unit].gradients for unit in blocks) or 1
        shares = {unit: made * self.units[unit].gradients // whole for unit in blocks}
        for unit in blocks:
            shares_left = sum(shares[other] for other in blocks if other > unit)
            self.now = replace(self.now, gradients=shares[unit] + shares_left)
            self._gradients_made(unit, shares[unit], action.stage)
        self.now = replace(self.now, gradients=0)
        self._end_backward(action.stage)

    def _during(
        self, moment: Moment, *, blocks: Sequence[int], shared: int, halves: bool = False
    ) -> None:
        """A stretch of computation. `shared` bytes of its activations belong to the stage before,
        on this rank.
        """
        # the second half of a backward keeps the gradients of all blocks
        unit = moment.unit if not halves else blocks[0]
        owner: Unit = self.head if unit in (HEAD, LOSS) else unit
        gone = self._adds(owner) or self.buckets
        root_gone = (
            self._adds(ROOT) or any(self._adds(name) for name in self.embeddings) or self.buckets
        )
        looked = [moment.peak] if gone else [moment.peak_with_gradients]
        if not gone and root_gone:
            looked = [moment.peak, replace(moment.peak_with_gradients, root_gradients=0)]
        for alive in looked:
            self.look(self._name(moment), alive=_less(alive, shared))
        end = moment.end
        if gone:
            end = replace(end, gradients=0, root_gradients=0)
        elif root_gone:
            end = replace(end, root_gradients=0)
        self.now = _less(end, shared)

    def _gather(self, unit: Unit, *, forward: bool) -> None:
        """Gather a unit, or take what was gathered ahead."""
        if not self.sharded or unit in self.gathered:
            return
        self._prefetch([unit])
        bytes_ = self.units[unit]
        if forward:
            self.last_gather = 0
        self.gathered[unit] = bytes_.gathered
        self.look(
            f"gather of {self._unit(unit)}", buffers=bytes_.last_parameter if self.ranks == 1 else 0
        )
        flat = self.arriving_units.pop(unit, 0)
        if forward:
            self.last_gather = flat

    def _prefetch(self, units: Sequence[Unit]) -> None:
        """Begin to gather."""
        for unit in units:
            if (
                not self.sharded
                or self.ranks == 1
                or unit in self.gathered
                or unit in self.arriving_units
            ):
                continue
            self.arriving_units[unit] = self.units[unit].gathered
            self.look(f"gather of {self._unit(unit)}", buffers=self.units[unit].cast_shards)

    def _before(self, unit: int, blocks: Sequence[int]) -> Sequence[int]:
        """What is gathered ahead when the backward of a block begins: the block whose forward came
        before, as long as no other backward has ended since, which makes torch forget the order.
        """
        if unit == blocks[0] or unit not in self.order:
            return ()
        at = len(self.order) - 1 - self.order[::-1].index(unit)
        return self.order[at - 1 : at]

    def _end_backward(self, stage: int) -> None:
        """Reduce the root unit and then the embeddings, and free the flat buffers."""
        remaining = self.now.root_gradients
        of_embeddings: dict[Unit, int] = {
            name: min(self.units[name].made_gradients, remaining) for name in self.embeddings
        }
        of_units: dict[Unit, int] = {
            ROOT: max(0, remaining - sum(of_embeddings.values())),
            **of_embeddings,
        }
        for unit, gradients in of_units.items():
            self._gradients_made(unit, gradients, stage)
            remaining -= gradients
            self.now = replace(self.now, root_gradients=remaining)
        self.now = replace(self.now, root_gradients=0)
        self.reduce_input = self.across = 0
        self.order.clear()
        self.left[stage] -= 1

    def _gradients_made(
        self, unit: Unit, made: int, stage: int, *, only_keep: bool = False
    ) -> None:
        """The end of a unit's backward; `made` bytes of new gradients are part of `self.now`.
        `only_keep` them, to be reduced later.
        """
        bytes_ = self.units[unit]
        if self.buckets:
            return
        if not self.sharded:  # one process: gradients stay where they are made
            if made or unit in self.shards:
                self.shards[unit] = bytes_.sharded_gradients
            return
        reduces, ends, frees = (False, False, False) if only_keep else self._rule(unit, stage)
        if not reduces:
            if frees:
                self.gathered.pop(unit, None)
            if made or unit in self.whole:
                if bytes_.casts_gradients and unit not in self.whole:
                    self.look(
                        f"cast of gradients of {self._unit(unit)}",
                        whole=bytes_.gradients - made + bytes_.last_parameter,
                    )
                self.whole[unit] = bytes_.gradients
            return
        if unit in self.whole:
            made = 0
        elif not made:
            return
        if frees:
            self.gathered.pop(unit, None)
        self.reduce_input = 0
        self.look(f"reduction of {self._unit(unit)}", buffers=bytes_.reduce_input)
        self.whole.pop(unit, None)
        self.reduce_input = bytes_.reduce_input
        field = "root_gradients" if unit == ROOT or unit in self.embeddings else "gradients"
        freed = min(made, getattr(self.now, field))
        self.now = replace(self.now, **{field: getattr(self.now, field) - freed})
        casts = bytes_.reduce_output != bytes_.sharded_gradients
        self.look(
            f"reduction of {self._unit(unit)}",
            # On one rank torch divides into a buffer of its own, and copies.
            buffers=bytes_.reduce_output
            + (bytes_.reduce_input if self.ranks == 1 or self.facts.exchanges_reductions else 0),
            shards=bytes_.sharded_gradients if casts else 0,
        )
        if self.replicas > 1:
            if not ends:
                self.partial[unit] = bytes_.reduce_output
                return
            self.partial.pop(unit, None)
            self.across += bytes_.reduce_output if casts else 0
        self.shards[unit] = bytes_.sharded_gradients

    def _adds(self, unit: Unit) -> bool:
        """Return whether the unit has an unsharded gradient to which a new one is added
        immediately.
        """
        return unit in self.whole and not self.units[unit].casts_gradients

    def _rule(self, unit: Unit, stage: int) -> AfterBackward:
        if unit == ROOT:
            return of_root(self.zero, self.left, ran=stage, users=self.ends)
        return of_block(self.zero, self.left, ran=stage, own=stage)

    def _take(self, message: Message) -> int:
        """Receive, as `runtime` does: in the order of the other rank, one ahead. Returns the bytes
        that another stage of this rank holds too.
        """
        assert self.schedule is not None
        if message in self.here:
            self.here.remove(message)
            return self.facts.boundary_bytes if message.payload is Payload.ACTIVATION else 0
        waiting = self.expected[self.schedule.stage_ranks[message.stage]]
        while message not in self.arriving:
            self.arriving.add(waiting.pop(0))
        self.arriving.remove(message)
        if waiting:
            self.arriving.add(waiting.pop(0))
        return 0

    def _send(self, message: Message) -> None:
        assert self.schedule is not None
        if destination(self.schedule, message) is None:
            self.here.add(message)
        else:  # an activation is kept for the backward anyway
            self.sending = self.facts.boundary_bytes if message.payload is Payload.GRADIENT else 0


def _without_pipeline(count: int) -> tuple[Action, ...]:
    """Forward and backward in turn."""
    return tuple(
        Action(0, kind, index) for index in range(count) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )


def _less(alive: Alive, shared: int) -> Alive:
    return replace(alive, activations=alive.activations - shared)
