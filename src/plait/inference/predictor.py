"""Forwards without gradients on a layout, of which ranks take part in the same number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from plait.errors import InputError
from plait.parallel.pipeline.boundary import EarlierStageFailed
from plait.sharded.cache import arguments_of
from plait.sharded.model import ShardedModel

Read = Callable[[], torch.Tensor]
"""The logits of a forward that has run. Only the rank that reads them calls it. Raises InputError
where there are none.
"""
T = TypeVar("T")
_MESSAGE = 1000
"""Bytes of what a rank that failed says."""
_NOTHING = torch.zeros(0)
_IDLE, _BUSY, _BROKEN = range(3)


class Predictor:
    """Of one rank. All ranks of a model's parts (tp, pp) are given the same."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self.device = sharded.device
        self.takes = arguments_of(sharded.model)
        """Names of the arguments of the model."""
        self._by_name = "input_ids" in self.takes
        # Under sequence parallelism the head reads a part of the positions, and the last one is
        # another rank's.
        self._last_only = "logits_to_keep" in self.takes and not (
            sharded.region is not None and sharded.region.sequence_parallel
        )
        at = sharded.mesh.coordinates
        self._stage = sharded.pipeline.output_rank if sharded.pipeline is not None else 0
        self.is_first = at["pp"] == self._stage and at["tp"] == 0
        """Whether this is the rank, of those that hold parts of one model, that reads the logits.
        """
        self._tp = sharded.mesh.layout.tp
        self._parts = sharded.mesh.layout.tp * sharded.mesh.layout.pp
        self._part = at["pp"] * self._tp + at["tp"]
        self._chooses = self._stage * self._tp
        """Which of those ranks this is, and which reads the logits."""
        self._failed: Exception | None = None
        """What this rank's stages failed with since all ranks met last."""

    def logits(self, inputs: dict[str, Any], cache: Any = None) -> Read:
        """Run the model. Gives logits [requests, positions, vocabulary]."""
        return partial(_logits, self._predict(inputs, cache))

    def last(self, inputs: dict[str, Any], cache: Any, rows: torch.Tensor | None = None) -> Read:
        """Run the model. Gives logits [requests, vocabulary] of one position of every request:
        `rows`, or the last.
        """
        if rows is None and self._last_only:
            inputs = {**inputs, "logits_to_keep": 1}
        return partial(_of_position, self.logits(inputs, cache), rows)

    def idle(self) -> None:
        """A forward on a single token of no meaning, whose result nobody reads."""
        ids = torch.zeros((1, 1), dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.zeros_like(ids),
        }
        self.on_all(lambda: self._predict(inputs, None))

    def shared(self, box: torch.Tensor) -> torch.Tensor:
        """`box` of the rank that reads the logits, on the CPU of all ranks of the model's parts;
        the others give one of the same form.
        """
        mesh = self._sharded.mesh
        box = box.to(self._sharded.device)
        if (group := mesh.group("tp")) is not None and mesh.coordinates["pp"] == self._stage:
            dist.broadcast(box, group=group, group_src=0)
        if (group := mesh.group("pp")) is not None:
            dist.broadcast(box, group=group, group_src=self._stage)
        return box.cpu()

    def of_first(self, work: Callable[[], torch.Tensor], box: torch.Tensor) -> torch.Tensor:
        """What `work` computes on the rank that reads the logits, in the form of `box`, on the CPU
        of all ranks of the model's parts. Where it fails, or a forward before it on a stage of a
        pipeline, all raise: that rank its own error, the others an InputError of the same words.
        """
        failed = self._failed
        self._failed = None
        box = torch.zeros_like(box)
        if self.is_first and failed is None:
            try:
                box = work()
            except Exception as error:  # whatever it is, the others wait for this rank
                failed = error
        flags = torch.zeros(self._parts, dtype=box.dtype)
        if failed is not None and not isinstance(failed, EarlierStageFailed):
            flags[self._part] = 1
        found = self._summed(torch.cat([box.flatten().to(flags.device), flags]))
        if bool(found[-self._parts :].any()):
            self._raise_failed(failed, int(found[-self._parts :].nonzero()[0]))
        return found[: -self._parts].view_as(box)

    def on_all(self, work: Callable[[], T]) -> T:
        """What `work` makes on this rank. Where it fails on a rank of the model's parts, all raise,
        as in `of_first`.
        """
        made: list[T] = []
        try:
            made.append(work())
        except Exception as error:  # whatever it is, the others wait for this rank
            self._failed = error
        self.of_first(lambda: _NOTHING, _NOTHING)
        return made[0]

    def fail(self, error: Exception) -> None:
        """Raise `error`; in a pipeline, where other stages go on, with the next `of_first`."""
        if self._sharded.pipeline is None:
            raise error
        self._failed = self._failed or error

    def _summed(self, box: torch.Tensor) -> torch.Tensor:
        box = box.to(self._sharded.device)
        for axis in ("tp", "pp"):
            if (group := self._sharded.mesh.group(axis)) is not None:
                dist.all_reduce(box, group=group)
        return box.cpu()

    def _raise_failed(self, failed: Exception | None, first: int) -> NoReturn:
        """`first`: the first of the ranks that failed."""
        said = (
            (str(failed) or type(failed).__name__).encode(errors="replace")[:_MESSAGE]
            if first == self._part
            else b""
        )
        words = self._summed(
            torch.frombuffer(bytearray(said.ljust(_MESSAGE, b"\0")), dtype=torch.uint8)
        )
        if failed is not None and not isinstance(failed, EarlierStageFailed):
            raise failed
        who = (
            "the rank that chooses tokens"
            if first == self._chooses
            else f"parallel.pp, rank {first // self._tp} of the pipeline"
        )
        raise InputError(f"{who}: {bytes(words.numpy()).rstrip(bytes(1)).decode(errors='replace')}")

    def raise_together(self, failed: Exception | None) -> None:
        """Raise on all ranks of the model's parts where one has failed."""
        flag = torch.tensor(int(failed is not None), dtype=torch.int32, device=self._sharded.device)
        for axis in ("tp", "pp"):
            if (group := self._sharded.mesh.group(axis)) is not None:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if failed is not None:
            raise failed
        if flag:
            raise InputError(
                "on_token failed on another rank, which tells its error; correct the function"
            )

    def run(self, work: Iterator[None], *, apart: bool) -> None:
        """All forwards of this rank, and idle ones while others have some. `work` yields before
        each. `apart`: ranks with other requests do not wait for each other in a forward. Where
        `work` fails on one of those that do, all raise.
        """
        failed: Exception | None = None
        while True:
            try:
                state = _BUSY if next(work, _IDLE) is None else _IDLE
            except Exception as error:
                failed = error
                state = _BROKEN
            while (most := self._most(state, apart=apart)) == _BUSY and state == _IDLE:
                try:
                    self.idle()
                except Exception as error:
                    failed = error
                    state = _BROKEN
            if failed is not None:
                raise failed
            if most == _BROKEN:
                raise InputError("another rank failed, which tells its error")
            if most == _IDLE:
                return

    def _most(self, state: int, *, apart: bool) -> int:
        """The highest state of the ranks that gather parameters together."""
        group = self._sharded.mesh.group("dp_shard")
        if apart or group is None:
            return state
        flag = torch.tensor(state, dtype=torch.int32, device=self._sharded.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return int(flag)

    def _predict(self, inputs: dict[str, Any], cache: Any) -> Any:
        """The model's output. In a pipeline a failure is raised by the next `of_first`, where all
        stages hear of it.
        """
        try:
            if not self._by_name:
                return self._sharded.predict(inputs["input_ids"], passes_on=True)
            taken = {name: value for name, value in inputs.items() if name in self.takes}
            return self._sharded.predict(taken, cache=cache, passes_on=True)
        except Exception as error:
            self.fail(error)


def _of_position(read: Read, rows: torch.Tensor | None) -> torch.Tensor:
    logits = read()
    return (
        logits[:, -1]
        if rows is None
        else logits[torch.arange(len(rows), device=logits.device), rows.to(logits.device)]
    )


def _logits(output: Any) -> torch.Tensor:
    found = output
    if hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, dict):
        found = output.get("logits")
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.ndim != 3:
        raise InputError(
            "generate needs logits [batch, sequence, vocabulary] and the model's output is a"
            f" {type(output).__name__} without them; return a tensor, or an object with `logits`"
        )
    return found
