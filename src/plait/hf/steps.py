"""Steps of a Trainer: this rank's micro-batches, their loss factors, and pipeline steps.

`Smoothing` is the Trainer's label smoothing. Transformers decides by the name of a model's class
whether the label of a position is the next token. Sharding changes the class, so Plait makes the
decision for the class before sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from plait.data.split_rows import RoundPlan
from plait.engine.engine import Engine
from plait.errors import InputError
from plait.model.adapters import without_wrapper
from plait.parallel.micro_batches import IGNORED, LABELS, SHIFTED
from plait.sharded.shards_as_weights import class_before_sharding


@dataclass
class TrainerStep:
    """Optimizer step of a Trainer.

    Attributes:
        present: Number of data-parallel ranks with a batch of their own, per micro-batch.
        has_batch: Whether this rank has a batch of its own, per micro-batch.
        begun: Number of micro-batches that have started.
        inside: Whether a micro-batch is running. A nested call then belongs to this micro-batch.
        counted: Whether the loss of the current micro-batch was multiplied by its factor.
        micro_batches: Micro-batches collected so far. Only pipelines use it, because they run all
            micro-batches of a step in one call.
    """

    present: list[int]
    has_batch: list[bool]
    begun: int = 0
    inside: bool = False
    counted: bool = False
    micro_batches: list[Any] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """True if the micro-batch that has started is the last of the step."""
        return self.begun == len(self.has_batch)

    def factor(self, index: int, *, scaled: bool, ranks: int) -> float:
        """Return the factor of the loss of a micro-batch.

        Args:
            index: Index of the micro-batch.
            scaled: Whether the loss was divided by `num_items_in_batch` of the step. Otherwise it
                was divided by this rank's number of micro-batches, repeated ones included, and the
                factor corrects for the repeated ones.
            ranks: Number of data-parallel ranks.
        """
        if not self.has_batch[index]:
            return 0.0
        if scaled:
            return 1.0
        # The mean over this rank's micro-batches becomes that over all micro-batches with data.
        return len(self.has_batch) * ranks / sum(self.present)


def step_of(
    plan: RoundPlan | None,
    *,
    position: int,
    count: int,
    ranks: int,
    index: int,
    filled: int = 0,
) -> TrainerStep:
    """Return the step of the next micro-batches of a loader.

    Args:
        plan: Object with the number of ranks that have a batch. None if every rank has one.
        position: Number of micro-batches that have been read from the epoch.
        count: Number of micro-batches of the step.
        ranks: Number of data-parallel ranks.
        index: Index of this rank among the data-parallel ranks.
        filled: Number of repeated micro-batches that complete the step and do not count.
    """
    present = [ranks] * count
    if plan is not None:
        present = [plan.present(position + offset) for offset in range(count)]
    present += [0] * filled
    return TrainerStep(present, [index < ranks_with_batch for ranks_with_batch in present])


class FilledStep(Iterator[Any]):
    """Iterator over the micro-batches of a step. If there are too few, it repeats the last one.

    Attributes:
        filled: Number of repetitions.
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


def counted(batches: list[Any], step: TrainerStep) -> list[Any]:
    """Return the micro-batches, without labels in those that repeat another rank's batch.

    The other rank computes the loss of these labels.
    """
    return [
        batch if own else _unlabelled(batch)
        for batch, own in zip(batches, step.has_batch, strict=True)
    ]


def _unlabelled(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    blank = {
        name: torch.full_like(batch[name], IGNORED)
        for name in (LABELS, SHIFTED)
        if isinstance(batch.get(name), torch.Tensor)
    }
    return {**batch, **blank}


def run_pipeline(
    engine: Engine,
    batches: list[Any],
    factors: list[float],
    loss_of: Callable[[Any, Any], torch.Tensor],
    run: Callable[..., Any],
) -> torch.Tensor:
    """Run the forward and backward of a step through the pipeline. Collective.

    Args:
        engine: The engine.
        batches: Micro-batches of the step. If there are too few for the pipeline, the last one is
            repeated with factor 0.
        factors: Factor of each loss.
        loss_of: Forward of the model, which returns the loss of a micro-batch.
        run: Function (body, call) that calls `call` while the model's forward is `body`.

    Returns:
        The sum of the losses times their factors, on every stage: 0-dimensional, float64.

    Raises:
        InputError: The step has more micro-batches than the pipeline.
    """
    accumulation = engine.config.batch.accumulation
    missing = accumulation - len(batches)
    if missing < 0:
        raise InputError(
            f"TrainingArguments.gradient_accumulation_steps = {len(batches)}: it was raised during"
            f" the training, and this pipeline was built for {accumulation} micro-batches per step;"
            f" set it to at most {accumulation}, or create another Trainer whose arguments have"
            f" {len(batches)}"
        )
    # Copies, because a micro-batch is identified by its object below.
    filled = [*batches, *(dict(batches[-1]) for _ in range(missing))]
    prepared = [engine.sharded.prepare_batch(batch) for batch in filled]
    factors = [*factors, *[0.0] * missing]
    factor_of = {id(batch): factor for batch, factor in zip(prepared, factors, strict=True)}
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    # The reduction sums gradients over the data-parallel ranks, and the loss is their mean.
    scale = engine.sharded.loss_scale / engine.dp_size

    def scaled_loss(loss: torch.Tensor, batch: Any) -> torch.Tensor:
        nonlocal total
        weighted = loss * factor_of[id(batch)]
        total = total + weighted.detach().double()
        return weighted * scale

    def train() -> None:
        engine.sharded.train_microbatches(
            prepared, scaled_loss, loss_fn=lambda loss, batch: (loss, 1)
        )

    # A failure loses the gradients of all micro-batches.
    with engine.sharded.guard.running("step"):
        run(loss_of, train)
    # Only the last stage has added to `total`.
    group = engine.mesh.group("pp")
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def from_output_stage(engine: Engine, value: Any) -> Any:
    """Return the nested tensors of the last pipeline stage on all stages. Collective.

    Args:
        engine: The engine.
        value: Nested tuples, lists and mappings of tensors on the stage that has the output. Other
            stages may pass anything.
    """
    group = engine.mesh.group("pp")
    if group is None or engine.sharded.pipeline is None:
        return value
    # The structure is pickled, and the tensors are sent one by one.
    tensors: list[torch.Tensor] = []
    description = None
    if engine.sharded.holds_output:
        structure = _extract_tensors(value, tensors)
        description = (structure, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    structure, facts = engine.from_output_stage(description)

    received = []
    for index, (shape, dtype) in enumerate(facts):
        if tensors:
            # Outputs may be views, and collectives take contiguous tensors.
            tensor = tensors[index].contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=engine.device)
        dist.broadcast(tensor, group=group, group_src=engine.sharded.pipeline.output_rank)
        received.append(tensor)
    return _insert_tensors(structure, received)


@dataclass(frozen=True)
class _TensorIndex:
    """Placeholder for a tensor in a nested structure."""

    index: int


def _extract_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the structure with its tensors replaced by placeholders.

    The tensors are appended to `tensors`.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _TensorIndex(len(tensors) - 1)
    if isinstance(value, tuple | list):
        entries = [_extract_tensors(entry, tensors) for entry in value]
        # The constructor of a named tuple takes its fields one by one.
        return tuple(entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, Mapping):
        return {key: _extract_tensors(entry, tensors) for key, entry in value.items()}
    return value


def _insert_tensors(structure: Any, tensors: list[Any]) -> Any:
    """Return a structure of `_extract_tensors` with tensors in place of the placeholders."""
    if isinstance(structure, _TensorIndex):
        return tensors[structure.index]
    if isinstance(structure, tuple | list):
        return type(structure)(_insert_tensors(entry, tensors) for entry in structure)
    if isinstance(structure, Mapping):
        return {key: _insert_tensors(entry, tensors) for key, entry in structure.items()}
    return structure


@dataclass(frozen=True)
class Smoothing:
    """Replacement of a Trainer's `label_smoother`.

    Attributes:
        smoother: Transformers' LabelSmoother.
        shifts: Whether the label of a position is the next token.
    """

    smoother: Any
    shifts: bool

    def __call__(
        self, output: Any, labels: torch.Tensor, shift_labels: bool = False, **more: Any
    ) -> torch.Tensor:
        return self.smoother(output, labels, shift_labels=self.shifts, **more)


def smoothing_of(smoother: Any, model: Any) -> Smoothing:
    """Return the label smoothing for a model.

    Args:
        smoother: Transformers' LabelSmoother, or the result of an earlier call.
        model: The model, sharded or not, with or without adapters.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Transformers looks at this model even if PEFT's wrapper is around all of it (prompts).
    base = model if without_wrapper(model) is model else model.base_model.model
    kind = class_before_sharding(type(base))
    shifts = kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return Smoothing(getattr(smoother, "smoother", smoother), shifts)
