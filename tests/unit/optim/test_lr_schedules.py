"""Learning rates equal those of DeepSpeed 0.19.8, torch, Transformers and Megatron-LM."""

import inspect
import json
import math
import sys

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import plait
from plait import exact
from plait.config.schema import lr_schedules
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.errors import CheckpointError, ConfigError
from plait.optim.lr_schedules import build_scheduler
from plait.optim.optimizer import build_optimizer


class Reference:
    """A schedule of DeepSpeed, with its operations in the same order.

    Class attributes are defaults of its parameters. `last` is DeepSpeed's last_batch_iteration,
    `initial_lr` the rate of the optimizer, and `lr` and `mom` are what DeepSpeed writes into it.
    """

    last = -1
    mom = None
    warmup_num_steps = 1000
    warmup_type = "log"

    def __init__(self, initial_lr, **params):
        self.initial_lr = initial_lr
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


class ReferenceWarmupLR(Reference):
    warmup_min_lr = 0.0
    warmup_max_lr = None

    def start(self):
        self.max_lr = self.initial_lr if self.warmup_max_lr is None else self.warmup_max_lr
        self.lr = self.warmup_min_lr

    def rate(self):
        is_warm = self.last >= self.warmup_num_steps
        gamma = self.after_warmup() if is_warm else self.warmup_share()
        return self.warmup_min_lr + ((self.max_lr - self.warmup_min_lr) * gamma)

    def after_warmup(self):
        return 1.0


class ReferenceWarmupDecayLR(ReferenceWarmupLR):
    warmup_max_lr = 0.001

    def after_warmup(self):
        remaining = float(self.total_num_steps - self.last)
        return max(0.0, remaining / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class ReferenceWarmupCosineLR(Reference):
    warmup_min_ratio = 0.0
    cos_min_ratio = 0.0001

    def start(self):
        self.lr = 0.0

    def rate(self):
        return self.initial_lr * self.ratio()

    def ratio(self):
        if self.last < self.warmup_num_steps:
            return self.warmup_min_ratio + self.warmup_share() * (1.0 - self.warmup_min_ratio)
        real_last_step = self.last - self.warmup_num_steps + 1
        real_total_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        cosine_progress = min(1.0, real_last_step / real_total_steps)
        ratio = (1 + math.cos(math.pi * cosine_progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


class ReferenceLRRangeTest(Reference):
    lr_range_test_min_lr = 1e-3
    lr_range_test_step_rate = 1.0
    lr_range_test_step_size = 2000
    lr_range_test_staircase = False

    def start(self):
        self.lr = self.lr_range_test_min_lr

    def rate(self):
        interval = float(self.last + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)


class ReferenceOneCycle(Reference):
    cycle_first_step_size = 2000
    cycle_second_step_size = None
    cycle_first_stair_count = 0
    cycle_second_stair_count = None
    cycle_min_mom = 0.8
    cycle_max_mom = 0.9
    decay_step_size = 0
    decay_lr_rate = 0.0
    decay_mom_rate = 0.0

    def start(self):
        if self.cycle_second_step_size is None:
            self.cycle_second_step_size = self.cycle_first_step_size
        self.first_size = float(self.cycle_first_step_size)
        self.second_size = float(self.cycle_second_step_size)
        self.total_size = self.first_size + self.second_size
        self.step_ratio = self.first_size / self.total_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        self.lr = self.cycle_min_lr
        self.mom = self.cycle_min_mom

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
        if self.last < self.total_size:
            momenta = self.cycle_max_mom - self.cycle_min_mom
            self.mom = self.cycle_max_mom - momenta * self.get_scale_factor()
            rates = self.cycle_max_lr - self.cycle_min_lr
            return self.cycle_min_lr + rates * self.get_scale_factor()
        self.mom = self.cycle_max_mom * self.decay(self.decay_mom_rate)
        return self.cycle_min_lr / self.decay(self.decay_lr_rate)


REFERENCES = {
    "WarmupLR": ReferenceWarmupLR,
    "WarmupDecayLR": ReferenceWarmupDecayLR,
    "WarmupCosineLR": ReferenceWarmupCosineLR,
    "LRRangeTest": ReferenceLRRangeTest,
    "OneCycle": ReferenceOneCycle,
}

RATE = st.floats(0, 0.2)
RATIO = st.floats(0, 1)
MOMENTUM = st.floats(0, 0.95)
LENGTH = {"total_num_steps": st.integers(1, 120)}
WARMUP = {"warmup_num_steps": st.integers(1, 60), "warmup_type": st.sampled_from(["log", "linear"])}
RATES = {"warmup_min_lr": RATE, "warmup_max_lr": RATE}
RATIOS = {"warmup_min_ratio": RATIO, "cos_min_ratio": RATIO}
PARAMS = {
    "WarmupLR": st.fixed_dictionaries({}, optional={**WARMUP, **RATES}),
    "WarmupDecayLR": st.fixed_dictionaries(LENGTH, optional={**WARMUP, **RATES}),
    "WarmupCosineLR": st.fixed_dictionaries(LENGTH, optional={**WARMUP, **RATIOS}),
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
}


def scheduled(kind, params=None, *, lr=0.05, total_steps=None, type="AdamW"):
    """Return an optimizer with one parameter, and its scheduler."""
    named = [("p", nn.Parameter(torch.ones(2)))]
    optimizer = build_optimizer(OptimizerSpec(type=type, params={"lr": lr}), named)
    spec = SchedulerSpec(type=kind, params=params or {})
    return optimizer, build_scheduler(spec, optimizer, total_steps=total_steps)


def settings_of(optimizer):
    return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]


def run(optimizer, scheduler, *, steps):
    """Return rate and betas before each step."""
    settings = []
    for _ in range(steps):
        settings.append(settings_of(optimizer))
        assert scheduler.get_last_lr() == [settings[-1][0]]
        # There are no gradients: schedulers only count the steps.
        optimizer.step()
        scheduler.step()
    return settings


def rates(optimizer, scheduler, *, steps):
    return [rate for rate, _ in run(optimizer, scheduler, steps=steps)]


@pytest.mark.parametrize("kind", sorted(REFERENCES))
@given(data=st.data())
def test_every_rate_equals_deepspeed(kind, data):
    """Rates and momenta have the same bits."""
    params = data.draw(PARAMS[kind])
    lr = data.draw(RATE)
    reference = REFERENCES[kind](lr, **params)
    for actual in run(*scheduled(kind, params, lr=lr), steps=140):
        betas = (0.9, 0.999) if reference.mom is None else (reference.mom, 0.99)
        assert actual == (reference.lr, betas), f"at index {reference.last}"
        reference.step()


def test_each_group_has_its_own_rates():
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.AdamW(groups)
    params = {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_lr": [0.0, 0.1]}
    spec = SchedulerSpec(type="WarmupLR", params=params)
    scheduler = build_scheduler(spec, optimizer, total_steps=None)
    optimizer.step()
    for expected in ([0, 0.1], [0, 0.1], [0.05, 0.15], [0.1, 0.2]):
        assert scheduler.get_last_lr() == pytest.approx(expected)
        scheduler.step()


def test_a_list_of_another_length_than_the_groups_is_refused():
    message = (
        r"warmup_min_lr = .*: it has 2 values and the optimizer has 1 parameter group; use one"
    )
    with pytest.raises(ConfigError, match=message):
        scheduled("WarmupLR", {"warmup_min_lr": [0.0, 0.1]})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("WarmupDecayLR", "total_num_steps"),
        ("WarmupCosineLR", "total_num_steps"),
        ("CosineAnnealingLR", "T_max"),
        ("linear", "num_training_steps"),
    ],
)
def test_the_length_of_the_run_is_the_default_length(kind, name):
    warmup = {"warmup_num_steps": 3} if kind.startswith("Warmup") else {}

    def rates_with(params, total_steps=None):
        return rates(*scheduled(kind, {**warmup, **params}, total_steps=total_steps), steps=45)

    explicit = rates_with({name: 40})
    assert rates_with({}, total_steps=40) == explicit
    assert rates_with({name: "auto"}, total_steps=40) == explicit
    assert rates_with({name: 40}, total_steps=99) == explicit
    assert rates_with({}, total_steps=30) != explicit
    message = f"scheduler.params.{name}.*{kind} needs the length of the run.*set {name}"
    for params in ({}, {name: "auto"}):
        with pytest.raises(ConfigError, match=message):
            rates_with(params)


def test_auto_means_the_values_of_transformers():
    values = {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.03,
        "warmup_num_steps": 1,
        "total_num_steps": 20,
    }
    automatic = dict.fromkeys(values, "auto")
    actual = rates(*scheduled("WarmupDecayLR", automatic, lr=0.03, total_steps=20), steps=25)
    assert actual == rates(*scheduled("WarmupDecayLR", values), steps=25)


@pytest.mark.parametrize("is_built", [True, False])
def test_auto_is_the_rate_of_the_callers_optimizer(is_built):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))

    def sgd(parameters):
        groups = [{"params": list(parameters)[:2]}, {"params": list(parameters)[2:], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.3)

    params = {"warmup_num_steps": 2, "warmup_max_lr": "auto"}
    engine = plait.initialize(
        model,
        {
            "train_micro_batch_size_per_gpu": 1,
            "scheduler": {"type": "WarmupLR", "params": params},
        },
        loss_fn=plait.per_sample(lambda output, batch: output.sum()),
        optimizer=sgd(model.parameters()) if is_built else sgd,
    )
    for _ in range(3):
        engine.train_batch((torch.ones(1, 3), torch.ones(1)))
    assert engine.get_lr() == [0.3, 0.2]
    assert engine.config.scheduler.params["warmup_max_lr"] == (0.3, 0.2)
    engine.close()


def test_a_run_shorter_than_its_warmup_is_reported(caplog):
    scheduled("WarmupDecayLR", {"warmup_num_steps": 100}, total_steps=50)
    assert "50 steps, fewer than the 100 of the warm-up" in caplog.text


CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5}


def test_only_optimizers_with_betas_cycle_their_momentum():
    optimizer, _ = scheduled("OneCycle", CYCLE, type="SGD")
    assert "betas" not in optimizer.param_groups[0]
    constant = run(*scheduled("OneCycle", {**CYCLE, "cycle_momentum": False}), steps=3)
    assert constant[2][1] == (0.9, 0.999)
    with pytest.raises(ConfigError, match="cycle_momentum = True: SGD has no betas"):
        scheduled("OneCycle", {**CYCLE, "cycle_momentum": True}, type="SGD")


def test_a_momentum_that_would_reach_one_is_refused():
    rising = {**CYCLE, "decay_step_size": 1, "decay_mom_rate": 0.05}
    message = r"decay_mom_rate = 0.05: the momentum is 1\.\d+ at step 20"
    with pytest.raises(ConfigError, match=message):
        scheduled("OneCycle", rising, total_steps=20)
    # Without the length of the run it is known only at that step.
    with pytest.raises(ConfigError, match="outside 0 to 1"):
        run(*scheduled("OneCycle", rising), steps=20)


REQUIRED_PARAMS = {
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
EVERY = [*lr_schedules.DEEPSPEED, *lr_schedules.TORCH, *lr_schedules.TRANSFORMERS]


@pytest.mark.parametrize("kind", EVERY)
def test_every_schedule_resumes_from_json(kind):
    def start():
        return scheduled(kind, REQUIRED_PARAMS.get(kind), total_steps=30)

    uninterrupted = run(*start(), steps=25)
    optimizer, scheduler = start()
    before = run(optimizer, scheduler, steps=11)
    resumed_optimizer, resumed = start()
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    state = json.loads(json.dumps(exact.encode(scheduler.state_dict())))
    resumed.load_state_dict(exact.decode(state, resumed.state_dict()))
    assert before + run(resumed_optimizer, resumed, steps=14) == uninterrupted
    assert len(set(uninterrupted)) > 1 or kind.startswith(("constant", "warmup_stable"))


@pytest.mark.parametrize(
    ("kind", "params"), [("WarmupLR", {"warmup_num_steps": 10}), ("OneCycle", CYCLE)]
)
def test_loading_a_position_sets_the_rate_at_once(kind, params):
    expected = run(*scheduled(kind, params), steps=7)[6]
    optimizer, scheduler = scheduled(kind, params)
    scheduler.load_state_dict({"last_epoch": 6})
    assert settings_of(optimizer) == expected
    assert scheduler.get_last_lr() == [expected[0]]
    with pytest.raises(CheckpointError, match="has no `last_epoch`"):
        scheduler.load_state_dict({"step": 6})


def adamw():
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.05)


def test_schedules_of_torch():
    optimizer = adamw()
    params = REQUIRED_PARAMS["MultiStepLR"]
    reference = torch.optim.lr_scheduler.MultiStepLR(optimizer, **params)
    actual = run(*scheduled("MultiStepLR", params), steps=20)
    assert actual == run(optimizer, reference, steps=20)


def test_schedules_of_transformers():
    optimizer = adamw()
    lengths = {"num_warmup_steps": 4, "num_training_steps": 30}
    cycles = {"num_cycles": 1.5}
    reference = transformers.get_scheduler(
        "cosine", optimizer, **lengths, scheduler_specific_kwargs=cycles
    )
    params = {"num_warmup_steps": 4, **cycles}
    actual = run(*scheduled("cosine", params, total_steps=30), steps=30)
    assert actual == run(optimizer, reference, steps=30)


def test_the_table_of_transformers_schedules_is_complete():
    builders = {
        kind.value: build
        for kind, build in transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION.items()
    }
    assert set(builders) - set(lr_schedules.REFUSED) == set(lr_schedules.TRANSFORMERS)
    for kind, names in lr_schedules.TRANSFORMERS.items():
        parameters = set(inspect.signature(builders[kind]).parameters)
        assert parameters - {"optimizer", "last_epoch"} == set(names), kind


def test_missing_transformers_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "scheduler.type = 'cosine': .*not installed; pip install transformers"
    with pytest.raises(ConfigError, match=message):
        scheduled("cosine", total_steps=10)


def test_errors_of_a_schedule_are_config_errors():
    message = "LinearLR says: Starting multiplicative factor.*; correct the value"
    with pytest.raises(ConfigError, match=message):
        scheduled("LinearLR", {"start_factor": 7})
    with pytest.raises(ConfigError, match="cosine_with_min_lr says: .*min_lr"):
        scheduled("cosine_with_min_lr", total_steps=10)


class MegatronReference:
    """`get_lr` of Megatron-LM's core/optimizer_param_scheduler.py, with its operations in order.

    `scale` is the number by which Megatron-LM counts: samples per step, or 1.
    """

    max_lr = 0.05
    min_lr = 0.004
    init_lr = 0.001
    total_steps = 40
    wsd_decay_steps = 12

    def __init__(self, style, warmup_steps, *, scale, wsd_style=""):
        self.style = style
        self.wsd_style = wsd_style
        self.scale = scale
        self.warmup = warmup_steps * scale
        self.total = self.total_steps * scale

    def get_lr(self, step):
        count = step * self.scale
        if self.warmup > 0 and count <= self.warmup:
            rise = self.max_lr - self.init_lr
            return self.init_lr + rise * float(count) / float(self.warmup)
        if self.style == "constant":
            return self.max_lr
        if count > self.total:
            return self.min_lr
        if self.style == "inverse-square-root":
            rate = self.max_lr * max(self.warmup, 1) ** 0.5 / (max(count, 1) ** 0.5)
            return max(self.min_lr, rate)
        return self.min_lr + self.coefficient(count) * (self.max_lr - self.min_lr)

    def coefficient(self, count):
        if self.style == "WSD":
            start = self.total - self.wsd_decay_steps
            if count <= start:
                return 1.0
            ratio = float(count - start) / float(self.wsd_decay_steps)
        else:
            ratio = float(count - self.warmup) / float(self.total - self.warmup)
        return {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": (2.0 * math.pow(0.5, ratio)) - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }[self.wsd_style or self.style]


MEGATRON = {
    "total_num_steps": MegatronReference.total_steps,
    "min_lr": MegatronReference.min_lr,
    "init_lr": MegatronReference.init_lr,
}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_every_rate_equals_megatron(style, warmup):
    """The steps include some after the end of the decay."""
    # Without a warm-up the rate of this style depends on the batch size in Megatron-LM.
    scale = 1 if style == "inverse-square-root" and not warmup else 16
    reference = MegatronReference(style, warmup, scale=scale)
    params = {**MEGATRON, "decay_style": style, "warmup_num_steps": warmup}
    actual = rates(*scheduled("MegatronLR", params, lr=reference.max_lr), steps=50)
    assert actual == pytest.approx(list(map(reference.get_lr, range(50))), rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_every_rate_of_wsd_equals_megatron(style):
    reference = MegatronReference("WSD", 5, scale=1, wsd_style=style)
    params = {
        **MEGATRON,
        "decay_style": "WSD",
        "wsd_decay_style": style,
        "wsd_decay_steps": reference.wsd_decay_steps,
        "warmup_num_steps": 5,
    }
    actual = rates(*scheduled("MegatronLR", params, lr=reference.max_lr), steps=45)
    assert actual == list(map(reference.get_lr, range(45)))

    # A decay that begins in the warm-up, and a missing length, are refused.
    too_long = {**params, "wsd_decay_steps": 36}
    del params["wsd_decay_steps"]
    for wrong in (too_long, params):
        with pytest.raises(ConfigError, match="wsd_decay_steps"):
            scheduled("MegatronLR", wrong, lr=reference.max_lr)


def test_warmup_fraction_of_megatron():
    params = {"decay_style": "cosine", "warmup_fraction": 0.25}
    actual = rates(*scheduled("MegatronLR", params, total_steps=40), steps=11)
    # The warm-up begins at 0 by default.
    assert (actual[0], actual[10]) == (0.0, 0.05)


@pytest.mark.parametrize(
    ("params", "message", "remedy"),
    [
        (
            {"min_lr": 1},
            "which is the highest rate; use at most 0.0001234567890123",
            {"min_lr": 0.0001234567890123},
        ),
        (
            {"warmup_num_steps": 50},
            "before a warm-up of 50 steps does; use less than 40",
            {"warmup_num_steps": 39},
        ),
        (
            {"warmup_num_steps": 5, "warmup_fraction": 0.1},
            "sets the same length",
            {"warmup_fraction": 0.1},
        ),
    ],
)
def test_what_megatron_asserts_is_refused(params, message, remedy):
    """The values of the message are accepted."""
    # A rate with many digits: the message must not round it.
    lr = 0.0001234567890123
    with pytest.raises(ConfigError, match=message):
        scheduled("MegatronLR", {"total_num_steps": 40, **params}, lr=lr)
    scheduled("MegatronLR", {"total_num_steps": 40, **remedy}, lr=lr)
