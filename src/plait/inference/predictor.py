"""Forwards without gradients on a layout, without side effects on a model in training.

Note [Errors of a forward]
    The ranks of one model replica (tp, pp) wait for each other in collectives. If one of them
    raised an error and left, the others would wait forever. An error of a pipeline stage is
    therefore stored and raised by the next `compute_on_first`, which all of these ranks call. The
    failed rank raises its own error, and the other ranks raise an InputError with the same
    message.

`untouched` undoes the changes that generation makes to a model in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.tensors import version_of
from plait.cluster import accelerator
from plait.cluster.small_messages import max_over_ranks
from plait.errors import InputError
from plait.parallel.pipeline.runtime import EarlierStageFailed
from plait.sharded.cache import arguments_of
from plait.sharded.model import ShardedModel

LogitsReader = Callable[[], torch.Tensor]
"""Function that returns the logits of a forward that has run.

Only the rank that reads the logits calls it. It raises InputError if there are none.
"""
T = TypeVar("T")
_MESSAGE_BYTES = 1000
"""Largest size of an error message that a rank sends to others."""
_NO_TENSOR = torch.zeros(0)
# States of a rank, ordered so that the maximum over ranks is what all of them must do.
_IDLE, _BUSY, _BROKEN = range(3)


class Predictor:
    """Runner of a model's forwards on one rank.

    All ranks of one model replica (tp, pp) run the same forwards.

    Args:
        sharded: The model.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self.device = sharded.device
        self.takes = arguments_of(sharded.model)
        """Names of the model's arguments."""
        # A model without `input_ids` gets the token ids as its only argument.
        self._takes_names = "input_ids" in self.takes
        # Under sequence parallelism the head reads a part of the positions, and the last one is on
        # another rank.
        self._keeps_last_logits = "logits_to_keep" in self.takes and not (
            sharded.region is not None and sharded.region.sequence_parallel
        )

        coordinates = sharded.mesh.coordinates
        self._output_stage = 0
        if sharded.pipeline is not None:
            self._output_stage = sharded.pipeline.output_rank
        self.is_first = coordinates["pp"] == self._output_stage and coordinates["tp"] == 0
        """True if this rank reads the logits. One rank per model replica does."""
        self._tp = sharded.mesh.layout.tp
        self._parts = sharded.mesh.layout.tp * sharded.mesh.layout.pp
        self._part = coordinates["pp"] * self._tp + coordinates["tp"]
        """Number of this rank among those of its model replica."""
        self._first_part = self._output_stage * self._tp
        self._failure: Exception | None = None
        """Error of this rank since the last `compute_on_first`. See Note [Errors of a forward]."""

    def logits(self, inputs: dict[str, Any], cache: Any = None) -> LogitsReader:
        """Run the model and return its logits.

        Args:
            inputs: Arguments of the model. Arguments that it does not accept are dropped.
            cache: KV cache, or None.

        Returns:
            A reader of the logits [requests, positions, vocabulary].
        """
        return partial(_logits_of, self._predict(inputs, cache))

    def last_logits(
        self, inputs: dict[str, Any], cache: Any, rows: torch.Tensor | None = None
    ) -> LogitsReader:
        """Run the model and select one position of every request.

        Args:
            inputs: Arguments of the model. Those that it does not take are dropped.
            cache: KV cache, or None.
            rows: Positions [requests]. None means the last position.

        Returns:
            A reader of the logits [requests, vocabulary].
        """
        if rows is None and self._keeps_last_logits:
            inputs = {**inputs, "logits_to_keep": 1}
        return partial(_logits_at, self.logits(inputs, cache), rows)

    def padded_inputs(self, rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, Any]:
        """Return the arguments of a forward over complete sequences, without a KV cache.

        Args:
            rows: Token ids of every sequence.
            pad: Token that pads the sequences on the right. Causal attention does not read later
                positions.
        """
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        inputs: dict[str, Any] = {
            "input_ids": ids,  # [sequences, tokens]
            "attention_mask": mask,
            "position_ids": torch.arange(longest).expand_as(ids),
        }
        if "use_cache" in self.takes:
            inputs["use_cache"] = False
        return inputs

    def idle(self) -> None:
        """Run a forward on a single token. Its result is not used."""
        ids = torch.zeros((1, 1), dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.zeros_like(ids),
        }
        self.run_on_all(lambda: self._predict(inputs, None))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor from the rank that reads the logits to all ranks of its replica.

        Collective over these ranks.

        Args:
            tensor: The tensor. On the other ranks, any tensor of the same shape and dtype.

        Returns:
            The tensor, on the CPU.
        """
        mesh = self._sharded.mesh
        tensor = tensor.to(self._sharded.device)
        # First inside the output stage, then from there to the other stages.
        if (group := mesh.group("tp")) is not None and mesh.coordinates["pp"] == self._output_stage:
            dist.broadcast(tensor, group=group, group_src=0)
        if (group := mesh.group("pp")) is not None:
            dist.broadcast(tensor, group=group, group_src=self._output_stage)
        return tensor.cpu()

    def compute_on_first(
        self, work: Callable[[], torch.Tensor], template: torch.Tensor
    ) -> torch.Tensor:
        """Compute a tensor on the rank that reads the logits, and return it on all ranks.

        Collective over the ranks of one replica.

        Args:
            work: Function that computes the tensor.
            template: Tensor with the shape and dtype of the result.

        Returns:
            The tensor, on the CPU.

        Raises:
            Exception: See Note [Errors of a forward].
        """
        failure = self._failure
        self._failure = None
        result = torch.zeros_like(template)
        if self.is_first and failure is None:
            try:
                result = work()
            except Exception as error:  # the other ranks wait for this one, whatever the error is
                failure = error

        # The result is zero on all other ranks, so one sum distributes it together with the flags.
        flags = torch.zeros(self._parts, dtype=result.dtype)
        # A stage that has no inputs because an earlier stage failed does not report an error.
        if failure is not None and not isinstance(failure, EarlierStageFailed):
            flags[self._part] = 1
        total = self._sum(torch.cat([result.flatten().to(flags.device), flags]))
        if bool(total[-self._parts :].any()):
            self._raise_failure(failure, int(total[-self._parts :].nonzero()[0]))
        return total[: -self._parts].view_as(result)

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Call a function on every rank of one replica. Collective over these ranks.

        Raises:
            Exception: The function has failed on a rank. See Note [Errors of a forward].
        """
        results: list[T] = []
        try:
            results.append(work())
        except Exception as error:  # the other ranks wait for this one, whatever the error is
            self._failure = error
        self.compute_on_first(lambda: _NO_TENSOR, _NO_TENSOR)
        return results[0]

    def fail(self, error: Exception) -> None:
        """Raise an error. In a pipeline, store it instead, for the next `compute_on_first`.

        See Note [Errors of a forward].
        """
        if self._sharded.pipeline is None:
            raise error
        self._failure = self._failure or error

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._sharded.device)
        for axis in ("tp", "pp"):
            if (group := self._sharded.mesh.group(axis)) is not None:
                dist.all_reduce(tensor, group=group)
        return tensor.cpu()

    def _raise_failure(self, failure: Exception | None, part: int) -> NoReturn:
        """Raise the error of the first failed rank on all ranks of the replica. Collective.

        Args:
            failure: Error of this rank, if it has failed.
            part: Index of the first failed rank within the replica.
        """
        # The message is empty on all other ranks, so a sum distributes it.
        message = b""
        if part == self._part:
            text = str(failure) or type(failure).__name__
            message = text.encode(errors="replace")[:_MESSAGE_BYTES]
        padded = bytearray(message.ljust(_MESSAGE_BYTES, b"\0"))
        total = self._sum(torch.frombuffer(padded, dtype=torch.uint8))
        if failure is not None and not isinstance(failure, EarlierStageFailed):
            raise failure

        rank = f"parallel.pp, rank {part // self._tp} of the pipeline"
        if part == self._first_part:
            rank = "the rank that chooses tokens"
        text = bytes(total.numpy()).rstrip(bytes(1)).decode(errors="replace")
        raise InputError(f"{rank}: {text}")

    def raise_together(self, failure: Exception | None) -> None:
        """Raise an error if `on_token` has failed on a rank of this replica. Collective.

        Args:
            failure: Error of this rank, or None.
        """
        groups = [self._sharded.mesh.group(axis) for axis in ("tp", "pp")]
        has_failed = max_over_ranks(
            [int(failure is not None)], *groups, device=self._sharded.device
        )[0]
        if failure is not None:
            raise failure
        if has_failed:
            raise InputError(
                "on_token failed on another rank, which reports its error; correct the function"
            )

    def run(self, work: Iterator[None], *, independent: bool) -> None:
        """Run all forwards of this rank, and idle forwards while other ranks still run theirs.

        Args:
            work: Iterator that yields before each forward.
            independent: Whether the forwards of ranks with different requests are independent. They
                are not if parameters are gathered.

        Raises:
            Exception: `work` has failed on this rank, or on a rank that must run the same number of
                forwards.
        """
        failure: Exception | None = None
        while True:
            try:
                # `work` yields None before each forward. The default means that it has ended.
                state = _BUSY if next(work, _IDLE) is None else _IDLE
            except Exception as error:
                failure = error
                state = _BROKEN
            while (highest := self._highest(state, independent)) == _BUSY and state == _IDLE:
                try:
                    self.idle()
                except Exception as error:
                    failure = error
                    state = _BROKEN
            if failure is not None:
                raise failure
            if highest == _BROKEN:
                raise InputError("another rank failed and reports its error")
            if highest == _IDLE:
                return

    def _highest(self, state: int, independent: bool) -> int:
        """Return the highest state over the ranks that gather parameters together. Collective."""
        group = self._sharded.mesh.group("dp_shard")
        if independent or group is None:
            return state
        return max_over_ranks([state], group, device=self._sharded.device)[0]

    def _predict(self, inputs: dict[str, Any], cache: Any) -> Any:
        """Return the model's output. In a pipeline, an error is stored and not raised."""
        try:
            if not self._takes_names:
                return self._sharded.predict(inputs["input_ids"], continue_on_error=True)
            accepted = {name: value for name, value in inputs.items() if name in self.takes}
            return self._sharded.predict(accepted, cache=cache, continue_on_error=True)
        except Exception as error:
            self.fail(error)


def _logits_at(read: LogitsReader, rows: torch.Tensor | None) -> torch.Tensor:
    logits = read()  # [requests, positions, vocabulary]
    if rows is None:
        return logits[:, -1]
    return logits[torch.arange(len(rows), device=logits.device), rows.to(logits.device)]


def _logits_of(output: Any) -> torch.Tensor:
    logits = output
    if hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, dict):
        logits = output.get("logits")
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise InputError(
            "generate needs logits [batch, sequence, vocabulary], but the model's output is a"
            f" {type(output).__name__} without them; return a tensor, or an object with `logits`"
        )
    return logits


_PLAIN_TYPES = (bool, int, float, str, type(None))


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers, modules' plain attributes and random generators at the end of the context.

    A forward over a longer input changes some of these: rotary frequencies that depend on the input
    length, and the length that they were computed for.

    Args:
        model: The model.
        device: Its device, whose generator is restored as well.
    """
    buffers = []
    attributes = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.detach().clone(), version_of(buffer)))
        attributes.append((module, _plain_attributes(module)))

    device_type = accelerator.NAME if device.type == "cpu" else device.type
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device_type):
        try:
            yield
        finally:
            for module, name, buffer, before, version in buffers:
                # Without a write there is nothing to copy, and no version counter to increase.
                if version_of(buffer) != version:
                    buffer.detach().copy_(before)
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
            for module, values in attributes:
                _restore_attributes(module, values)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN_TYPES) or type(value) is torch.Tensor:
            attributes[name] = value
    return attributes


def _restore_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    missing = object()
    for name, value in values.items():
        # The caller restores the training mode.
        if name != "training" and module.__dict__.get(name, missing) is not value:
            module.__dict__[name] = value
