"""`deepspeed.pipe`: models as lists of layers, with DeepSpeed's arguments.

`PipelineEngine` runs complete steps of a `PipelineModule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from plait._torch.operators import tree_map
from plait.cluster.topology import place
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.loaders import RepeatingLoader
from plait.compat.deepspeed.refused import refuse_arguments
from plait.errors import InputError, warn
from plait.model.pipeline_model import LayerSpec, PipelineModel, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

_REMEDIES = {
    "topology": 'write the degrees in the configuration ("parallel": {"pp": 2, "tp": 2})',
    "seed_fn": (
        "layers are initialised by name, the same on every layout; build them under zero.Init()"
    ),
}


class PipelineModule(PipelineModel):
    """Pipeline model, given as a list of layers.

    Every process builds all layers and keeps those of its stage. Under `zero.Init()` they are built
    without memory.

    Args:
        layers: Layers in the order of the forward.
        num_stages: Number of pipeline stages. If None, `parallel.pp` of the configuration.
        topology: Must be None.
        loss_fn: Returns the mean loss of a micro-batch from (output, labels).
        seed_layers: Must be False.
        seed_fn: Must be None.
        base_seed: Must be 1234.
        partition_method: Ignored: stages are balanced by predicted time.
        activation_checkpoint_interval: 1 recomputes every layer in backward, 0 none.

    Raises:
        InputError: An argument is not supported.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    num_stages: int | None
    recomputed: bool
    """True if layers are recomputed in backward, as `parallel.recompute.mode` = "full" does."""

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
    ) -> None:
        refuse_arguments("PipelineModule", _REMEDIES, topology=topology, seed_fn=seed_fn)
        if seed_layers or base_seed != 1234:
            raise InputError(
                "deepspeed.PipelineModule(seed_layers=, base_seed=) is not supported; leave them"
                f" out: {_REMEDIES['seed_fn']}"
            )

        method = partition_method.lower()
        if method not in ("parameters", "uniform") and not method.startswith("type:"):
            raise InputError(
                f"deepspeed.PipelineModule(partition_method={partition_method!r}): DeepSpeed has"
                " 'parameters', 'uniform' and 'type:...', and stages are balanced by predicted"
                " time; leave it out"
            )
        # "parameters" is DeepSpeed's default, which scripts do not choose.
        if method != "parameters" and place().rank == 0:
            warn(
                f"PipelineModule(partition_method={partition_method!r}) changes nothing: stages are"
                " balanced by predicted time"
            )
        if activation_checkpoint_interval not in (0, 1):
            raise InputError(
                "deepspeed.PipelineModule(activation_checkpoint_interval="
                f"{activation_checkpoint_interval}): layers are recomputed one by one; use 1"
            )
        super().__init__(layers)
        self.num_stages = num_stages
        self.recomputed = bool(activation_checkpoint_interval)
        # nn.Module would register a loss that is a module as a child, but it is not a layer.
        object.__setattr__(self, "loss_fn", loss_fn)

    def forward(self, value: Any) -> Any:
        """Return the output of all layers."""
        for layer in self.layers:
            value = tree_map(_copy_received, layer(value))
        return value


def _copy_received(value: Any) -> Any:
    """Return a copy of a tensor that a stage has received; other values are returned unchanged.

    The first layer of a stage may write to its input in place, as nn.ReLU(inplace=True) does.
    Autograd does not allow this if the input is a leaf. DeepSpeed copies the input too.
    """
    if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
        return value.clone()
    return value


_FULL_STEPS = (
    "call engine.train_batch(iterator) or engine.eval_batch(iterator), which run full steps"
)


class PipelineEngine(DeepSpeedEngine):
    """Engine that `deepspeed.initialize` returns for a `PipelineModule`.

    Every process receives all micro-batches of its data-parallel rank, whichever stage it has.
    """

    _batches: Iterator[Any] | None = None
    """Iterator that `train_batch` reads by default."""
    _batch_fn: Callable[[Any], Any] | None = None
    """Conversion of a micro-batch to `(inputs, labels)`."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run an optimizer step. Collective.

        Args:
            data_iter: Iterator over micro-batches `(inputs, labels)`. If None, `training_data` is
                repeated without end.

        Returns:
            The mean loss over micro-batches and data-parallel ranks (0-dimensional).

        Raises:
            InputError: The iterator ends before the step is complete.
        """
        if data_iter is None:
            data_iter = self._default_batches()
        count = self.gradient_accumulation_steps()
        # The iterator is read before the step begins. If it is too short, no stage waits for
        # another.
        micro_batches = self._next_batches(data_iter, count, "train_batch")
        self.plait.train()
        with self._updating("train_batch"):
            loss = self.plait.train_batch(iter(micro_batches)).loss
        self._applied = self.plait.was_step_applied()
        self._has_stepped = True
        self.micro_steps += len(micro_batches)
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
        """Evaluate the next micro-batches without gradients. Collective.

        Args:
            data_iter: Iterator over micro-batches `(inputs, labels)`.
            return_logits: Must be False.
            compute_loss: True returns the loss, False the model's outputs.
            reduce_output: "avg" with the loss, None with the outputs.
            bcast_loss: Must be True with the loss.
            num_micro_batches: Number of micro-batches. If None, the number in a training step.

        Returns:
            The mean loss over micro-batches and data-parallel ranks (0-dimensional) on every
            process. With `compute_loss=False`, a list of the model's outputs on the last stage and
            None on the other stages.

        Raises:
            InputError: The combination of arguments is not supported.
        """
        if compute_loss:
            supported = reduce_output == "avg" and bcast_loss
        else:
            supported = not reduce_output
        if return_logits or not supported:
            raise InputError(
                "engine.eval_batch(...) returns either the mean loss on every process (leave all"
                " arguments out) or the outputs on the last stage (compute_loss=False,"
                " reduce_output=None); call it twice for both"
            )
        count = num_micro_batches or self.gradient_accumulation_steps()
        micro_batches = self._next_batches(data_iter, count, "eval_batch")
        with self.plait.evaluating():
            if not compute_loss:
                # All stages take part; only the last has outputs.
                outputs = [self.plait.predict(micro_batch) for micro_batch in micro_batches]
                return outputs if self.is_last_stage() else None
            totals = [self.plait.eval_batch(micro_batch) for micro_batch in micro_batches]

        loss_sum = sum(loss for loss, _ in totals)
        weight_sum = sum(weight for _, weight in totals)
        return torch.tensor(loss_sum / weight_sum, device=self.device)

    def _default_batches(self) -> Iterator[Any]:
        if self._batches is None:
            if self.training_dataloader is None:
                raise InputError(
                    "engine.train_batch(): pass an iterator, or training_data= to initialize"
                )
            self._batches = RepeatingLoader(self.training_dataloader)
        return self._batches

    def _next_batches(self, batches: Iterator[Any], count: int, call: str) -> list[Any]:
        """Return the next `count` micro-batches. `call` names the method in errors."""
        # A list or a loader would start at its beginning in every step.
        if not isinstance(batches, Iterator):
            raise InputError(
                f"engine.{call} takes an iterator, not a {type(batches).__name__}, which would"
                " start from its beginning at every call; create `batches = iter(...)` or"
                " RepeatingLoader(...) once, and pass it to every call"
            )
        micro_batches = list(islice(batches, count))
        if len(micro_batches) != count:
            raise InputError(
                f"engine.{call}: a step needs {count} micro-batches and the iterator had"
                f" {len(micro_batches)} left; train fewer steps, or pass RepeatingLoader(...)"
            )
        if self._batch_fn is None:
            return micro_batches
        return [self._batch_fn(micro_batch) for micro_batch in micro_batches]

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Set the loader that `train_batch()` reads and restarts when it is exhausted."""
        self.training_dataloader = loader  # type: ignore[assignment]
        self._batches = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator that `train_batch()` reads."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set the function that converts a micro-batch of the data to `(inputs, labels)`."""
        self._batch_fn = fn

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.plait.mesh.layout.pp

    @property
    def stage_id(self) -> int:
        """Index of this process's pipeline stage."""
        return self.plait.mesh.coordinates["pp"]

    def is_first_stage(self) -> bool:
        """Return True if this process has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return True if this process has the model's output."""
        return self.plait.sharded.holds_output

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Raise InputError. A pipeline runs complete steps."""
        raise InputError(f"engine(...) of a pipeline: {_FULL_STEPS}")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError. A pipeline runs complete steps."""
        raise InputError(f"engine.backward of a pipeline: {_FULL_STEPS}")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raise InputError. A pipeline runs complete steps."""
        raise InputError(f"engine.step of a pipeline: {_FULL_STEPS}")
