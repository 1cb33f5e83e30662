"""Mistakes in an optimizer or a schedule that need no model are refused when they are read."""

import dataclasses
import json

import pytest
import yaml
from pydantic import ValidationError

from plait.config.schema import lr_schedules, optimizers
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from tests.unit.config.cases import check_refusals


def test_the_case_of_a_type_does_not_matter():
    for name in ("AdamW", "Adam", "Muon", "RMSprop", "Lion"):
        for spelling in (name.lower(), name.upper()):
            assert OptimizerSpec(type=spelling).type == name


TYPES = {
    OptimizerSpec: """
    AdmW -> neither an optimizer of DeepSpeed or torch nor a path of a class; did you mean `AdamW`?
    OneBitAdam -> it cannot be used: DeepSpeed removed it in 0.19
    MuAdam -> it cannot be used: its learning rates follow the base shapes
    LBFGS -> it cannot be used: it evaluates the loss several times a step
""",
    SchedulerSpec: """
    WarmupLr -> not a schedule of DeepSpeed, Transformers or torch; did you mean `WarmupLR`?
    cosin -> not a schedule of DeepSpeed, Transformers or torch; did you mean `cosine`?
    zzz -> known are ConstantLR
    LambdaLR -> it cannot be used: it is made of functions
""",
}
PARAMETERS = {
    OptimizerSpec: """
    AdamW "lrr": 1 -> `lrr` is not a parameter of AdamW; did you mean `lr`?
    AdamW "params": [] -> `params` is not a parameter of AdamW
    AdamW "differentiable": true -> `differentiable` is not a parameter of AdamW
    Adam "decoupled_weight_decay": true -> `decoupled_weight_decay` is not a parameter of Adam
    AdamW "lr": -1 -> `lr` is -1: it must be at least 0
    AdamW "lr": true -> `lr` is True: true and false are not numbers
    AdamW "lr": "fast" -> `lr` is 'fast': it must be a number
    AdamW "lr": .nan -> `lr` is nan
    AdamW "betas": [0.9] -> `betas` is [0.9]
    AdamW "betas": [0.9, 1] -> `betas` is [0.9, 1]: it must be less than 1
    AdamW "bias_correction": false -> `bias_correction` can only be True, because torch's Adam
    AdamW "amsgrad": "auto" -> `amsgrad` is `auto`, and nothing determines its value
    AdamW "lrr": 1, "betas": [1, 2] -> `lrr` ... `betas`
    Muon "ns_method": "gram" -> `ns_method` can only be 'standard'
    SGD "betas": [0.9, 0.99] -> `betas` is not a parameter of SGD
    SGD "dampening": "x" -> `dampening` is 'x': it must be a number
""",
    SchedulerSpec: """
    WarmupLR "warmup_num_step": 3 -> not a parameter of WarmupLR; did you mean `warmup_num_steps`?
    WarmupLR "warmup_num_steps": 0 -> `warmup_num_steps` is 0: it must be at least 1
    WarmupLR "warmup_num_steps": 2.5 -> `warmup_num_steps` is 2.5: it must be a whole number
    WarmupLR "warmup_type": "lin" -> `warmup_type` is 'lin': it must be 'log' or 'linear'
    WarmupLR "warmup_min_lr": [0.1, -1] -> `warmup_min_lr` is [0.1, -1]
    WarmupLR "warmup_type": "auto" -> `warmup_type` is `auto`, and nothing determines its value
    WarmupLR "last_batch_iteration": 5 -> the position of a schedule comes from the checkpoint
    WarmupCosineLR "warmup_max_lr": 0.1 -> the optimizer's own lr; set optimizer.params.lr
    OneCycle "cycle_min_lr": 0.1 -> OneCycle needs `cycle_max_lr`; add it
    StepLR -> StepLR needs `step_size`; add it
    MultiStepLR "milestones": [3, "x"] -> `milestones` is [3, 'x']
    CyclicLR "base_lr": 0.1, "max_lr": 1, "mode": "zigzag" -> `mode` is 'zigzag'
    linear "num_warmup_steps": -1 -> `num_warmup_steps` is -1
    warmup_stable_decay -> needs `num_decay_steps`
""",
}


@pytest.mark.parametrize("field", ["type", "params"])
@pytest.mark.parametrize("spec", [OptimizerSpec, SchedulerSpec])
def test_unusable_types_and_parameters_are_refused(spec, field):
    def use(text):
        type, _, params = text.partition(" ")
        try:
            spec(type=type, params=yaml.safe_load(f"{{{params}}}"))
        except ValidationError as error:
            assert [problem["loc"] for problem in error.errors()] == [(field,)]
            raise

    check_refusals((TYPES if field == "type" else PARAMETERS)[spec], use)


def test_numbers_that_yaml_reads_as_text_are_numbers():
    spec = OptimizerSpec(params={"lr": "1e-4", "betas": [0.9, "0.95"]})
    assert spec.params == {"lr": 1e-4, "betas": (0.9, 0.95)}
    spec = SchedulerSpec(type="WarmupLR", params={"warmup_num_steps": 1e2})
    assert spec.params == {"warmup_num_steps": 100}


def test_parameters_of_a_class_by_path_are_not_checked():
    spec = OptimizerSpec(type="some.package.Optimizer", params={"anything": [1], "lr": "1e-3"})
    assert spec.params == {"anything": [1], "lr": 1e-3}


def test_a_spec_survives_json():
    for spec in (
        OptimizerSpec(params={"betas": [0.9, 0.95], "lr": "auto"}),
        SchedulerSpec(type="WarmupLR", params={"warmup_min_lr": [0, 1]}),
    ):
        assert spec.__class__(**json.loads(spec.model_dump_json())) == spec


def test_auto_parameters_have_transformers_defaults():
    automatic = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    defaults = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    spec = OptimizerSpec(params={**automatic, "fused": False})
    assert spec.resolved().params == {**defaults, "fused": False}

    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    params = {**dict.fromkeys(names, "auto"), "warmup_type": "linear"}
    spec = SchedulerSpec(type="WarmupDecayLR", params=params)
    for total, resolved in ((50, 50), (None, "auto")):
        expected = dict(zip(names, (0.0, 0.01, 1, resolved), strict=True))
        params = spec.resolved(learning_rate=0.01, total_steps=total).params
        assert params == {**expected, "warmup_type": "linear"}


def test_auto_equals_the_installed_training_arguments():
    transformers = pytest.importorskip("transformers")
    fields = dataclasses.fields(transformers.TrainingArguments)
    defaults = {field.name: field.default for field in fields}
    assert optimizers.AUTO["lr"] == defaults["learning_rate"]
    assert optimizers.AUTO["betas"] == (defaults["adam_beta1"], defaults["adam_beta2"])
    assert optimizers.AUTO["eps"] == defaults["adam_epsilon"]
    assert optimizers.AUTO["weight_decay"] == defaults["weight_decay"]
    assert lr_schedules.auto_value("warmup_num_steps") == max(1, defaults["warmup_steps"])
    assert lr_schedules.auto_value("num_warmup_steps") == defaults["warmup_steps"]


def test_every_schedule_knows_its_parameters():
    for kind in (*lr_schedules.DEEPSPEED, *lr_schedules.TRANSFORMERS, *lr_schedules.TORCH):
        names = lr_schedules.accepted(kind)
        assert not {"optimizer", "last_epoch", "scale_fn", "last_batch_iteration"} & set(names)
        for name in names:
            with pytest.raises(ValidationError):
                lr_schedules.convert(kind, name, object())
