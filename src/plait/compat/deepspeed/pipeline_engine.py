"""The engine of a `PipelineModule`: full steps only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.loaders import RepeatingLoader
from plait.errors import InputError

_FULL_STEPS = (
    "call engine.train_batch(iterator) or engine.eval_batch(iterator), which run full steps"
)


class PipelineEngine(DeepSpeedEngine):
    """Every process is given all micro-batches of its data-parallel rank, whichever stage it
    has.
    """

    _batches: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step over the next micro-batches, `(inputs, labels)` each, of the iterator,
        or of `training_data` again and again. Returns the mean over micro-batches and data-parallel
        ranks; 0-dimensional. Raises InputError where they end before.
        """
        if data_iter is None:
            data_iter = self._own_batches()
        pieces = self._next(data_iter, self.gradient_accumulation_steps(), "train_batch")
        self.plait.train()
        with self._training("train_batch"):
            loss = self.plait.train_batch(iter(pieces)).loss
        self._applied = self.plait.was_step_applied()
        self._has_stepped = True
        self.micro_steps += len(pieces)
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of the next micro-batches (by default as many as a step has) over them and
        the data-parallel ranks, on every process, without gradients; 0-dimensional. With
        `compute_loss` and `reduce_output` off the model's outputs, in a list, on the last stage;
        None on the others. Raises InputError for other combinations.
        """
        if (
            return_logits
            or (compute_loss and (reduce_output != "avg" or not bcast_loss))
            or (not compute_loss and reduce_output)
        ):
            raise InputError(
                "engine.eval_batch(...) returns either the mean loss on every process (leave all"
                " arguments out) or the outputs on the last stage (compute_loss=False,"
                " reduce_output=None); call it twice for both"
            )
        pieces = self._next(
            data_iter, num_micro_batches or self.gradient_accumulation_steps(), "eval_batch"
        )
        with self.plait.evaluating():
            if not compute_loss:
                outputs = [self.plait.predict(piece) for piece in pieces]
                return outputs if self.is_last_stage() else None
            totals = [self.plait.eval_batch(piece) for piece in pieces]
        return torch.tensor(
            sum(loss for loss, _ in totals) / sum(weight for _, weight in totals),
            device=self.device,
        )

    def _own_batches(self) -> Iterator[Any]:
        if self._batches is None:
            if self.training_dataloader is None:
                raise InputError(
                    "engine.train_batch(): pass an iterator, or training_data= to initialize"
                )
            self._batches = RepeatingLoader(self.training_dataloader)
        return self._batches

    def _next(self, batches: Iterator[Any], count: int, call: str) -> list[Any]:
        if not isinstance(batches, Iterator):
            raise InputError(
                f"engine.{call} takes an iterator, not a {type(batches).__name__}, which would"
                " begin anew at every call; make `batches = iter(...)` of it once, or"
                " RepeatingLoader(...), and pass that"
            )
        pieces = list(islice(batches, count))
        if len(pieces) != count:
            raise InputError(
                f"engine.{call}: the iterator had {len(pieces)} micro-batches left, of {count}; end"
                " before, or pass RepeatingLoader(...)"
            )
        return [self._batch_fn(piece) for piece in pieces] if self._batch_fn is not None else pieces

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """What `train_batch()` reads, again and again."""
        self.training_dataloader = loader  # type: ignore[assignment]
        self._batches = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch()` reads, to its end."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """`fn` makes of every micro-batch of the data `(inputs, labels)`."""
        self._batch_fn = fn

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.plait.mesh.layout.pp

    @property
    def stage_id(self) -> int:
        """This process's place in the pipeline."""
        return self.plait.mesh.coordinates["pp"]

    def is_first_stage(self) -> bool:
        """Whether this process is the pipeline's first."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this process has the model's output."""
        return self.plait.sharded.holds_output

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise InputError(f"engine(...) of a pipeline: {_FULL_STEPS}")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise InputError(f"engine.backward of a pipeline: {_FULL_STEPS}")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise InputError(f"engine.step of a pipeline: {_FULL_STEPS}")
