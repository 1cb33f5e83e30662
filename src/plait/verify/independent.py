"""Independent reference for a training run: torch's autograd and numpy, but no Plait code.

`parity.reference_trace` uses Plait's loss and Plait's choice of the optimizer. A mistake in the
loss or in this choice would affect the reference and the layout alike. This module implements cross
entropy, the mean over the targets of a step, gradient clipping and AdamW from their definitions in
float64, and takes the weights as arrays. Only the model's forward is common to this reference and
the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
Batch = Mapping[str, torch.Tensor]

IGNORED = -100
"""Label of a position that is not a target."""
CLIP_EPSILON = 1e-6
"""Number that clipping adds to the norm, as in torch and DeepSpeed."""


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of AdamW (Loshchilov and Hutter 2019, algorithm 2), constant over a run."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class ReferenceResult:
    """Losses, gradients and weights of a training run. All arrays are float64."""

    losses: list[float] = field(default_factory=list)
    """Mean over all targets of a step. NaN for a step without targets."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norms before clipping."""
    gradients: list[dict[str, Array | None]] = field(default_factory=list)
    """Clipped gradients of each step, keyed by parameter name.

    A gradient is None if no micro-batch of the step used the parameter. A skipped step has no
    entries.
    """
    parameters: dict[str, Array] = field(default_factory=dict)


def train(
    model: torch.nn.Module,
    weights: Mapping[str, Array],
    steps: Sequence[Sequence[Batch]],
    *,
    optimizer: AdamW,
    clipping: float,
    skipped: Collection[int] = (),
) -> ReferenceResult:
    """Train a model with AdamW.

    Args:
        model: The model in float64, on any device.
        weights: Initial values by parameter name. A tied parameter has the first of its names.
        steps: One list of micro-batches per optimizer step. A micro-batch maps the names of the
            model's arguments to tensors, and "labels" to [batch, seq] int64. Position t of the
            logits predicts label t + 1.
        optimizer: Settings of AdamW.
        clipping: Largest global gradient norm, or 0 for no clipping.
        skipped: Indices of steps in which the optimizer is not called.

    Raises:
        ValueError: Names or shapes of `weights` differ from those of the model's parameters.
    """
    parameters = dict(model.named_parameters())
    _load(parameters, weights)
    values = {}
    states = {}
    for name, parameter in parameters.items():
        values[name] = _array(parameter)
        states[name] = _Moments(np.zeros_like(values[name]), np.zeros_like(values[name]))
    result = ReferenceResult(parameters=values)
    for index, micro_batches in enumerate(steps):
        # The loss of a step is a mean over the targets of all its micro-batches, so their number is
        # known before the first backward.
        targets = 0
        for batch in micro_batches:
            targets += int((batch["labels"][:, 1:] != IGNORED).sum())
        total = 0.0
        for batch in micro_batches:
            loss = _cross_entropy(model, batch)
            total += loss.item()
            loss.backward()
        gradients = _take_gradients(parameters, 1 / max(targets, 1))
        norm = math.sqrt(sum(float(np.square(g).sum()) for g in gradients.values()))
        if clipping > 0 and norm + CLIP_EPSILON > clipping:
            factor = clipping / (norm + CLIP_EPSILON)
            gradients = {name: g * factor for name, g in gradients.items()}
        result.losses.append(total / targets if targets else math.nan)
        result.norms.append(norm)
        if index in skipped:
            result.gradients.append({})
            continue
        result.gradients.append({name: gradients.get(name) for name in parameters})
        for name, gradient in gradients.items():
            values[name] = states[name].update(values[name], gradient, optimizer)
        _load(parameters, values)
    return result


@dataclass
class _Moments:
    """Running means of a parameter's gradient and squared gradient, and the number of updates."""

    mean: Array
    square: Array
    updates: int = 0

    def update(self, value: Array, gradient: Array, adamw: AdamW) -> Array:
        self.updates += 1
        self.mean = adamw.beta1 * self.mean + (1 - adamw.beta1) * gradient
        self.square = adamw.beta2 * self.square + (1 - adamw.beta2) * gradient * gradient
        mean = self.mean / (1 - adamw.beta1**self.updates)
        square = self.square / (1 - adamw.beta2**self.updates)
        # Decoupled weight decay: it does not pass through the moments.
        return value - adamw.lr * (
            mean / (np.sqrt(square) + adamw.eps) + adamw.weight_decay * value
        )


def _load(parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, Array]) -> None:
    if set(parameters) != set(weights):
        unmatched = sorted(set(parameters) ^ set(weights))
        raise ValueError(
            f"{len(unmatched)} parameter names are only in the model or only in the weights:"
            f" {', '.join(unmatched[:3])}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if tuple(parameter.shape) != weights[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(parameter.shape)} in the model and"
                    f" {weights[name].shape} in the weights"
                )
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name], dtype=np.float64)))


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().cpu().to(torch.float64).numpy().copy()


def _cross_entropy(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """Return the sum over a micro-batch's targets of -log softmax(logits)[target].

    Without targets the result is a zero that requires gradients.
    """
    output = model(**{name: value for name, value in batch.items() if name != "labels"})
    # [batch, seq, vocabulary]
    logits = getattr(output, "logits", output).to(torch.float64)
    # Position t predicts label t + 1, and the last position has no label.
    labels = batch["labels"][:, 1:]
    row, position = torch.nonzero(labels != IGNORED, as_tuple=True)
    # [targets, vocabulary]
    scores = logits[row, position]
    picked = scores[torch.arange(len(row)), labels[row, position]]
    # Subtracting the largest score keeps `exp` finite.
    highest = scores.detach().amax(dim=-1, keepdim=True)
    return (highest[:, 0] + (scores - highest).exp().sum(dim=-1).log() - picked).sum()


def _take_gradients(
    parameters: Mapping[str, torch.nn.Parameter], factor: float
) -> dict[str, Array]:
    """Return all gradients multiplied by `factor`, and set the parameters' gradients to None."""
    gradients = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = _array(parameter.grad) * factor
            parameter.grad = None
    return gradients
