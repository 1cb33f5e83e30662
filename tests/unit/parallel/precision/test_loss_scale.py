"""The loss scale equals DeepSpeed 0.19.8's for any settings and any sequence of overflows."""

import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.errors import CheckpointError
from plait.parallel.techniques.mixed_precision import LossScale, LossScaleError, LossScaler


class DeepSpeedScaler:
    """DeepSpeed's `DynamicLossScaler`, transcribed statement by statement.

    The source is deepspeed/runtime/fp16/loss_scaler.py of release 0.19.8.
    """

    def __init__(self, init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis):
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis

    def update_scale(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                if self.cur_scale == self.min_scale:
                    raise RuntimeError("Current loss scale already at minimum")
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if (stable_interval > 0) and (stable_interval % self.scale_window == 0):
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


POLICIES = st.builds(
    LossScale,
    initial_scale_power=st.integers(2, 10),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    minimum=st.sampled_from([0.25, 1.0, 3.0, 4.0]),
)
OVERFLOWS = st.lists(st.booleans(), max_size=80)


def scales(scaler, overflows):
    """Return the scale after every update, or "raises" where the run ends."""
    is_deepspeed = isinstance(scaler, DeepSpeedScaler)
    update = scaler.update_scale if is_deepspeed else scaler.update
    sequence = []
    for overflow in overflows:
        try:
            update(overflow)
        except (RuntimeError, LossScaleError):
            return [*sequence, "raises"]
        sequence.append(scaler.cur_scale if is_deepspeed else scaler.scale)
    return sequence


FORGIVEN_TWICE = LossScale(
    initial_scale_power=8, window=1, hysteresis=2, consecutive_hysteresis=False, minimum=1.0
)


# An overflow is forgiven, the scale doubles, and then another overflow is forgiven.
@example(policy=FORGIVEN_TWICE, overflows=[True, False, False, True, True, True])
@given(policy=POLICIES, overflows=OVERFLOWS)
def test_scale_equals_deepspeed(policy, overflows):
    initial = 2**policy.initial_scale_power
    allowances = (policy.hysteresis, policy.consecutive_hysteresis)
    reference = DeepSpeedScaler(initial, policy.window, policy.minimum, *allowances)
    assert scales(LossScaler(policy), overflows) == scales(reference, overflows)


def test_overflow_at_the_minimum_has_a_remedy():
    scaler = LossScaler(LossScale(initial_scale_power=1, hysteresis=1))
    scaler.update(True)
    before = scaler.state
    message = r"step 2: .* loss scale is 1, .*min_loss_scale = 1.* bf16"
    with pytest.raises(LossScaleError, match=message) as error:
        scaler.update(True)
    assert scaler.state == before
    assert error.value.exit_code == 1


def test_static_scale_never_changes():
    scaler = LossScaler(LossScale(static=128))
    assert scaler.scale == 128
    assert scales(scaler, [True, False] * 20) == [128] * 40
    assert scaler.state.step == 40


@given(policy=POLICIES, before=OVERFLOWS, after=OVERFLOWS)
def test_a_resumed_run_equals_an_uninterrupted_one(policy, before, after):
    uninterrupted = LossScaler(policy)
    assume("raises" not in scales(uninterrupted, before))
    resumed = LossScaler(policy)
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert resumed.state == uninterrupted.state
    assert scales(resumed, after) == scales(uninterrupted, after)


def test_settings_of_the_resumed_run_override_saved_ones():
    saved = LossScaler(LossScale(initial_scale_power=4, hysteresis=4)).state_dict()
    strict = LossScaler(LossScale(minimum=64, hysteresis=2))
    strict.load_state_dict(saved)
    assert strict.scale == 64
    assert strict.state.allowance == 2

    static = LossScaler(LossScale(static=8))
    static.load_state_dict(saved)
    assert static.scale == 8


def test_a_run_that_turns_dynamic_starts_a_new_window():
    static = LossScaler(LossScale(static=8))
    scales(static, [False] * 100)
    dynamic = LossScaler(LossScale(initial_scale_power=4, window=3))
    dynamic.load_state_dict(static.state_dict())
    assert dynamic.state.step == 100
    assert scales(dynamic, [False] * 5) == [16, 16, 16, 32, 32]


def test_an_incomplete_state_is_refused():
    with pytest.raises(CheckpointError, match="has no step, last_overflow, allowance, dynamic"):
        LossScaler(LossScale()).load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    "settings",
    [
        {"static": -1},
        {"static": float("nan")},
        {"window": 0},
        {"hysteresis": 0},
        {"minimum": 0},
        {"initial_scale_power": 127},
        {"initial_scale_power": 2, "minimum": 8},
        {"windw": 5},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValidationError):
        LossScale(**settings)
