"""Mixed precision: dtypes of computation and of reduction, and the loss scale of float16.

Parameters, gradients and optimizer states stay in the dtype of the parameters (float32 master
weights, sharded by ZeRO). The casts are arguments of `fully_shard`, so `apply` only stores them in
`Parts`.

Note [Loss scaling]
    float16 gradients below 6e-8 become zero, so the loss is multiplied by a scale before the
    backward pass, and the gradients are divided by the same scale before the optimizer. This module
    only decides the scale, and reads no tensors. The caller passes whether any gradient on any rank
    is not finite, so every rank computes the same scale.

    The sequence of scales is that of DeepSpeed 0.19.8 (`DynamicLossScaler` as its ZeRO optimizers
    use it), at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from plait.cluster.mesh import Mesh
from plait.errors import CheckpointError, PlaitError
from plait.model.facts import ModelFacts
from plait.model.float32 import float32_modules
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique
from plait.policy import Policy
from plait.sizes import dtype_of

FACTOR = 2.0
"""Factor by which the scale is divided and multiplied. DeepSpeed has no setting for it."""
ComputeDtype = Literal["float16", "bfloat16"]
ReduceDtype = Literal["float16", "bfloat16", "float32"]


class LossScale(Policy):
    """Settings of loss scaling for float16. With a `static` scale the other fields are ignored."""

    static: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Constant scale. 0 adapts the scale to the gradients."""
    initial_scale_power: int = Field(16, ge=0, le=126)
    """The initial scale is 2 to this power. The scaled loss is float32, which ends below 2^128."""
    window: int = Field(1000, ge=1)
    """Steps without overflow after which the scale doubles."""
    hysteresis: int = Field(2, ge=1)
    """Number of the first overflow that halves the scale.

    1: the first overflow halves it. 2: the first overflow only skips its step. Counting starts
    again when the scale doubles.
    """
    consecutive_hysteresis: bool = False
    """True if counting also starts again after each step without overflow."""
    minimum: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Smallest scale. An overflow at this scale ends the run with an error."""

    @model_validator(mode="after")
    def _starts_above_minimum(self) -> Self:
        if self.dynamic and FACTOR**self.initial_scale_power < self.minimum:
            raise ValueError(
                f"the initial loss scale is 2^{self.initial_scale_power} ="
                f" {FACTOR**self.initial_scale_power:g}, below the minimum of {self.minimum:g};"
                " lower min_loss_scale, or raise initial_scale_power"
            )
        return self

    @property
    def dynamic(self) -> bool:
        """True if overflows change the scale."""
        return self.static == 0


class Precision(Technique):
    """Dtypes of computation and of reduction, and the loss scale."""

    compute: ComputeDtype | None = None
    """Dtype of forward and backward, or None for the dtype of the parameters."""
    reduce: ReduceDtype | None = None
    """Dtype of the gradient reduction.

    None means float32 if `compute` is set, and otherwise the dtype of the gradients.
    """
    loss_scale: LossScale | None = None
    """Settings of loss scaling, for float16 only."""
    check_overflow: bool = False
    """True to skip optimizer steps with non-finite gradients, as loss scaling always does."""
    float32_modules: tuple[str, ...] = ()
    """Names or patterns of modules that compute in float32 if `compute` is set.

    See `model.float32`.
    """

    @property
    def reduction(self) -> ReduceDtype | None:
        """Dtype of the gradient reduction, or None for the dtype of the parameters."""
        if self.reduce is None and self.compute:
            return "float32"
        return self.reduce

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Store the dtypes in the settings with which `DataParallel` shards."""
        if self.reduction is not None:
            parts = parts.with_shard(reduce_dtype=dtype_of(self.reduction))
        if self.compute is None:
            return parts
        is_float16 = self.compute == "float16"
        return parts.with_shard(
            float32_modules=float32_modules(
                parts.model, self.float32_modules, is_float16=is_float16
            ),
            compute_dtype=dtype_of(self.compute),
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Store the element sizes in the ledger, for `DataParallel.account`."""
        if self.compute is not None:
            compute_bytes = np.full_like(ledger.dp_shard, dtype_of(self.compute).itemsize)
            ledger = ledger.with_(compute_bytes=compute_bytes)
        if self.reduction is not None:
            reduce_bytes = np.full_like(ledger.dp_shard, dtype_of(self.reduction).itemsize)
            ledger = ledger.with_(reduce_bytes=reduce_bytes)
        return ledger


class LossScaler:
    """Loss scale of a run, with its state for a checkpoint. See Note [Loss scaling]."""

    def __init__(self, policy: LossScale) -> None:
        self.policy = policy
        self.state = first_state(policy)

    @property
    def scale(self) -> float:
        """Current loss scale. Multiply the loss by it, and divide the gradients by it."""
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """Compute the next scale. Call it once per optimizer step, skipped or not, after unscaling.

        Raises:
            LossScaleError: See `next_state`.
        """
        self.state = next_state(self.policy, self.state, overflow=overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Python numbers."""
        return {**asdict(self.state), "dynamic": self.policy.dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`, adjusted to the settings of this run.

        If the scale is static in this run or was static in the saved run, only the step count is
        restored. Otherwise a scale below `minimum` is raised to it, and an allowance above
        `hysteresis` is reduced to it.

        Raises:
            CheckpointError: An entry is missing.
        """
        names = [f.name for f in fields(ScaleState)] + ["dynamic"]
        missing = [name for name in names if name not in state]
        if missing:
            raise CheckpointError(
                f"the saved loss scale has no {', '.join(missing)} (it has"
                f" {', '.join(sorted(state)) or 'nothing'}), so the checkpoint is damaged; load"
                " another one"
            )
        if not self.policy.dynamic or not state["dynamic"]:
            # The first doubling of a run that turns dynamic comes a window after now, not after
            # step 0.
            self.state = replace(
                first_state(self.policy),
                step=int(state["step"]),
                last_overflow=int(state["step"]) - 1,
            )
            return
        self.state = ScaleState(
            scale=max(float(state["scale"]), self.policy.minimum),
            step=int(state["step"]),
            last_overflow=int(state["last_overflow"]),
            allowance=min(int(state["allowance"]), self.policy.hysteresis),
        )


@dataclass(frozen=True)
class ScaleState:
    """State from which the next loss scale is computed."""

    scale: float
    """Factor of the loss in the next step."""
    step: int
    """Optimizer steps so far, skipped ones included."""
    last_overflow: int
    """Index (from 0) of the last step that overflowed, or -1 before the first one."""
    allowance: int
    """Overflows until the scale is halved, that one included: `hysteresis` at first."""


def first_state(policy: LossScale) -> ScaleState:
    """Return the state before the first step."""
    scale = policy.static
    if policy.dynamic:
        scale = FACTOR**policy.initial_scale_power
    return ScaleState(scale=scale, step=0, last_overflow=-1, allowance=policy.hysteresis)


def next_state(policy: LossScale, state: ScaleState, *, overflow: bool) -> ScaleState:
    """Return the state after a step.

    The allowance is the number of overflows until the scale is halved. With index `i = state.step`,
    as in DeepSpeed 0.19.8 (`runtime/fp16/loss_scaler.py`, `DynamicLossScaler.update_scale`):

    - Overflow with allowance 1: the scale becomes max(scale / 2, minimum). The allowance stays 1,
      so the next overflow halves the scale again.
    - Overflow with a larger allowance: the allowance decreases by 1.
    - No overflow: let n = i - last_overflow - 1. If n > 0 and n is a multiple of `window`, the
      scale doubles and the allowance is restored to `hysteresis`.

    Args:
        policy: The settings.
        state: The state before the step.
        overflow: Whether a gradient on any rank was inf or nan, so that the step was skipped.

    Raises:
        LossScaleError: The scale would have to go below `minimum`.
    """
    if not policy.dynamic:
        return replace(state, step=state.step + 1)
    if overflow:
        return _after_overflow(policy, state)
    stable_steps = state.step - state.last_overflow - 1
    doubles = stable_steps > 0 and stable_steps % policy.window == 0
    scale = state.scale
    if doubles:
        scale *= FACTOR
    allowance = state.allowance
    if doubles or policy.consecutive_hysteresis:
        allowance = policy.hysteresis
    return replace(state, scale=scale, allowance=allowance, step=state.step + 1)


def _after_overflow(policy: LossScale, state: ScaleState) -> ScaleState:
    if state.allowance > 1:
        return replace(
            state, allowance=state.allowance - 1, last_overflow=state.step, step=state.step + 1
        )
    if state.scale == policy.minimum:
        raise LossScaleError(
            f"optimizer step {state.step + 1}: gradients are not finite although the loss scale is"
            f" {state.scale:g}, the smallest allowed (fp16.min_loss_scale = {policy.minimum:g});"
            " train with bf16 instead of fp16, lower the learning rate or clip"
            " (gradient_clipping), or look for nan in the data and the loss"
        )
    # The allowance stays 1, so that further overflows in a row halve at once.
    scale = max(state.scale / FACTOR, policy.minimum)
    return replace(state, scale=scale, last_overflow=state.step, step=state.step + 1)


class LossScaleError(PlaitError):
    """Raised if gradients are not finite even at the smallest allowed loss scale."""
