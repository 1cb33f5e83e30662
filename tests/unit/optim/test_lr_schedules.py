"""Learning rates are DeepSpeed 0.19.8's to the last bit; torch's and Transformers' schedules are theirs; all of them resume from JSON."""

import json
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait import exact
from plait.config.schema import lr_schedules as known
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.errors import CheckpointError, ConfigError
from plait.optim.lr_schedules import build_scheduler
from plait.optim.optimizer import build_optimizer

# Each class keeps the order of DeepSpeed's operations. Parameters are attributes. `last` is DeepSpeed's
# last_batch_iteration, `lr` and `mom` are what it has written into the optimizer.


class Theirs:
    last, mom = -1, None
    warmup_num_steps, warmup_type = 1000, "log"

    def __init__(self, own, **params):
        self.own = own
        vars(self).update(params)
        self.warmup_num_steps = max(2, self.warmup_num_steps)
        self.start()

    def step(self):
        self.last += 1
        self.lr = self.rate()

    def warmup_share(self):
        if self.warmup_type == "log":
            return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last + 1)
        return self.last / self.warmup_num_steps


class TheirWarmupLR(Theirs):
    warmup_min_lr, warmup_max_lr = 0.0, None

    def start(self):
        self.max_lr = self.own if self.warmup_max_lr is None else self.warmup_max_lr
        self.lr = self.warmup_min_lr

    def rate(self):
        is_warm = self.last >= self.warmup_num_steps
        gamma = self.after_warmup() if is_warm else self.warmup_share()
        return self.warmup_min_lr + ((self.max_lr - self.warmup_min_lr) * gamma)

    def after_warmup(self):
        return 1.0


class TheirWarmupDecayLR(TheirWarmupLR):
    warmup_max_lr = 0.001

    def after_warmup(self):
        left = float(self.total_num_steps - self.last)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class TheirWarmupCosineLR(Theirs):
    warmup_min_ratio, cos_min_ratio = 0.0, 0.0001

    def start(self):
        self.lr = 0.0

    def rate(self):
        return self.own * self.ratio()

    def ratio(self):
        if self.last < self.warmup_num_steps:
            return self.warmup_min_ratio + self.warmup_share() * (1.0 - self.warmup_min_ratio)
        real_last_step = self.last - self.warmup_num_steps + 1
        real_total_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        cosine_progress = min(1.0, real_last_step / real_total_steps)
        ratio = (1 + math.cos(math.pi * cosine_progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


class TheirLRRangeTest(Theirs):
    lr_range_test_min_lr, lr_range_test_step_rate = 1e-3, 1.0
    lr_range_test_step_size, lr_range_test_staircase = 2000, False

    def start(self):
        self.lr = self.lr_range_test_min_lr

    def rate(self):
        interval = float(self.last + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)


class TheirOneCycle(Theirs):
    cycle_first_step_size, cycle_second_step_size = 2000, None
    cycle_first_stair_count, cycle_second_stair_count = 0, None
    cycle_min_mom, cycle_max_mom = 0.8, 0.9
    decay_step_size, decay_lr_rate, decay_mom_rate = 0, 0.0, 0.0

    def start(self):
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        self.first_size = float(first)
        self.second_size = float(first if second is None else second)
        self.total_size = self.first_size + self.second_size
        self.step_ratio = self.first_size / self.total_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        self.lr, self.mom = self.cycle_min_lr, self.cycle_min_mom

    def get_scale_factor(self):
        batch_iteration = self.last + 1
        cycle = math.floor(1 + batch_iteration / self.total_size)
        x = 1.0 + batch_iteration / self.total_size - cycle
        if x <= self.step_ratio:
            scale_factor = x / self.step_ratio
            stair_count = self.cycle_first_stair_count
        else:
            scale_factor = (x - 1) / (self.step_ratio - 1)
            stair_count = self.cycle_second_stair_count
        if stair_count > 0:
            position = batch_iteration % self.total_size
            if position <= self.first_size:
                stair_position = position * stair_count / self.first_size
            else:
                stair_position = (self.total_size - position) * stair_count / self.second_size
            scale_factor = math.floor(stair_position) / stair_count
        return scale_factor

    def decay(self, rate):
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1
        return 1 + rate * ((self.last - self.total_size + 1) / self.decay_step_size)

    def rate(self):
        low, high = self.cycle_min_lr, self.cycle_max_lr
        if self.last < self.total_size:
            momenta = self.cycle_max_mom - self.cycle_min_mom
            self.mom = self.cycle_max_mom - momenta * self.get_scale_factor()
            return low + (high - low) * self.get_scale_factor()
        self.mom = self.cycle_max_mom * self.decay(self.decay_mom_rate)
        return low / self.decay(self.decay_lr_rate)


THEIRS = {
    "WarmupLR": TheirWarmupLR,
    "WarmupDecayLR": TheirWarmupDecayLR,
    "WarmupCosineLR": TheirWarmupCosineLR,
    "LRRangeTest": TheirLRRangeTest,
    "OneCycle": TheirOneCycle,
}

RATE, RATIO, MOMENTUM = st.floats(0, 0.2), st.floats(0, 1), st.floats(0, 0.95)
WARMUP = {"warmup_num_steps": st.integers(1, 60), "warmup_type": st.sampled_from(["log", "linear"])}
RATES = {"warmup_min_lr": RATE, "warmup_max_lr": RATE}
PARAMS = {
    "WarmupLR": st.fixed_dictionaries({}, optional={**WARMUP, **RATES}),
    "WarmupDecayLR": st.fixed_dictionaries({"total_num_steps": st.integers(1, 120)}, optional={**WARMUP, **RATES}),
    "WarmupCosineLR": st.fixed_dictionaries(
        {"total_num_steps": st.integers(1, 120)}, optional={**WARMUP, "warmup_min_ratio": RATIO, "cos_min_ratio": RATIO}
    ),
    "LRRangeTest": st.fixed_dictionaries(
        {},
        optional={
            "lr_range_test_min_lr": RATE,
            "lr_range_test_step_size": st.integers(1, 100),
            "lr_range_test_step_rate": st.floats(0, 5),
            "lr_range_test_staircase": st.booleans(),
        },
    ),
    "OneCycle": st.fixed_dictionaries(
        {"cycle_min_lr": RATE, "cycle_max_lr": RATE, "cycle_first_step_size": st.integers(1, 40)},
        optional={
            "cycle_second_step_size": st.integers(0, 40),
            "cycle_first_stair_count": st.integers(-1, 10),
            "cycle_second_stair_count": st.integers(0, 10),
            "decay_step_size": st.integers(0, 20),
            "decay_lr_rate": st.floats(0, 2),
            "cycle_min_mom": MOMENTUM,
            "cycle_max_mom": MOMENTUM,
            "decay_mom_rate": st.sampled_from([0.0, 1e-5, -1e-5]),
        },
    ),
}  # fmt: skip


def make(kind, params=None, *, lr=0.05, total_steps=None, type="AdamW"):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(OptimizerSpec(type=type, params={"lr": lr}), [("p", parameter)])
    spec = SchedulerSpec(type=kind, params=params or {})
    return parameter, optimizer, build_scheduler(spec, optimizer, total_steps=total_steps)


def run(made, steps):
    _, optimizer, scheduler = made
    seen = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        assert scheduler.get_last_lr() == [group["lr"]]
        seen.append((group["lr"], group["betas"]))
        optimizer.step()  # Without gradients: schedulers only count the steps.
        scheduler.step()
    return seen


@pytest.mark.parametrize("kind", sorted(THEIRS))
@given(data=st.data())
def test_every_rate_is_deepspeeds_to_the_last_bit(kind, data):
    params = data.draw(PARAMS[kind])
    own = data.draw(RATE)
    theirs = THEIRS[kind](own, **params)
    for ours in run(make(kind, params, lr=own), 140):
        betas = (0.9, 0.999) if theirs.mom is None else (theirs.mom, 0.99)
        assert ours == (theirs.lr, betas), f"at index {theirs.last}"
        theirs.step()


def test_each_group_has_its_own_rates():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    rates = (0.1, 0.2)
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    )
    params = {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_lr": [0.0, 0.1]}
    spec = SchedulerSpec(type="WarmupLR", params=params)
    scheduler = build_scheduler(spec, optimizer, total_steps=None)
    optimizer.step()
    for expected in ([0, 0.1], [0, 0.1], [0.05, 0.15], [0.1, 0.2]):
        assert scheduler.get_last_lr() == pytest.approx(expected)
        scheduler.step()


def test_a_list_of_another_length_than_the_groups_is_refused():
    words = (
        r"warmup_min_lr = \[?.*: it has 2 values and the optimizer has 1 parameter group; use one"
    )
    with pytest.raises(ConfigError, match=words):
        make("WarmupLR", {"warmup_min_lr": [0.0, 0.1]})


@pytest.mark.parametrize(
    ("kind", "name"),
    [("WarmupDecayLR", "total_num_steps"), ("WarmupCosineLR", "total_num_steps"), ("CosineAnnealingLR", "T_max"), ("linear", "num_training_steps")],
)  # fmt: skip
def test_the_length_of_the_run_fills_a_missing_length(kind, name):
    warm = {"warmup_num_steps": 3} if kind.startswith("Warmup") else {}
    written = run(make(kind, {**warm, name: 40}), 45)
    assert run(make(kind, warm, total_steps=40), 45) == written
    assert run(make(kind, {**warm, name: "auto"}, total_steps=40), 45) == written
    assert run(make(kind, {**warm, name: 40}, total_steps=99), 45) == written
    assert run(make(kind, warm, total_steps=30), 45) != written
    words = f"scheduler.params.{name}.*{kind} needs the length of the run.*set {name}"
    for params in (warm, {**warm, name: "auto"}):
        with pytest.raises(ConfigError, match=words):
            make(kind, params)


def test_auto_takes_hugging_faces_values():
    values = {
        "warmup_min_lr": 0, "warmup_max_lr": 0.03, "warmup_num_steps": 1, "total_num_steps": 20
    }  # fmt: skip
    automatic = make("WarmupDecayLR", dict.fromkeys(values, "auto"), lr=0.03, total_steps=20)
    assert run(automatic, 25) == run(make("WarmupDecayLR", values), 25)


def test_a_run_shorter_than_its_warmup_is_said(caplog):
    make("WarmupDecayLR", {"warmup_num_steps": 100}, total_steps=50)
    assert "50 steps, fewer than the 100 of the warm-up" in caplog.text


CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5}


def test_momentum_is_cycled_only_where_there_is_one():
    _, optimizer, _ = make("OneCycle", CYCLE, type="SGD")
    assert "betas" not in optimizer.param_groups[0]
    assert run(make("OneCycle", {**CYCLE, "cycle_momentum": False}), 3)[2][1] == (0.9, 0.999)
    with pytest.raises(ConfigError, match="cycle_momentum = True: SGD has no betas"):
        make("OneCycle", {**CYCLE, "cycle_momentum": True}, type="SGD")


def test_a_momentum_that_would_reach_one_is_refused():
    rising = {**CYCLE, "decay_step_size": 1, "decay_mom_rate": 0.05}
    words = r"decay_mom_rate = 0.05: the momentum is 1\.\d+ at step 20"
    with pytest.raises(ConfigError, match=words):
        make("OneCycle", rising, total_steps=20)
    unknown_length = make("OneCycle", rising)
    with pytest.raises(ConfigError, match="outside 0 to 1"):
        run(unknown_length, 20)


NEEDED = {
    "OneCycle": CYCLE,
    "StepLR": {"step_size": 7},
    "MultiStepLR": {"milestones": [3, 9, 15]},
    "ExponentialLR": {"gamma": 0.9},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "OneCycleLR": {"max_lr": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
}
EVERY = [*known.DEEPSPEED, *known.TORCH, *known.TRANSFORMERS]


@pytest.mark.parametrize("kind", EVERY)
def test_every_schedule_goes_on_after_a_round_trip_through_json(kind):
    if kind in known.TRANSFORMERS:
        pytest.importorskip("transformers")
    uninterrupted = run(make(kind, NEEDED.get(kind), total_steps=30), 25)
    stopped = make(kind, NEEDED.get(kind), total_steps=30)
    first = run(stopped, 11)
    resumed = make(kind, NEEDED.get(kind), total_steps=30)
    resumed[1].load_state_dict(stopped[1].state_dict())
    state = json.loads(json.dumps(exact.encode(stopped[2].state_dict())))
    resumed[2].load_state_dict(exact.decode(state, resumed[2].state_dict()))
    assert first + run(resumed, 14) == uninterrupted
    assert len(set(uninterrupted)) > 1 or kind.startswith(("constant", "warmup_stable"))


def test_loading_a_position_sets_the_rate_at_once():
    made = make("WarmupLR", {"warmup_num_steps": 10})
    expected = run(make("WarmupLR", {"warmup_num_steps": 10}), 7)[6][0]
    made[2].load_state_dict({"last_epoch": 6})
    assert made[1].param_groups[0]["lr"] == expected == made[2].get_last_lr()[0]
    cycled = make("OneCycle", CYCLE)
    expected = run(make("OneCycle", CYCLE), 4)[3]
    cycled[2].load_state_dict({"last_epoch": 3})
    assert (cycled[1].param_groups[0]["lr"], cycled[1].param_groups[0]["betas"]) == expected
    with pytest.raises(CheckpointError, match="has no `last_epoch`"):
        made[2].load_state_dict({"step": 6})


def adamw():
    parameter = nn.Parameter(torch.ones(2))
    return parameter, torch.optim.AdamW([parameter], lr=0.05)


def test_torch_schedules_are_torchs():
    parameter, optimizer = adamw()
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, **NEEDED["MultiStepLR"])
    ours = make("MultiStepLR", NEEDED["MultiStepLR"])
    assert run((parameter, optimizer, theirs), 20) == run(ours, 20)


def test_transformers_schedules_are_its_own():
    transformers = pytest.importorskip("transformers")
    parameter, optimizer = adamw()
    lengths = {"num_warmup_steps": 4, "num_training_steps": 30}
    cycles = {"num_cycles": 1.5}
    theirs = transformers.get_scheduler(
        "cosine", optimizer, **lengths, scheduler_specific_kwargs=cycles
    )
    ours = make("cosine", {"num_warmup_steps": 4, **cycles}, total_steps=30)
    assert run(ours, 30) == run((parameter, optimizer, theirs), 30)


def test_the_table_of_transformers_schedules_is_complete():
    optimization = pytest.importorskip("transformers.optimization")
    import inspect

    theirs = {kind.value: build for kind, build in optimization.TYPE_TO_SCHEDULER_FUNCTION.items()}
    assert set(theirs) - set(known.REFUSED) == set(known.TRANSFORMERS)
    for kind, names in known.TRANSFORMERS.items():
        parameters = set(inspect.signature(theirs[kind]).parameters)
        assert parameters - {"optimizer", "last_epoch"} == set(names), kind


def test_without_transformers_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = "scheduler.type = 'cosine': .*not installed; pip install transformers"
    with pytest.raises(ConfigError, match=words):
        make("cosine", total_steps=10)


def test_what_a_schedule_itself_refuses_is_a_config_error():
    words = "LinearLR says: Starting multiplicative factor.*; correct the value"
    with pytest.raises(ConfigError, match=words):
        make("LinearLR", {"start_factor": 7})
    with pytest.raises(ConfigError, match="cosine_with_min_lr says: .*min_lr"):
        make("cosine_with_min_lr", total_steps=10)


def megatron(done, *, samples, high, low, warm, total, style, init):
    """Return Megatron-LM's rate. Its scheduler counts samples, of which a step takes `samples`."""
    steps, warm, total = done * samples, warm * samples, total * samples
    if warm > 0 and steps <= warm:
        return init + (high - init) * float(steps) / float(warm)
    if style == "constant":
        return high
    if steps > total:
        return low
    if style == "inverse-square-root":
        return max(low, high * max(warm, 1) ** 0.5 / (max(steps, 1) ** 0.5))
    ratio = float(steps - warm) / float(total - warm)
    share = 1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return low + share * (high - low)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warm", [0, 7])
def test_every_rate_is_megatrons(style, warm):
    """D6, E8: by its formula, also after the end of the decay."""
    params = {"warmup_num_steps": warm, "total_num_steps": 40, "min_lr": 0.004, "init_lr": 0.001}
    ours = make("MegatronLR", {"decay_style": style, **params}, lr=0.05)
    # Without a warm-up this style depends on the batch.
    samples = 1 if style == "inverse-square-root" and not warm else 16
    settings = {"high": 0.05, "low": 0.004, "warm": warm, "total": 40, "style": style}
    expected = [megatron(n, samples=samples, init=0.001, **settings) for n in range(50)]
    assert [lr for lr, _ in run(ours, 50)] == pytest.approx(expected, rel=1e-12)
    share = {"decay_style": "cosine", "warmup_fraction": 0.25}
    assert run(make("MegatronLR", share, total_steps=40), 11)[10][0] == 0.05


@pytest.mark.parametrize(
    ("params", "words", "remedy"),
    [
        ({"min_lr": 1}, "which is the highest rate; use at most 0.0001234567890123", {"min_lr": 0.0001234567890123}),
        ({"warmup_num_steps": 50}, "before a warm-up of 50 steps does; use less than 40", {"warmup_num_steps": 39}),
        ({"warmup_num_steps": 5, "warmup_fraction": 0.1}, "sets the same length", {"warmup_fraction": 0.1}),
    ],
)  # fmt: skip
def test_what_megatron_asserts_is_refused(params, words, remedy):
    """The numbers of the message are accepted."""
    with pytest.raises(ConfigError, match=words):
        make("MegatronLR", {"total_num_steps": 40, **params}, lr=0.0001234567890123)
    make("MegatronLR", {"total_num_steps": 40, **remedy}, lr=0.0001234567890123)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_is_megatrons(style):
    """Against `get_lr` of Megatron-LM's core/optimizer_param_scheduler.py, as it stands there, with its counts in steps."""
    highest, lowest, warm, total, falls = 0.05, 0.005, 5, 40, 12

    def get_lr(num_steps):
        if num_steps <= warm:
            return 0.0 + (highest - 0.0) * float(num_steps) / float(warm)
        if num_steps > total:
            return lowest
        start = total - falls
        if num_steps <= start:
            coeff = 1.0
        else:
            ratio = float(num_steps - start) / float(falls)
            coeff = {
                "linear": 1.0 - ratio,
                "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
                "exponential": (2.0 * math.pow(0.5, ratio)) - 1.0,
                "minus_sqrt": 1.0 - math.sqrt(ratio),
            }[style]
        return lowest + coeff * (highest - lowest)

    params = {
        "decay_style": "WSD", "wsd_decay_style": style, "wsd_decay_steps": falls,
        "total_num_steps": total, "min_lr": lowest, "warmup_num_steps": warm,
    }  # fmt: skip
    rates = run(make("MegatronLR", params, lr=highest), 45)
    assert [lr for lr, _ in rates] == [get_lr(step) for step in range(45)]
    missing = {name: value for name, value in params.items() if name != "wsd_decay_steps"}
    for wrong in ({**params, "wsd_decay_steps": 36}, missing):
        with pytest.raises(ConfigError, match="wsd_decay_steps"):
            make("MegatronLR", {**wrong, "min_lr": 0.0}, lr=highest)
