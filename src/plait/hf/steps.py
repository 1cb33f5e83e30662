"""The micro-batches of a Trainer's step: which are this rank's own, what their losses count, and
their way through the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from plait.data.stream_part import StreamPart
from plait.engine.engine import Engine
from plait.hf.batches import Rounds

IGNORED = -100
_LABELS = ("labels", "shift_labels")


@dataclass
class Step:
    """One optimizer step."""

    present: list[int]
    """For every micro-batch, how many data-parallel ranks have one of their own."""
    own: list[bool]
    """Whether this rank has."""
    begun: int = 0
    inside: bool = False
    """Whether a micro-batch is running, so that a nested call belongs to it."""
    counted: bool = False
    """Whether the loss of the micro-batch was multiplied by its factor."""
    held: list[Any] = field(default_factory=list)
    """Micro-batches of a pipeline, which runs them all at once."""

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch that has begun is the step's last."""
        return self.begun == len(self.own)

    def factor(self, index: int, *, scaled: bool, ranks: int) -> float:
        """What the loss of a micro-batch is multiplied by. A loss that is `scaled` was divided by
        the items of the step; another one by the step's micro-batches of this rank, though all
        ranks together may have fewer.
        """
        if not self.own[index]:
            return 0.0
        return 1.0 if scaled else len(self.own) * ranks / sum(self.present)


def step_of(
    plan: Rounds | StreamPart | None,
    *,
    position: int,
    count: int,
    ranks: int,
    index: int,
    filled: int = 0,
) -> Step:
    """The step of the `count` micro-batches of a loader from `position` on, and of `filled` more
    that are nobody's own.
    """
    present = [plan.present(position + i) if plan is not None else ranks for i in range(count)] + [
        0
    ] * filled
    return Step(present, [index < some for some in present])


class FilledStep(Iterator[Any]):
    """A step's micro-batches of an iterator: where that ends inside of the step, its last one again
    for those that are missing.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._last: Any = None
        self.filled = 0

    def __next__(self) -> Any:
        try:
            self._last = next(self._batches)
        except StopIteration:
            if self._last is None:
                raise
            self.filled += 1
        return self._last


def counted(batches: list[Any], step: Step) -> list[Any]:
    """The micro-batches with no label in those that are another rank's, which it counts."""
    return [
        batch if own else _unlabelled(batch) for batch, own in zip(batches, step.own, strict=True)
    ]


def _unlabelled(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    blank = {
        name: torch.full_like(batch[name], IGNORED)
        for name in _LABELS
        if isinstance(batch.get(name), torch.Tensor)
    }
    return {**batch, **blank}


def run_pipeline(
    engine: Engine,
    pieces: list[Any],
    factors: list[float],
    loss_of: Callable[[Any, Any], torch.Tensor],
    run: Callable[..., Any],
) -> torch.Tensor:
    """Forward and backward of a step through the pipeline. `run(body, call)` calls `call` while the
    model's forward is `body`. Returns the sum of the losses times their factors, the same on every
    stage; 0-dimensional. Collective.
    """
    count = engine.config.batch.accumulation
    pieces = [
        engine.sharded.prepared(piece)
        for piece in [*pieces, *(dict(pieces[-1]) for _ in range(count - len(pieces)))]
    ]
    factors = [*factors, *[0.0] * (count - len(factors))]
    factor_of = {id(piece): factor for piece, factor in zip(pieces, factors, strict=True)}
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    scale = engine.sharded.loss_scale / engine.dp_size

    def begin(loss: torch.Tensor, piece: Any) -> torch.Tensor:
        nonlocal total
        counted_loss = loss * factor_of[id(piece)]
        total = total + counted_loss.detach().double()
        return counted_loss * scale

    with engine.sharded.guard.running("step"):
        run(loss_of, lambda: engine.sharded.train_microbatches(pieces, begin, loss_fn=_as_it_is))
    group = engine.mesh.group("pp")
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def _as_it_is(loss: Any, piece: Any) -> tuple[torch.Tensor, int]:
    return loss, 1


def from_output_stage(engine: Engine, value: Any) -> Any:
    """Nested tuples, lists and mappings of tensors of the stage that has the output, on all stages.
    Collective over the pipeline.
    """
    group = engine.mesh.group("pp")
    if group is None or engine.sharded.pipeline is None:
        return value
    tensors: list[torch.Tensor] = []
    structure, facts = engine.from_output_stage(
        _taken_apart(value, tensors) if engine.sharded.holds_output else None
    )
    received = []
    for index, (shape, dtype) in enumerate(facts):
        tensor = (
            tensors[index].contiguous()
            if tensors
            else torch.empty(shape, dtype=dtype, device=engine.device)
        )
        dist.broadcast(tensor, group=group, group_src=engine.sharded.pipeline.output_rank)
        received.append(tensor)
    return _put_together(structure, received)


@dataclass(frozen=True)
class _Place:
    index: int


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> tuple[Any, list[Any]]:
    def apart(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            tensors.append(one.detach())
            return _Place(len(tensors) - 1)
        if isinstance(one, tuple | list):
            return (
                type(one)(apart(entry) for entry in one)
                if not hasattr(one, "_fields")
                else tuple(apart(entry) for entry in one)
            )
        if isinstance(one, Mapping):
            return {key: apart(entry) for key, entry in one.items()}
        return one

    return apart(value), [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _put_together(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, tuple | list):
        return type(value)(_put_together(entry, tensors) for entry in value)
    if isinstance(value, Mapping):
        return {key: _put_together(entry, tensors) for key, entry in value.items()}
    return value
