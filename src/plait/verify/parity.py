"""Training traces of a layout and of one process, and their comparison.

A trace contains losses, gradient norms, every gradient, and every parameter after the last step.
The reference trains in one process with plain torch and does not use the engine. Both runs use the
same global batches: a list of micro-batches per step. The layout distributes the micro-batches over
its data-parallel ranks; the reference process trains on all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.cluster.small_messages import all_gather_objects
from plait.engine.engine import Engine
from plait.losses.loss import Loss
from plait.parallel.micro_batches import Forward, default_forward, to_device

T = TypeVar("T")

Steps = Sequence[Sequence[Any]]
"""Optimizer steps x micro-batches of all ranks.

A step has dp x accumulation micro-batches. Data-parallel rank r uses `accumulation` of them,
starting at index r x accumulation.
"""

Kind = Literal["initial weight", "loss", "gradient norm", "gradient", "parameter", "other"]


@dataclass(frozen=True)
class Difference:
    """Relative error of one compared quantity: a loss, a norm, a gradient or a parameter."""

    name: str
    error: float
    """Largest absolute difference, divided by the largest absolute reference value."""
    kind: Kind = "other"
    step: int | None = None
    tensor: str | None = None

    def ok(self, tolerance: float) -> bool:
        """Return True if the error is at most `tolerance`. The result is False for NaN."""
        return self.error <= tolerance


@dataclass(frozen=True)
class Trace:
    """Losses, norms, gradients and parameters of a training run.

    Tensors are unsharded, on the CPU, and keyed by parameter name. A gradient is None if no rank
    used the parameter.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: tuple[Mapping[str, torch.Tensor | None], ...]
    """Unscaled and clipped gradients of each step. Empty for a skipped step."""
    parameters: Mapping[str, torch.Tensor]
    initial: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parameters before the first step."""
    skipped: tuple[int, ...] = ()
    """Steps that changed nothing, because float16 overflowed."""
    scales: tuple[float, ...] = ()
    """Loss scale of every step."""
    spread: tuple[Difference, ...] = ()
    """Errors of parameters whose copies differ between ranks."""


@dataclass(frozen=True)
class ReferenceNumerics:
    """Dtypes and loss scales with which `reference_trace` trains in mixed precision."""

    compute: torch.dtype | None = None
    """Dtype of forward and backward, which run on casts of the parameters."""
    reduce: torch.dtype | None = None
    """Dtype in which gradients of micro-batches are added."""
    scales: Sequence[float] = ()
    """Loss scale of each step. The loss is multiplied and gradients are divided by it."""
    skipped: Collection[int] = ()
    """Steps without an update. Their norms show whether one process overflows as well."""


def reference_trace(
    model: nn.Module,
    steps: Steps,
    *,
    loss_fn: Loss,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    clipping: float,
    forward: Forward = default_forward,
    numerics: ReferenceNumerics | None = None,
) -> Trace:
    """Train a model in this process with plain torch, and record a trace.

    Args:
        model: The model with weights.
        steps: Micro-batches of all steps.
        loss_fn: Returns the sum of a micro-batch's losses and their weight, such as the number of
            targets.
        optimizer: Function that creates an optimizer for a list of trainable parameters.
        clipping: Largest global gradient norm, or 0 for no clipping.
        forward: Function that calls the model.
        numerics: Dtypes and loss scales. None trains in the dtype of the parameters.
    """
    numerics = numerics or ReferenceNumerics()
    scales = numerics.scales
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    initial = _copies(parameters)
    update = optimizer([p for p in parameters.values() if p.requires_grad])
    losses: list[float] = []
    norms: list[float] = []
    gradients: list[dict[str, torch.Tensor | None]] = []
    for index, step in enumerate(steps):
        scale = scales[index] if scales else 1.0
        # The weights are summed before the first backward, because each loss is divided by the sum.
        total_weight = float(sum(loss_fn.weight(micro_batch) for micro_batch in step))
        sums: dict[str, torch.Tensor] = {}
        loss = 0.0
        for micro_batch in step:
            on_device = to_device(micro_batch, device)
            total, _ = loss_fn(forward(_in_dtype(model, numerics.compute), on_device), on_device)
            loss += total.item()
            # A step without targets has weight 0, and its gradients are 0.
            (total * (scale / max(total_weight, torch.finfo(torch.float64).tiny))).backward()
            if numerics.reduce is not None:
                _move_gradients(parameters, sums, numerics.reduce)
        # The optimizer reads gradients in the dtype of its parameters.
        for name, total in sums.items():
            parameters[name].grad = total.to(parameters[name].dtype)
        for parameter in parameters.values():
            if parameter.grad is not None and scale != 1.0:
                parameter.grad.div_(scale)
        # With an infinite limit only the norm is computed.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping or math.inf)
        losses.append(loss / total_weight if total_weight else math.nan)
        norms.append(float(norm))
        if index in numerics.skipped:
            gradients.append({})
        else:
            gradients.append(_gradients(parameters))
            update.step()
        update.zero_grad(set_to_none=True)
    return Trace(
        tuple(losses),
        tuple(norms),
        tuple(gradients),
        _copies(parameters),
        initial=initial,
        skipped=tuple(sorted(numerics.skipped)),
        scales=tuple(scales),
    )


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: full_tensor_on_cpu(parameter) for name, parameter in parameters.items()}


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    gradients = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        gradients[name] = None if gradient is None else full_tensor_on_cpu(gradient)
    return gradients


def _in_dtype(model: nn.Module, compute: torch.dtype | None) -> Any:
    """Return the model, or a function that calls it with parameters that are cast to `compute`.

    Gradients flow through the casts to the parameters.
    """
    if compute is None:
        return model
    # Casts are differentiable, so that gradients reach the parameters in their own dtype.
    casts = {}
    for name, parameter in model.named_parameters():
        casts[name] = parameter.to(compute) if parameter.is_floating_point() else parameter
    return lambda *args, **kwargs: torch.func.functional_call(model, casts, args, kwargs)


def _move_gradients(
    parameters: Mapping[str, nn.Parameter], sums: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Add the parameters' gradients to `sums` in `dtype`, and set them to None."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = parameter.grad.to(dtype)
            sums[name] = sums[name] + gradient if name in sums else gradient
            parameter.grad = None


def engine_trace(engine: Engine, steps: Steps) -> Trace:
    """Train with the engine, and return the unsharded trace on every rank. Collective."""
    pipeline = engine.parts.plans.pipeline
    ties = pipeline.cut.first_names if pipeline is not None else {}

    def named() -> dict[str, nn.Parameter]:
        return {ties.get(name, name): p for name, p in engine.model.named_parameters()}

    gradients: list[dict[str, torch.Tensor | None]] = []

    def record_gradients() -> None:
        gradients[-1] = _gradients(named())

    def record_gradient(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradients[-1][names[parameter]] = full_tensor_on_cpu(parameter.grad)

    # Inside a backward the model has gathered parameters under the same names.
    names = {parameter: name for name, parameter in named().items()}
    in_backward = engine.stepper.in_backward
    inspectors = in_backward.inspectors if in_backward is not None else []
    initial = _copies(named())
    losses = []
    norms = []
    scales = []
    skipped = []
    engine.stepper.before_update.append(record_gradients)
    inspectors.append(record_gradient)
    try:
        for index, step in enumerate(steps):
            # In a backward that updates, gradients arrive one by one, and parameters without one
            # stay None.
            gradients.append(dict.fromkeys(initial) if in_backward is not None else {})
            result = engine.train_batch(micro_batches_of_rank(engine, step))
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
            scales.append(result.loss_scale)
            if result.skipped:
                skipped.append(index)
    finally:
        engine.stepper.before_update.remove(record_gradients)
        inspectors.remove(record_gradient)
    final = _copies(named())
    return Trace(
        tuple(losses),
        tuple(norms),
        tuple(from_all_ranks(entry) for entry in gradients),
        from_all_ranks(final),
        initial=from_all_ranks(initial),
        skipped=tuple(skipped),
        scales=tuple(scales),
        spread=(
            *spread_over_ranks("initial weight", initial),
            *spread_over_ranks("parameter", final),
        ),
    )


def micro_batches_of_rank(engine: Engine, step: Sequence[Any]) -> list[Any]:
    """Return the micro-batches of a step that a rank trains on. See `Steps`."""
    count = engine.gradient_accumulation_steps()
    return list(step[engine.dp_rank * count : (engine.dp_rank + 1) * count])


def full_tensor_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on the CPU. Collective for a DTensor."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def from_all_ranks(local: Mapping[str, T]) -> dict[str, T]:
    """Merge the mappings of all ranks, such as those of the pipeline stages. Collective.

    If several ranks have the same key, the value of the lowest rank is used.
    """
    names = all_gather_objects(list(local))
    if all(other == names[0] for other in names):
        return dict(local)
    merged: dict[str, T] = {}
    for entries in all_gather_objects(dict(local)):
        # Entries of lower ranks win, because they were merged before.
        merged = {**entries, **merged}
    return merged


def spread_over_ranks(kind: Kind, local: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Compare the copies of unsharded tensors on different ranks. Collective.

    Every copy is compared bitwise with the copy of the lowest rank that has the tensor.
    """
    digests = {}
    for name, tensor in local.items():
        # Digests, because sending all tensors of all ranks would take world-size times their
        # memory.
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.blake2b(content).digest()
    by_name: dict[str, set[bytes]] = {}
    for entries in all_gather_objects(digests):
        for name, digest in entries.items():
            by_name.setdefault(name, set()).add(digest)
    # Equal copies have one digest, as has a tensor of a single rank.
    differing = [name for name, distinct in by_name.items() if len(distinct) > 1]
    if not differing:
        return []
    copies = all_gather_objects({name: local[name] for name in differing if name in local})
    spread = []
    for name in differing:
        first, *others = [entries[name] for entries in copies if name in entries]
        error = max(_largest_error(first, other, floor=0.0) for other in others)
        label = f"copies of {kind} {name} on different ranks"
        spread.append(Difference(label, error, kind, None, name))
    return spread


def compare(reference: Trace, trace: Trace) -> list[Difference]:
    """Compare all quantities of two traces, in the order of the computation.

    The quantities are the initial weights (if both traces have them), the losses, norms and
    gradients of each step, the parameters, and the copies on different ranks. In steps that `trace`
    skipped (float16 overflow) only losses are compared.
    """
    differences = []
    if reference.initial and trace.initial:
        differences += _tensors("initial weight", None, reference.initial, trace.initial)
    differences += [d for d in trace.spread if d.kind == "initial weight"]
    if len(reference.losses) != len(trace.losses):
        label = f"number of steps {len(reference.losses)} and {len(trace.losses)}"
        differences.append(Difference(label, math.inf))

    gradients = zip(reference.gradients, trace.gradients, strict=False)
    for step, (expected, actual) in enumerate(gradients):
        error = relative_error(reference.losses[step], trace.losses[step])
        differences.append(Difference(f"loss[{step}]", error, "loss", step))
        if step in trace.skipped:
            continue
        error = relative_error(reference.grad_norms[step], trace.grad_norms[step])
        differences.append(Difference(f"gradient norm[{step}]", error, "gradient norm", step))
        differences += _tensors("gradient", step, expected, actual)

    silent = _without_gradient(reference) & _without_gradient(trace)
    differences += _tensors(
        "parameter", None, reference.parameters, trace.parameters, silent=silent
    )
    return differences + [d for d in trace.spread if d.kind == "parameter"]


NOISE = 1e-12
"""Gradients below this share of the largest gradient are noise, such as those of a key bias."""


def _without_gradient(trace: Trace) -> frozenset[str]:
    """Return the names of parameters whose gradients are rounding noise in every step.

    Adam divides noise by noise, so such parameters change by an arbitrary amount.
    """
    loud: set[str] = set()
    for step in trace.gradients:
        sizes = _largest_values(step)
        bar = NOISE * max(sizes.values(), default=0.0)
        loud |= {name for name, size in sizes.items() if not size <= bar}
    return frozenset(trace.parameters) - loud


def _largest_values(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """Return the largest absolute value of every tensor, without empty tensors."""
    return {n: float(t.abs().max()) for n, t in tensors.items() if t is not None and t.numel()}


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference with the largest error. NaN counts as largest."""
    return max(differences, key=lambda d: math.inf if math.isnan(d.error) else d.error)


def relative_error(reference: float, value: float) -> float:
    """Return the relative error of `value` against `reference`, or 0 if both are NaN."""
    if math.isnan(reference) and math.isnan(value):
        return 0.0
    return abs(reference - value) / max(abs(reference), 1e-12)


def _tensors(
    kind: Kind,
    step: int | None,
    reference: Mapping[str, torch.Tensor | None],
    values: Mapping[str, torch.Tensor | None],
    *,
    silent: Collection[str] = (),
) -> list[Difference]:
    # The exact value of some tensors is 0 (the gradient of a key bias). They contain rounding noise
    # of the size of other tensors.
    largest = max(_largest_values(reference).values(), default=1.0)
    differences = []
    # The order of the reference, then that of `values`.
    for name in dict.fromkeys([*reference, *values]):
        expected = reference.get(name)
        actual = values.get(name)
        if expected is None and actual is None:
            continue
        error = math.inf
        if expected is not None and actual is not None and expected.shape == actual.shape:
            floor = largest if name in silent else 1e-3 * largest
            error = _largest_error(expected, actual, floor=floor)
        label = f"{kind} {name}" if step is None else f"{kind}[{step}] {name}"
        differences.append(Difference(label, error, kind, step, name))
    return differences


def _largest_error(reference: torch.Tensor, value: torch.Tensor, *, floor: float) -> float:
    """Return max |value - reference| / (max |reference| + floor), or 0 for empty tensors."""
    if not reference.numel():
        return 0.0
    top = float(reference.abs().max()) + floor
    return float((reference.double() - value.double()).abs().max()) / max(top, 1e-300)
