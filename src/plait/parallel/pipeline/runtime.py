"""Runs a schedule's table on this rank: forwards, backwards and the messages between stages, for
training steps and for evaluations.

torch's own runtime is not used, because it fixes the shapes of a run, cuts batches into equal
parts, and keeps a stage's parameters and gradients unsharded between micro-batches at every ZeRO
stage. This one executes the same tables. Every rank of the pipeline must be given the same
micro-batches; shapes may differ between them and between steps. What passes between two stages is
described to the next one once for every new shape of a batch, and with every micro-batch where it
may follow from the batch's values, or from tokens in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from plait._torch.dtensor import local_tensor
from plait._torch.operators import tree_leaves, tree_map
from plait._torch.passes import expect_backward
from plait.comm.messages import Arriving, Messenger
from plait.errors import InputError, ModelError
from plait.model.unavailable import without
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.pipeline.boundary import (
    Boundary,
    EarlierStageFailed,
    Signature,
    assembled,
    has_cache,
    signature,
    slot,
)
from plait.parallel.pipeline.cut_check import CutCheck, CutResult, LossFunction
from plait.parallel.pipeline.split_backward import Deferred, backward_inputs, backward_weights
from plait.parallel.pipeline.stage import Stage, StagedModel
from plait.parallel.pipeline.stage_cache import for_stage
from plait.parallel.schedules.actions import Action, Kind, Message, Payload
from plait.parallel.schedules.schedule import Schedule, destination, messages

Forward = Callable[[torch.nn.Module, Any], Any]
"""(model, micro-batch) -> output."""
Loss = Callable[[Any, Any], torch.Tensor]
"""(output, micro-batch) -> what backward starts from, a 0-dimensional tensor."""


class _Entering(torch.autograd.Function):
    """Alias of a received tensor that the stage may change in place, like any activation.

    The received tensor itself is a leaf that requires a gradient, which torch does not allow to be
    changed in place.
    """

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@dataclass
class _Held:
    """What a stage keeps of a micro-batch from its forward to the end of its backward."""

    inputs: list[torch.Tensor]
    """Those that a gradient is sent back for."""
    outputs: list[torch.Tensor]
    """Those with a gradient; the loss on the last stage."""
    deferred: Deferred | None = None


@dataclass
class Runtime:
    """The pipeline of one rank. `observers` are called before (False) and after (True) every
    computation, `listeners` with what is sent to another stage.
    """

    schedule: Schedule
    staged: StagedModel
    messenger: Messenger
    check: CutCheck | None
    """Asked about every kind of batch before it is used; None for a rank that runs alone."""
    observers: list[Callable[[Action, bool], None]] = field(default_factory=list)
    listeners: list[Callable[[Message, Sequence[torch.Tensor]], None]] = field(default_factory=list)
    statistics: RouterStatistics | None = None
    """What is sent with the activations, where a loss is made of what all stages' routers chose."""
    _boundaries: dict[tuple[int, Signature], Boundary] = field(default_factory=dict, init=False)
    _trusted: set[tuple[int, Signature]] = field(default_factory=set, init=False)
    _is_running: bool = field(default=False, init=False)

    def refuse_within(self, call: str) -> None:
        """Raise InputError for a call from inside of `train` or `evaluate`, which the other stages
        cannot answer.
        """
        if self._is_running:
            raise InputError(
                f"{call} was called while the pipeline runs (by a loss, a forward or a hook), and"
                " its other stages are at other micro-batches; call it between two steps"
            )

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.refuse_within("a forward through all stages")
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def announce_output(self, stage: int, piece: Any, output: Any) -> None:
        """Set the boundary activations of `stage` for a micro-batch like `piece`, so that they are
        not requested: for a rank that runs alone.
        """
        tensors: list[torch.Tensor] = []
        if self.statistics is not None:
            output = self.statistics.like(output)
        structure = tree_map(lambda leaf: slot(leaf, tensors), output)
        length = self.staged.region.length if self.staged.region is not None else 0
        told = tuple((tensor.shape, tensor.dtype, True) for tensor in tensors)
        self.check = None
        self._boundaries[stage, signature(piece)] = Boundary(structure, told, length)
        self._trusted.add((stage + 1, signature(piece)))

    def train(
        self,
        pieces: Sequence[Any],
        *,
        forward: Forward,
        loss: Loss,
        loss_fn: LossFunction | None = None,
    ) -> None:
        """All forwards and backwards of a step. Gradients accumulate in the parameters. Collective
        over the pipeline.

        `loss_fn` is what `loss` computes with, to be checked without weights. Raises ModelError, on
        every rank, for what the cut model would not compute right.
        """
        if len(pieces) != self.schedule.microbatches:
            raise InputError(
                f"a step of this pipeline has {self.schedule.microbatches} micro-batches, not"
                f" {len(pieces)}"
            )
        with self._running():
            _Pass(
                self, self.schedule, pieces, forward, loss, self._results(pieces, forward, loss_fn)
            ).run()

    def _results(
        self, pieces: Sequence[Any], forward: Forward, loss_fn: LossFunction | None
    ) -> list[CutResult]:
        if self.check is None:
            return [CutResult({}, False)] * len(pieces)
        training = self.staged.model.training
        self.check.follow_settings()
        return [
            self.check.result(piece, forward=forward, loss=loss_fn, training=training)
            for piece in pieces
        ]

    @torch.no_grad()
    def evaluate(self, piece: Any, *, forward: Forward, passes_on: bool = False) -> Any:
        """The model's output for one micro-batch on the rank of the last stage, None on the others.
        Collective over the pipeline.

        Entries of it that follow from values of earlier stages are unavailable: their use is an
        error. `passes_on`: after a stage that fails, the next ones do not wait; they get zeros, or
        raise EarlierStageFailed, and the caller tells all of them.
        """
        ranks = tuple(
            tuple(Action(s, Kind.FORWARD, 0) for s in self.schedule.stages_of(r))
            for r in range(self.schedule.pp)
        )
        once = Schedule("forward", self.schedule.pp, 1, self.schedule.stage_ranks, ranks)
        found: list[Any] = [None]

        def keep(output: Any, _: Any) -> torch.Tensor:
            found[0] = output
            return next(
                (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)),
                torch.zeros(()),
            )

        with self._running():
            _Pass(
                self,
                once,
                [piece],
                forward,
                keep,
                self._results([piece], forward, None),
                passes_on=passes_on,
            ).run()
        return found[0]


class _Pass:
    """One execution of a table."""

    def __init__(
        self,
        runtime: Runtime,
        schedule: Schedule,
        pieces: Sequence[Any],
        forward: Forward,
        loss: Loss,
        cut_results: Sequence[CutResult],
        *,
        passes_on: bool = False,
    ) -> None:
        self.runtime = runtime
        self.schedule = schedule
        self.pieces = pieces
        self.forward = forward
        self.loss = loss
        self.cut_results = cut_results
        self.rank = runtime.messenger.rank
        self.signatures = [signature(piece) for piece in pieces]
        self.cached = [has_cache(piece) for piece in pieces]
        self.described: dict[tuple[int, int], Boundary] = {}
        """Of micro-batches whose shapes follow from more than their own: the boundary activations
        of a stage.
        """
        self.passes_on = passes_on
        self.failed: Exception | None = None
        """Of the first stage here that failed, where others do not wait for it."""
        self.sent: set[Message] = set()
        self.held: dict[tuple[int, int], _Held] = {}
        self.here: dict[Message, tuple[torch.Tensor, ...]] = {}
        """Passed by another stage of this rank."""
        self.arriving: dict[Message, Arriving] = {}
        self.expected = {
            source: list(row) for (source, to), row in messages(schedule).items() if to == self.rank
        }

    def run(self) -> None:
        for action in self.schedule.ranks[self.rank]:
            for observe in self.runtime.observers:
                observe(action, False)
            match action.kind:
                case Kind.FORWARD if self.passes_on:
                    self._forward_or_pass_on(action)
                case Kind.FORWARD:
                    self._forward(action)
                case Kind.BACKWARD | Kind.INPUT:
                    self._backward(action)
                case Kind.WEIGHT:
                    self._weights(action)
            for observe in self.runtime.observers:
                observe(action, True)
        self.runtime.messenger.finish()
        if self.failed is not None:
            raise self.failed

    def _forward(self, action: Action) -> None:
        stage = self.runtime.staged.stages[action.stage]
        piece = for_stage(self.pieces[action.microbatch], action.stage)
        received = []
        boundary = None
        if not stage.first:
            received = list(
                self._take(Message(Payload.ACTIVATION, action.stage - 1, action.microbatch))
            )
            boundary = self._boundary(action.stage - 1, action.microbatch)
            assert boundary is not None
            for tensor, (_, _, needs) in zip(received, boundary.tensors, strict=True):
                tensor.requires_grad_(needs)
        entering = [
            _Entering.apply(tensor) if tensor.requires_grad else tensor for tensor in received
        ]
        statistics = self.runtime.statistics
        before = assembled(boundary, entering) if boundary is not None else None
        if statistics is not None:
            before = statistics.begin(stage.first, before)
        output = self.runtime.staged.run(
            stage,
            lambda model: self.forward(model, piece),
            before,
            length=boundary.length if boundary is not None else 0,
        )
        if stage.last:
            output = without(output, self.cut_results[action.microbatch].missing)
            loss = self.loss(output, piece)
            # Where torch has found every tensor of the output, it makes the root ready once the
            # loss's own backward is done.
            outputs = [
                expect_backward(self.runtime.staged.model, loss) if _is_opaque(output) else loss
            ]
        else:
            outputs = self._hand_on(
                action, output if statistics is None else statistics.end(output)
            )
        known = outputs if stage.last or statistics is None else outputs[: -statistics.tensors]
        self._check_known(stage, action.microbatch, received, known, output if stage.last else None)
        if torch.is_grad_enabled():
            kept = [tensor for tensor in outputs if tensor.requires_grad]
            self.held[action.stage, action.microbatch] = _Held(
                [tensor for tensor in received if tensor.requires_grad], kept
            )

    def _forward_or_pass_on(self, action: Action) -> None:
        """A forward, or, where that or an earlier one here fails, what lets the next stage go
        on.
        """
        if self.failed is None:
            try:
                self._forward(action)
                return
            except Exception as error:  # whatever it is, the next stage waits
                self.failed = error
        elif action.stage > 0:
            with suppress(EarlierStageFailed):
                self._take(Message(Payload.ACTIVATION, action.stage - 1, action.microbatch))
        message = Message(Payload.ACTIVATION, action.stage, action.microbatch)
        if action.stage == self.schedule.stages - 1 or message in self.sent:
            return
        boundary = self._boundary(action.stage, action.microbatch)
        to = destination(self.schedule, message)
        if boundary is not None:
            device = self.runtime.messenger.device
            self._send(
                message,
                [
                    torch.zeros(shape, dtype=dtype, device=device)
                    for shape, dtype, _ in boundary.tensors
                ],
            )
        elif to is not None:
            self.runtime.messenger.send_object(None, to=to)
        else:
            self.here[message] = ()

    def _backward(self, action: Action) -> None:
        held = self.held[action.stage, action.microbatch]
        gradients = None
        if action.stage < self.schedule.stages - 1:
            gradients = self._take(Message(Payload.GRADIENT, action.stage + 1, action.microbatch))
        if action.kind is Kind.INPUT:
            held.deferred = backward_inputs(held.outputs, gradients, held.inputs)
        else:
            del self.held[action.stage, action.microbatch]
            if held.outputs:
                torch.autograd.backward(held.outputs, gradients)
        if action.stage > 0:
            back = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in held.inputs
            ]
            for tensor in held.inputs:
                tensor.grad = None
            self._send(Message(Payload.GRADIENT, action.stage, action.microbatch), back)

    def _weights(self, action: Action) -> None:
        deferred = self.held.pop((action.stage, action.microbatch)).deferred
        assert deferred is not None
        backward_weights(deferred)

    def _check_known(
        self,
        stage: Stage,
        microbatch: int,
        received: list[torch.Tensor],
        outputs: list[torch.Tensor],
        whole: Any,
    ) -> None:
        """Once for every kind of micro-batch: what is not known on this stage did not come through.
        `whole`: the output that a loss is of; a loss that alone is not a number is one without
        targets.
        """
        key = (stage.index, self.signatures[microbatch])
        if stage.first or key in self.runtime._trusted:
            return
        self.runtime._trusted.add(key)
        floating = [
            tensor.detach() for tensor in outputs if tensor.is_floating_point() and tensor.numel()
        ]
        if not floating or not all(bool(torch.isnan(t).all()) for t in floating):
            return
        leaves = [
            leaf
            for leaf in tree_leaves(whole)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim()
        ]
        if leaves and not any(
            bool(torch.isnan(local_tensor(leaf.detach())).any()) for leaf in leaves
        ):
            return
        if all(bool(torch.isfinite(t.detach()).all()) for t in received):
            raise ModelError(
                f"parallel.pp: on stage {stage.index} the model uses a value that is computed"
                f" before {stage.blocks[0]} and does not pass through the chain of blocks (a skip"
                " connection, or an embedding read again), so it cannot be cut, or no target of"
                " the micro-batch counts in its loss (labels that are all -100); use parallel.pp ="
                " 1, or leave such samples out"
            )

    def _boundary(self, stage: int, microbatch: int) -> Boundary | None:
        """The boundary activations of `stage` for a micro-batch, where both sides know them."""
        known = self.runtime._boundaries.get((stage, self.signatures[microbatch]))
        # Beside hidden states, blocks may return attention's weights (GPT-Neo), biases of positions
        # or the like, as long as the cache.
        grows = self.cached[microbatch] and known is not None and len(known.tensors) > 1
        return (
            self.described.get((stage, microbatch))
            if grows or self.cut_results[microbatch].values
            else known
        )

    def _agree(self, stage: int, microbatch: int, boundary: Boundary) -> None:
        self.described[stage, microbatch] = boundary
        if not self.cut_results[microbatch].values:
            self.runtime._boundaries.setdefault((stage, self.signatures[microbatch]), boundary)

    def _hand_on(self, action: Action, output: Any) -> list[torch.Tensor]:
        """Give a block's output to the next stage; returns its tensors."""
        tensors: list[torch.Tensor] = []
        structure = tree_map(lambda leaf: slot(leaf, tensors), output)
        message = Message(Payload.ACTIVATION, action.stage, action.microbatch)
        to = destination(self.schedule, message)
        region = self.runtime.staged.region
        boundary = Boundary(
            structure,
            tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
            region.length if region is not None else 0,
        )
        agreed = self._boundary(action.stage, action.microbatch)
        if agreed is None:
            self._agree(action.stage, action.microbatch, boundary)
            if to is not None:
                self.runtime.messenger.send_object(boundary, to=to)
        elif not agreed.allows(boundary):
            raise ModelError(
                f"parallel.pp: stage {action.stage} sent {agreed.summary()} for a batch of these"
                f" shapes before, and now {boundary.summary()}: what the model passes between"
                " blocks follows from more than the batch's shapes and from what it looks at"
                " outside of its blocks; pad every batch to one length, or use parallel.pp = 1"
            )
        self._send(message, tensors)
        return tensors

    def _send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        self.sent.add(message)
        for listen in self.runtime.listeners:
            listen(message, tensors)
        to = destination(self.schedule, message)
        if to is None:
            self.here[message] = tuple(tensor.detach() for tensor in tensors)
        else:
            self.runtime.messenger.send(tensors, to=to)

    def _take(self, message: Message) -> tuple[torch.Tensor, ...]:
        """The tensors of a message to this rank. Receives are begun in the order in which the other
        rank sends.
        """
        if message in self.here:
            return self.here.pop(message)
        source = self.schedule.stage_ranks[message.stage]
        while message not in self.arriving:
            self._begin(source, may_wait=True)
        tensors = self.arriving.pop(message).wait()
        self._begin(source, may_wait=False)  # the next one is received while this one is used
        return tensors

    def _begin(self, source: int, *, may_wait: bool) -> None:
        """Begin to receive the next message of a rank. What is not known yet (its shapes) is waited
        for only if it may be.
        """
        waiting = self.expected[source]
        if not waiting:
            return
        message = waiting[0]
        if message.payload is Payload.ACTIVATION:
            boundary = self._boundary(message.stage, message.microbatch)
            if boundary is None:
                if not may_wait:
                    return
                boundary = self.runtime.messenger.receive_object(source=source)
                if boundary is None:
                    waiting.pop(0)
                    raise EarlierStageFailed(
                        "parallel.pp: an earlier stage failed, which tells its error"
                    )
                self._agree(message.stage, message.microbatch, boundary)
            like = [(shape, dtype) for shape, dtype, _ in boundary.tensors]
        else:
            boundary = self._boundary(message.stage - 1, message.microbatch)
            if boundary is None:
                assert not may_wait, f"{message} before this rank's own forward"
                return
            like = boundary.differentiable
        waiting.pop(0)
        self.arriving[message] = self.runtime.messenger.receive(like, source=source)


def _is_opaque(output: Any) -> bool:
    """Whether something in a model's output is of a class into which torch does not look."""
    return any(
        not isinstance(leaf, torch.Tensor | int | float | str | None)
        for leaf in tree_leaves(output)
    )
