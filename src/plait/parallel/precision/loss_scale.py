"""Loss scaling for float16: what can be set, and the rule that turns a sequence of overflows into a
sequence of scales.

float16 gradients below 6e-8 become zero, so the loss is multiplied by a scale before the backward
pass and the gradients are divided by the same scale before the optimizer. This file only decides
the scale. It reads no tensor: the decision "some gradient is not finite", shared by all ranks,
comes from outside, so every rank computes the same scale.

The sequence of scales is that of DeepSpeed 0.19.8 (`DynamicLossScaler` as its ZeRO optimizers use
it), at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from pydantic import Field, model_validator

from plait.errors import CheckpointError, PlaitError
from plait.policy import Policy

FACTOR = 2.0
"""The scale is halved and doubled; DeepSpeed has no setting for it."""


class LossScale(Policy):
    """How the loss is scaled for float16. `static` 0 means dynamic; the other fields are only read
    then.
    """

    static: float = Field(0.0, ge=0, allow_inf_nan=False)
    """A constant scale; 0 adapts the scale to the gradients."""
    initial_scale_power: int = Field(16, ge=0, le=126)
    """The first scale is 2 to this power. float32, in which the loss is scaled, ends below 2^128.
    """
    window: int = Field(1000, ge=1)
    """Steps without overflow after which the scale doubles."""
    hysteresis: int = Field(2, ge=1)
    """The overflow that first halves the scale: 1 halves at the first, 2 forgives one. A doubling
    restores the allowance.
    """
    consecutive_hysteresis: bool = False
    """Restore the allowance at every step without overflow, so that only overflows in a row count.
    """
    minimum: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The scale is not halved below this. An overflow at the minimum ends the run with an error."""

    @model_validator(mode="after")
    def _starts_above_minimum(self) -> Self:
        if self.dynamic and FACTOR**self.initial_scale_power < self.minimum:
            raise ValueError(
                f"the first scale is 2^{self.initial_scale_power} ="
                f" {FACTOR**self.initial_scale_power:g} and the minimum is {self.minimum:g}, above"
                " it; lower the minimum or raise the power"
            )
        return self

    @property
    def dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return self.static == 0


class LossScaleError(PlaitError):
    """The gradients are not finite even at the smallest allowed scale."""


@dataclass(frozen=True)
class ScaleState:
    """Everything that the next scale depends on."""

    scale: float
    """What the loss of the next step is multiplied by."""
    step: int
    """Optimizer steps so far, skipped ones included."""
    last_overflow: int
    """The index (from 0) of the last step that overflowed; -1 before the first."""
    allowance: int
    """The overflow, counted from now, that halves the scale: `hysteresis` less the overflows
    forgiven.
    """


def first_state(policy: LossScale) -> ScaleState:
    """The state before the first step."""
    scale = FACTOR**policy.initial_scale_power if policy.dynamic else policy.static
    return ScaleState(scale=scale, step=0, last_overflow=-1, allowance=policy.hysteresis)


def next_state(policy: LossScale, state: ScaleState, *, overflow: bool) -> ScaleState:
    """The state after one step; `overflow` says that some gradient, on any rank, was inf or nan, so
    that the step is skipped.

    With index `i = state.step`, as in DeepSpeed 0.19.8 (`runtime/fp16/loss_scaler.py`,
    `DynamicLossScaler.update_scale`):

    - overflow, allowance 1: scale = max(scale / 2, minimum); the allowance stays 1, so overflows
      that follow halve at once
    - overflow, allowance above 1: allowance - 1
    - no overflow: with n = i - last_overflow - 1, if n > 0 and n is a multiple of `window`, scale =
      2 scale, allowance restored

    Raises LossScaleError when the scale would have to go below `minimum`.
    """
    if not policy.dynamic:
        return replace(state, step=state.step + 1)
    if overflow:
        return _after_overflow(policy, state)
    stable_steps = state.step - state.last_overflow - 1
    double = stable_steps > 0 and stable_steps % policy.window == 0
    return replace(
        state,
        scale=state.scale * FACTOR if double else state.scale,
        allowance=policy.hysteresis if double or policy.consecutive_hysteresis else state.allowance,
        step=state.step + 1,
    )


def _after_overflow(policy: LossScale, state: ScaleState) -> ScaleState:
    if state.allowance > 1:
        return replace(
            state, allowance=state.allowance - 1, last_overflow=state.step, step=state.step + 1
        )
    if state.scale == policy.minimum:
        raise LossScaleError(
            f"optimizer step {state.step + 1}: gradients are not finite although the loss scale is"
            f" {state.scale:g}, the smallest allowed (fp16.min_loss_scale = {policy.minimum:g}), so"
            " smaller scales cannot help; train with bf16 instead of fp16, lower the learning rate"
            " or clip (gradient_clipping), or look for nan in the data and the loss"
        )
    scale = max(state.scale / FACTOR, policy.minimum)
    return replace(state, scale=scale, last_overflow=state.step, step=state.step + 1)


class LossScaler:
    """The current scale of a run, and its place in a checkpoint."""

    def __init__(self, policy: LossScale) -> None:
        self.policy = policy
        self.state = first_state(policy)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by, and the gradients are divided by, until the next
        `update`.
        """
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """Once an optimizer step, skipped or not, after the gradients were unscaled. Raises
        LossScaleError, see `next_state`.
        """
        self.state = next_state(self.policy, self.state, overflow=overflow)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {**asdict(self.state), "dynamic": self.policy.dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. This run's policy rules: a state of the other kind (static,
        dynamic) gives only the step count, a saved scale is raised to `minimum`, a saved allowance
        is cut to `hysteresis`. Raises CheckpointError for missing entries.
        """
        names = [f.name for f in fields(ScaleState)] + ["dynamic"]
        missing = [name for name in names if name not in state]
        if missing:
            raise CheckpointError(
                f"the saved loss scale has no {', '.join(missing)} (it has"
                f" {', '.join(sorted(state)) or 'nothing'})"
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
