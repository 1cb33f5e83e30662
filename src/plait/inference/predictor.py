"""Forwards without gradients on a layout, of which ranks take part in the same number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import InputError
from plait.sharded.cache import arguments_of
from plait.sharded.model import ShardedModel


class Predictor:
    """Of one rank. All ranks of a model's parts (tp, pp) are given the same."""

    def __init__(self, sharded: ShardedModel, running: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`running`: what is entered while the model runs."""
        self._sharded, self._running = sharded, running
        self.device = sharded.device
        self.takes = arguments_of(sharded.model)
        """Names of the arguments of the model."""
        self._by_name = "input_ids" in self.takes
        # Under sequence parallelism the head reads a part of the positions, and the last one is another rank's.
        self._last_only = "logits_to_keep" in self.takes and not (sharded.region is not None and sharded.region.sequence_parallel)
        at = sharded.mesh.coordinates
        self._stage = sharded.pipeline.output_rank if sharded.pipeline is not None else 0
        self.is_first = at["pp"] == self._stage and at["tp"] == 0
        """Whether this is the rank, of those that hold parts of one model, that reads the logits."""

    def logits(self, inputs: dict[str, Any], cache: Any = None) -> torch.Tensor | None:
        """Logits [requests, positions, vocabulary]; None on a rank that does not read them."""
        output = self._predict(inputs, cache)
        return _logits(output) if self._sharded.holds_output and self.is_first else None

    def last(self, inputs: dict[str, Any], cache: Any, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [requests, vocabulary] of one position of every request: `rows`, or the last. None on a rank that does not read them."""
        if rows is None and self._last_only:
            inputs = {**inputs, "logits_to_keep": 1}
        logits = self.logits(inputs, cache)
        if logits is None or rows is None:
            return None if logits is None else logits[:, -1]
        return logits[torch.arange(len(rows), device=logits.device), rows.to(logits.device)]

    def idle(self) -> None:
        """A forward on a single token of no meaning, whose result nobody reads."""
        ids = torch.zeros((1, 1), dtype=torch.long)
        self._predict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids)}, None)

    def shared(self, box: torch.Tensor) -> torch.Tensor:
        """`box` of the rank that reads the logits, on the CPU of all ranks of the model's parts; the others give one of the same form."""
        mesh = self._sharded.mesh
        box = box.to(self._sharded.device)
        if (group := mesh.group("tp")) is not None and mesh.coordinates["pp"] == self._stage:
            dist.broadcast(box, group=group, group_src=0)
        if (group := mesh.group("pp")) is not None:
            dist.broadcast(box, group=group, group_src=self._stage)
        return box.cpu()

    def run(self, work: Iterator[None], *, apart: bool) -> None:
        """All forwards of this rank, and idle ones while others have some. `work` yields before each. `apart`: ranks with other requests
        do not wait for each other in a forward."""
        nothing = object()
        busy = next(work, nothing) is not nothing
        while self._anybody(busy, apart=apart):
            if busy:
                busy = next(work, nothing) is not nothing
            else:
                self.idle()

    def _anybody(self, busy: bool, *, apart: bool) -> bool:
        """Whether any of the ranks that gather parameters together has a forward to run."""
        group = self._sharded.mesh.group("dp_shard")
        if apart or group is None:
            return busy
        flag = torch.tensor(int(busy), dtype=torch.int32, device=self._sharded.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)

    def _predict(self, inputs: dict[str, Any], cache: Any) -> Any:
        with self._running():
            if not self._by_name:
                return self._sharded.predict(inputs["input_ids"])
            return self._sharded.predict({name: value for name, value in inputs.items() if name in self.takes}, cache=cache)


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
            f"generate needs logits [batch, sequence, vocabulary] and the model's output is a {type(output).__name__} without them; return "
            "a tensor, or an object with `logits`"
        )
    return found
