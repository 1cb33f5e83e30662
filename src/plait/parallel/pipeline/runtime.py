"""Execution of a schedule's table on one pipeline rank, for training steps and for evaluations.

torch's own runtime is not used, because it fixes the shapes of a run, divides batches into equal
parts, and keeps a stage's parameters and gradients unsharded between micro-batches at every ZeRO
stage. This runtime executes the same tables.

Note [Shapes between stages]
    Every rank of the pipeline receives the same micro-batches. Shapes may differ between them and
    between steps. A stage describes what it sends (`Boundary`) once for every signature of a
    micro-batch, so that later receives start without a message about shapes. If the shapes may
    depend on the values of a batch, or on the tokens in a cache, the stage sends a description with
    every micro-batch.

    Receives from a rank are started in the order in which that rank sends. Both ranks know this
    order from the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from plait._torch.operators import tree_leaves, tree_map
from plait._torch.passes import expect_backward
from plait._torch.tensors import local_tensor
from plait.comm.messages import Messenger, PendingReceive
from plait.errors import InputError, ModelError
from plait.model.stages import with_unavailable_entries
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.micro_batches import Forward, tensors_in
from plait.parallel.pipeline.cut_check import CutCheck, CutResult, LossFunction
from plait.parallel.pipeline.split_backward import (
    DeferredBackward,
    backward_inputs,
    backward_weights,
)
from plait.parallel.pipeline.stage import Stage, StageCaches, StagedModel, for_stage
from plait.parallel.schedules.schedule import (
    Action,
    Kind,
    Message,
    Payload,
    Schedule,
    destination,
    messages,
)
from plait.sizes import dtype_name

Signature = tuple[Any, ...]
"""Grad mode, and shapes and dtypes of a micro-batch, which decide the shapes between stages."""
Loss = Callable[[Any, Any], torch.Tensor]
"""Function of (output, micro-batch) that returns the 0-dimensional tensor to differentiate."""
MASK = "attention_mask"
"""Name of the attention mask in a micro-batch."""


@dataclass
class Runtime:
    """Executor of a pipeline schedule on one rank.

    Attributes:
        schedule: Table of the computations of all ranks.
        staged: Stages of this rank.
        messenger: Sends and receives between pipeline ranks.
        check: Checks every kind of batch before it is used. None if this rank runs without the
            others.
        observers: Called before (False) and after (True) every computation.
        listeners: Called with everything that is sent to another stage.
        statistics: Router statistics that are sent with the activations, if a loss depends on the
            routers of all stages.
    """

    schedule: Schedule
    staged: StagedModel
    messenger: Messenger
    check: CutCheck | None
    observers: list[Callable[[Action, bool], None]] = field(default_factory=list)
    listeners: list[Callable[[Message, Sequence[torch.Tensor]], None]] = field(default_factory=list)
    statistics: RouterStatistics | None = None
    _boundaries: dict[tuple[int, Signature], Boundary] = field(default_factory=dict, init=False)
    _trusted: set[tuple[int, Signature]] = field(default_factory=set, init=False)
    """Stages and signatures that `_ScheduleRun._check_known` has checked."""
    _is_running: bool = field(default=False, init=False)

    def refuse_within(self, call: str) -> None:
        """Raise InputError for a collective call from inside `train` or `evaluate`.

        The other stages would not take part in it.
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

    def announce_output(self, stage: int, batch: Any, output: Any) -> None:
        """Set the boundary of a stage for micro-batches like `batch`.

        This is for a rank that runs alone and receives no descriptions from other ranks.
        """
        if self.statistics is not None:
            output = self.statistics.like(output)
        structure, tensors = flatten_output(output)
        described = tuple((tensor.shape, tensor.dtype, True) for tensor in tensors)
        self.check = None
        self._boundaries[stage, signature(batch)] = Boundary(
            structure, described, self.staged.sequence_length
        )
        self._trusted.add((stage + 1, signature(batch)))

    def train(
        self,
        batches: Sequence[Any],
        *,
        forward: Forward,
        loss: Loss,
        loss_fn: LossFunction | None = None,
    ) -> None:
        """Run all forwards and backwards of a step. Collective over the pipeline.

        Gradients accumulate in the parameters.

        Args:
            batches: The micro-batches of the step, the same on all pipeline ranks.
            forward: Calls the model.
            loss: Returns the loss of an output, from which the backward starts.
            loss_fn: Loss function that `loss` calls. It is checked on a copy without weights.

        Raises:
            InputError: The number of micro-batches is not that of the schedule.
            ModelError: The stages would compute something else than the complete model. Every rank
                raises it.
        """
        if len(batches) != self.schedule.microbatches:
            raise InputError(
                f"a step of this pipeline has {self.schedule.microbatches} micro-batches"
                f" (gradient_accumulation_steps), not {len(batches)}; pass all of them at once"
            )
        with self._running():
            results = self._check_batches(batches, forward, loss_fn)
            _ScheduleRun(self, self.schedule, batches, forward, loss, results).run()

    def _check_batches(
        self, batches: Sequence[Any], forward: Forward, loss_fn: LossFunction | None
    ) -> list[CutResult]:
        if self.check is None:
            return [CutResult({}, False)] * len(batches)
        training = self.staged.model.training
        self.check.follow_settings()
        return [
            self.check.result(batch, forward=forward, loss=loss_fn, training=training)
            for batch in batches
        ]

    @torch.no_grad()
    def evaluate(self, batch: Any, *, forward: Forward, continue_on_error: bool = False) -> Any:
        """Run one forward through all stages. Collective over the pipeline.

        Args:
            batch: The micro-batch, the same on all pipeline ranks.
            forward: Calls the model.
            continue_on_error: Whether later stages continue if a stage fails. They receive zeros,
                or raise EarlierStageFailed, and the caller informs all ranks of the error.

        Returns:
            The model's output on the rank of the last stage, None on the others. Entries that
            depend on values of earlier stages are unavailable: their use is an error.
        """
        rows = [
            tuple(Action(stage, Kind.FORWARD, 0) for stage in self.schedule.stages_of(rank))
            for rank in range(self.schedule.pp)
        ]
        stage_ranks = self.schedule.stage_ranks
        forward_only = Schedule("forward", self.schedule.pp, 1, stage_ranks, tuple(rows))
        model_output: Any = None

        def record_output(output: Any, _: Any) -> torch.Tensor:
            nonlocal model_output
            model_output = output
            # A run expects a loss. Nothing is differentiated, so any tensor will do.
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    return leaf
            return torch.zeros(())

        with self._running():
            results = self._check_batches([batch], forward, None)
            _ScheduleRun(
                self,
                forward_only,
                [batch],
                forward,
                record_output,
                results,
                continue_on_error=continue_on_error,
            ).run()
        return model_output


class _ScheduleRun:
    """Single execution of a schedule's table. See Note [Shapes between stages].

    Attributes:
        signatures: Signature of each micro-batch.
        cached: Whether each micro-batch contains KV caches.
        activations: Tensors for a later backward, by stage and micro-batch.
        local_messages: Messages from one stage of this rank to another.
        arriving: Messages whose receive has started.
        expected: Messages to receive, by source rank, in the order in which that rank sends them.
        sent: Messages that were sent.
        described: Boundaries that hold for one stage and micro-batch only.
        failed: Error of the first stage of this rank that failed, if `continue_on_error` is set.
    """

    def __init__(
        self,
        runtime: Runtime,
        schedule: Schedule,
        batches: Sequence[Any],
        forward: Forward,
        loss: Loss,
        cut_results: Sequence[CutResult],
        *,
        continue_on_error: bool = False,
    ) -> None:
        self.runtime = runtime
        self.schedule = schedule
        self.batches = batches
        self.forward = forward
        self.loss = loss
        self.cut_results = cut_results
        self.continue_on_error = continue_on_error
        self.rank = runtime.messenger.rank
        self.signatures = [signature(batch) for batch in batches]
        self.cached = [has_cache(batch) for batch in batches]
        self.activations: dict[tuple[int, int], _StageActivations] = {}
        self.local_messages: dict[Message, tuple[torch.Tensor, ...]] = {}
        self.arriving: dict[Message, PendingReceive] = {}
        self.expected = {
            source: list(row) for (source, to), row in messages(schedule).items() if to == self.rank
        }
        self.sent: set[Message] = set()
        self.described: dict[tuple[int, int], Boundary] = {}
        self.failed: Exception | None = None

    def run(self) -> None:
        for action in self.schedule.ranks[self.rank]:
            for observe in self.runtime.observers:
                observe(action, False)
            match action.kind:
                case Kind.FORWARD if self.continue_on_error:
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
        statistics = self.runtime.statistics
        batch = for_stage(self.batches[action.microbatch], action.stage)
        received: list[torch.Tensor] = []
        stage_input = None
        length = 0
        if not stage.first:
            received, boundary = self._receive_activations(action)
            length = boundary.length
            aliases = [
                _ReceivedActivation.apply(tensor) if tensor.requires_grad else tensor
                for tensor in received
            ]
            stage_input = unflatten_output(boundary, aliases)
        if statistics is not None:
            stage_input = statistics.begin(stage.first, stage_input)

        output = self.runtime.staged.run(
            stage, lambda model: self.forward(model, batch), stage_input, length=length
        )
        if stage.last:
            output = with_unavailable_entries(output, self.cut_results[action.microbatch].missing)
            loss = self.loss(output, batch)
            if _has_opaque_leaf(output):
                # torch makes the sharded root ready for the backward of the tensors that it finds
                # in the output. Here it cannot find all of them, so the loss does it.
                loss = expect_backward(self.runtime.staged.model, loss)
            outputs = [loss]
            self._check_known(stage, action.microbatch, received, outputs, output)
        else:
            known_count = None
            if statistics is not None:
                output = statistics.end(output)
                # Their token counts are never NaN, and would hide that everything else is.
                known_count = -statistics.tensors
            outputs = self._send_activations(action, output)
            self._check_known(stage, action.microbatch, received, outputs[:known_count], None)

        if torch.is_grad_enabled():
            self.activations[action.stage, action.microbatch] = _StageActivations(
                inputs=_differentiable(received), outputs=_differentiable(outputs)
            )

    def _receive_activations(self, action: Action) -> tuple[list[torch.Tensor], Boundary]:
        """Return (tensors, description) as received from the previous stage. Tensors are leaves."""
        message = Message(Payload.ACTIVATION, action.stage - 1, action.microbatch)
        received = list(self._take(message))
        boundary = self._boundary(action.stage - 1, action.microbatch)
        assert boundary is not None
        for tensor, (_, _, needs_gradient) in zip(received, boundary.tensors, strict=True):
            tensor.requires_grad_(needs_gradient)
        return received, boundary

    def _forward_or_pass_on(self, action: Action) -> None:
        """Run a forward. After an error on this rank, send a placeholder to the next stage.

        Without the placeholder the next stage would wait forever for its input.
        """
        if self.failed is None:
            try:
                self._forward(action)
                return
            except Exception as error:
                # Whatever it is, the next stage waits.
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
            zeros = [
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype, _ in boundary.tensors
            ]
            self._send(message, zeros)
        elif to is not None:
            # None instead of a description tells the next stage that this one failed.
            self.runtime.messenger.send_object(None, to=to)
        else:
            self.local_messages[message] = ()

    def _backward(self, action: Action) -> None:
        """Run a backward, or the first half of one, and send the gradients of the inputs."""
        activations = self.activations[action.stage, action.microbatch]
        gradients = None
        if action.stage < self.schedule.stages - 1:
            gradients = self._take(Message(Payload.GRADIENT, action.stage + 1, action.microbatch))
        if action.kind is Kind.INPUT:
            activations.deferred = backward_inputs(
                activations.outputs, gradients, activations.inputs
            )
        else:
            del self.activations[action.stage, action.microbatch]
            if activations.outputs:
                torch.autograd.backward(activations.outputs, gradients)

        if action.stage > 0:
            input_gradients = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in activations.inputs
            ]
            # The second half of a split backward may be far away.
            for tensor in activations.inputs:
                tensor.grad = None
            message = Message(Payload.GRADIENT, action.stage, action.microbatch)
            self._send(message, input_gradients)

    def _weights(self, action: Action) -> None:
        """Run the second half of a backward."""
        deferred = self.activations.pop((action.stage, action.microbatch)).deferred
        assert deferred is not None
        backward_weights(deferred)

    def _check_known(
        self,
        stage: Stage,
        microbatch: int,
        received: list[torch.Tensor],
        outputs: list[torch.Tensor],
        model_output: Any,
    ) -> None:
        """Raise ModelError if an unavailable value has reached this stage's outputs as NaN.

        Values of earlier stages that are not sent are NaN here. The check runs once per stage and
        signature of a batch, because it waits for the device.

        Args:
            stage: The stage.
            microbatch: Number of the micro-batch.
            received: Tensors from the previous stage.
            outputs: Tensors for the next stage; on the last stage the loss.
            model_output: Output from which the last stage computed the loss. If only the loss is
                NaN, the batch may have no targets, which is not an error.
        """
        key = (stage.index, self.signatures[microbatch])
        if stage.first or key in self.runtime._trusted:
            return
        self.runtime._trusted.add(key)
        floating = [
            tensor.detach() for tensor in outputs if tensor.is_floating_point() and tensor.numel()
        ]
        if not floating or not all(bool(torch.isnan(tensor).all()) for tensor in floating):
            return
        if model_output is not None and not _may_contain_nan(model_output):
            return
        # NaN that arrived, such as those of diverged weights, are not unknown values.
        if all(bool(torch.isfinite(tensor.detach()).all()) for tensor in received):
            raise ModelError(
                f"parallel.pp: stage {stage.index} computes NaN. Either the model cannot be cut,"
                f" because it uses a value that is computed before {stage.blocks[0]} and does not"
                " pass through the chain of blocks (a skip connection, or an embedding read again):"
                " use parallel.pp = 1. Or no target of the micro-batch counts in its loss (labels"
                " that are all -100): leave such samples out"
            )

    def _boundary(self, stage: int, microbatch: int) -> Boundary | None:
        """Return the boundary of a stage for a micro-batch, or None if it is not known yet."""
        known = self.runtime._boundaries.get((stage, self.signatures[microbatch]))
        # In addition to hidden states, blocks may return attention weights (GPT-Neo), biases of
        # positions or the like, which are as long as the cache.
        depends_on_cache = self.cached[microbatch] and known is not None and len(known.tensors) > 1
        if depends_on_cache or self.cut_results[microbatch].values:
            return self.described.get((stage, microbatch))
        return known

    def _set_boundary(self, stage: int, microbatch: int, boundary: Boundary) -> None:
        self.described[stage, microbatch] = boundary
        if not self.cut_results[microbatch].values:
            self.runtime._boundaries.setdefault((stage, self.signatures[microbatch]), boundary)

    def _send_activations(self, action: Action, output: Any) -> list[torch.Tensor]:
        """Send a block's output to the next stage, and return its tensors."""
        structure, tensors = flatten_output(output)
        message = Message(Payload.ACTIVATION, action.stage, action.microbatch)
        to = destination(self.schedule, message)
        boundary = Boundary(
            structure,
            tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
            self.runtime.staged.sequence_length,
        )
        known = self._boundary(action.stage, action.microbatch)
        if known is None:
            self._set_boundary(action.stage, action.microbatch, boundary)
            if to is not None:
                self.runtime.messenger.send_object(boundary, to=to)
        elif not known.allows(boundary):
            raise ModelError(
                f"parallel.pp: stage {action.stage} sent {known.summary()} for an earlier batch of"
                f" these shapes, but {boundary.summary()} for this one: the tensors that the model"
                " passes between blocks depend on more than the batch's shapes and the values that"
                " are read outside its blocks; pad every batch to one length, or use parallel.pp ="
                " 1"
            )
        self._send(message, tensors)
        return tensors

    def _send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        self.sent.add(message)
        for listen in self.runtime.listeners:
            listen(message, tensors)
        to = destination(self.schedule, message)
        if to is None:
            self.local_messages[message] = tuple(tensor.detach() for tensor in tensors)
        else:
            self.runtime.messenger.send(tensors, to=to)

    def _take(self, message: Message) -> tuple[torch.Tensor, ...]:
        """Wait for a message to this rank, and return its tensors."""
        if message in self.local_messages:
            return self.local_messages.pop(message)
        source = self.schedule.stage_ranks[message.stage]
        while message not in self.arriving:
            self._start_receive(source, may_wait=True)
        tensors = self.arriving.pop(message).wait()
        # The next message arrives while the stage computes with this one.
        self._start_receive(source, may_wait=False)
        return tensors

    def _start_receive(self, source: int, *, may_wait: bool) -> None:
        """Start to receive the next message from a rank.

        Args:
            source: The pp rank that sends it.
            may_wait: Whether to wait for a description of the tensors if their shapes are not
                known. If it is False, a message with unknown shapes is not received yet.

        Raises:
            EarlierStageFailed: The sender failed before it knew what it would have sent.
        """
        remaining = self.expected[source]
        if not remaining:
            return
        message = remaining[0]
        if message.payload is Payload.ACTIVATION:
            boundary = self._boundary(message.stage, message.microbatch)
            if boundary is None:
                if not may_wait:
                    return
                boundary = self.runtime.messenger.receive_object(source=source)
                if boundary is None:
                    remaining.pop(0)
                    raise EarlierStageFailed(
                        "parallel.pp: an earlier stage failed; its rank reports the error"
                    )
                self._set_boundary(message.stage, message.microbatch, boundary)
            like = [(shape, dtype) for shape, dtype, _ in boundary.tensors]
        else:
            boundary = self._boundary(message.stage - 1, message.microbatch)
            if boundary is None:
                assert not may_wait, f"{message} before this rank's own forward"
                return
            like = boundary.differentiable
        remaining.pop(0)
        self.arriving[message] = self.runtime.messenger.receive(like, source=source)


@dataclass
class _StageActivations:
    """Tensors of a stage and a micro-batch between its forward and the end of its backward.

    Attributes:
        inputs: Received tensors whose gradient is sent back.
        outputs: Sent tensors that have a gradient; on the last stage the loss.
        deferred: Second half of a backward that was split.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    deferred: DeferredBackward | None = None


class EarlierStageFailed(ModelError):
    """The input of a stage is missing because an earlier stage failed.

    The rank of the earlier stage raises the actual error.
    """


class _ReceivedActivation(torch.autograd.Function):
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


def _differentiable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _may_contain_nan(output: Any) -> bool:
    """Return False if the output has floating-point tensors and none of them contains NaN.

    Scalars such as the loss are not considered.
    """
    floating = [
        local_tensor(leaf.detach())
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim()
    ]
    return not floating or any(bool(torch.isnan(tensor).any()) for tensor in floating)


def _has_opaque_leaf(output: Any) -> bool:
    """Return True if a model's output contains an object that torch's pytree does not traverse."""
    known = torch.Tensor | int | float | str | None
    return any(not isinstance(leaf, known) for leaf in tree_leaves(output))


@dataclass(frozen=True)
class Boundary:
    """Activations that a stage sends to the next one.

    Attributes:
        structure: A block's output, with a TensorSlot for every tensor.
        tensors: Shape and dtype of each tensor, and whether its gradient is sent back.
        length: Length of the sequences if tensor parallelism splits them, else 0.
    """

    structure: Any
    tensors: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    length: int

    @property
    def differentiable(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the gradients that are sent back."""
        return [(shape, dtype) for shape, dtype, needs_gradient in self.tensors if needs_gradient]

    def allows(self, other: Boundary) -> bool:
        """Return True if a stage that expects this boundary can receive tensors of `other`."""
        if (self.tensors, self.length) != (other.tensors, other.length):
            return False
        return _comparable_leaves(self.structure) == _comparable_leaves(other.structure)

    def summary(self) -> str:
        """Return shapes and dtypes for an error message."""
        texts = [f"{dtype_name(dtype)} {list(shape)}" for shape, dtype, _ in self.tensors]
        return ", ".join(texts) or "no tensor"


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder for a tensor in the structure of a block's output.

    Attributes:
        index: Position of the tensor among all tensors of the output.
    """

    index: int


def _comparable_leaves(structure: Any) -> list[Any]:
    """Return the leaves with well-defined equality. Other objects may not define it."""
    return [
        leaf
        for leaf in tree_leaves(structure)
        if isinstance(leaf, TensorSlot | int | float | str | None)
    ]


def flatten_output(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a block's output into (structure, tensors). A TensorSlot replaces each tensor."""
    tensors: list[torch.Tensor] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return TensorSlot(len(tensors) - 1)

    return tree_map(replace, output), tensors


def unflatten_output(boundary: Boundary, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild a block's output from its tensors."""

    def replace(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, TensorSlot) else leaf

    return tree_map(replace, boundary.structure)


def signature(batch: Any) -> Signature:
    """Return the properties of a micro-batch that determine the shapes between stages."""
    if has_cache(batch):
        # The mask covers all earlier tokens. The shapes of single tokens do not follow from it.
        batch = {
            key: entry
            for key, entry in batch.items()
            if key != MASK and not isinstance(entry, StageCaches)
        }
    tensors = [tensor for leaf in tree_leaves(batch) for tensor in tensors_in(leaf)]
    return (torch.is_grad_enabled(), *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def has_cache(batch: Any) -> bool:
    """Return True if a micro-batch contains the KV caches of the stages."""
    if not isinstance(batch, Mapping):
        return False
    return any(isinstance(entry, StageCaches) for entry in batch.values())
