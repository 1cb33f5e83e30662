"""From what is written to what is meant: other names, legacy forms, remarks, two names that disagree, overrides, refusals."""

import pytest
import torch

from plait.config.dialects.deepspeed import (
    SECRETS,
    TABLE,
    requests_nothing,
    type_problem,
)
from plait.config.dialects.examine import brief
from plait.config.schema.config import Status
from plait.config.source import parse_override
from plait.errors import ConfigError
from plait.optim.optimizer import build_optimizer
from tests.table import check_rows
from tests.unit.config.cases import load, resolved, rows, status_of, tree_of, written


def problems(tree, *overrides):
    with pytest.raises(ConfigError) as error:
        load(tree, overrides)
    return [str(problem) for problem in error.value.problems]


OTHER_NAMES = """
    tensor_parallel.tp_size=4 -> parallel.tp=4
    tensor_parallel.autotp_size=4 -> parallel.tp=4
    tensor_parallel.autotp_size=0 -> parallel.tp=1
    tensor_parallel.tp.tp_size=4 -> parallel.tp=4
    tensor_model_parallel_size=4 -> parallel.tp=4
    model_parallel_size=4 -> parallel.tp=4
    mp_size=4 -> parallel.tp=4
    pipeline.stages=2 -> parallel.pp=2
    pipeline.stages=auto -> parallel.pp=1
    pipeline_parallel.stages=2 -> parallel.pp=2
    pipeline_parallel=2 -> parallel.pp=2
    pipeline_model_parallel_size=2 -> parallel.pp=2
    pipe_parallel_size=0 -> parallel.pp=1
    pipeline_parallel_size=2 -> parallel.pp=2
    tensor_parallel_size=2 -> parallel.tp=2
    tensor_parallel.tensor_parallel.tp_size=2 -> parallel.tp=2
    context_parallel_size=2 -> parallel.cp=2
    sequence_parallel_size=2 -> parallel.cp=2
    zero_optimization=true -> zero_optimization.stage=1
    zero_optimization=false -> zero_optimization.stage=0
    fp32_allreduce=true -> communication_data_type=fp32
    fp32_allreduce=false communication_data_type=bf16 -> communication_data_type=bf16
    compile.disable=false -> compile.enabled=true
    compile.disable=true -> compile.enabled=false
    train_batch_size=32.0 -> train_batch_size=32
    zero_optimization.stage="2" -> zero_optimization.stage=2
    gradient_clipping="0.5" -> gradient_clipping=0.5
    zero_optimization.reduce_bucket_size=5e8 -> zero_optimization.reduce_bucket_size=500000000
"""


def check_meaning(row):
    (path, value), *_ = map(parse_override, row[1].split())
    assert load(written(row[0])).value(".".join(path)) == value


def test_other_names_and_notations():
    check_rows(rows(OTHER_NAMES), check_meaning)


STATUSES = """
    zero_optimization.offload_optimizer=false -> ignored
    zero_optimization.cpu_offload=false -> renamed
    zero_optimization.stage3_gather_fp16_weights_on_model_save=true -> ignored
    zero_optimization.stage3_param_persitence_threshold=1e5 -> ignored
    fp16.fp16=true -> ignored
    fp16.comment=1 _comment=remark -> comment
    optimizer.params._note=3 //=remark optimizer.type=AdamW -> comment
    train_batch_size=null -> comment
    zero_optimization.reduce_bucket_size=5e8 -> supported
    steps_per_print=.inf -> ignored
    zero_optimization.stage3_max_live_parameters="1e9" -> ignored
    compile.disable=false -> renamed
"""
"""What published files contain. The status is that of the first key."""


def check_status(row):
    assert status_of(load(written(row[0])), row[0].partition("=")[0]) == row[1]


def test_what_published_files_contain():
    check_rows(rows(STATUSES), check_status)


def test_two_names_that_agree_are_one_setting():
    sizes = {"tensor_parallel": {"tp_size": 2, "autotp_size": 2}, "parallel": {"tp": 2}}
    assert load(sizes).parallel.tp == 2
    assert load({"pipeline": {"stages": "auto"}, "parallel": {"pp": 2}}).parallel.pp == 2
    assert load({"bf16": {"enabled": "auto"}, "bfloat16": {"enabled": True}}).bf16.enabled is True
    assert load({"tensor_parallel": {"tp_size": "8"}, "parallel": {"tp": 8}}).parallel.tp == 8
    assert load({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}).bf16.enabled is True
    twice = load({"fp32_allreduce": True, "communication_data_type": "float32"})
    assert twice.communication_data_type == "fp32"


def test_names_that_disagree_are_refused_with_both_values():
    assert problems({"tensor_parallel": {"tp_size": 2}, "parallel": {"tp": 4}}) == [
        "tensor_parallel.tp_size = 2 and parallel.tp = 4: both set parallel.tp and disagree; keep one of them"
    ]
    sizes = {"micro_batch_size": 2, "train_micro_batch_size_per_gpu": 3}
    words = "micro_batch_size = 2 and train_micro_batch_size_per_gpu = 3"
    assert words in problems(sizes)[0]
    assert "disagree" in problems({"compile": {"disable": True, "enabled": True}})[0]


def test_harmless_keys_are_noted_and_others_refused():
    """D12, E8: keys of DeepSpeed's memory layout, and a dtype that a wider one satisfies."""
    keys = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    tree = {
        **written("bf16.enabled=true data_types.grad_accum_dtype=bf16 sparse_gradients=true"),
        "activation_checkpointing": dict.fromkeys(keys, True),
    }
    made = resolved({**tree, "parallel": {"tp": 2}}, world_size=2)
    assert not made.recompute.partition_inputs
    assert (made.activation_offload.fraction, made.precision.reduce) == (0, "bfloat16")
    assert problems({"monitor_config": {"enabled": True}})[0].startswith("monitor_config = ")
    tree["data_types"] = {"grad_accum_dtype": "fp32"}
    assert resolved(tree).precision.reduce == "float32"


def test_a_wrong_value_is_told_under_the_name_that_was_written():
    assert problems({"tensor_parallel": {"tp_size": "four"}}) == [
        "tensor_parallel.tp_size = 'four': must be a whole number; write a whole number"
    ]
    assert problems({"bfloat16": {"enabled": "maybe"}}) == [
        "bfloat16.enabled = 'maybe': must be true or false; write true or false"
    ]


def test_meaningless_optimizer_parameters_are_dropped():
    params = {"lr": 1e-3, "max_grad_norm": 0, "_why": "x"}
    assert load({"optimizer": {"type": "Adam", "params": params}}).optimizer.params == {"lr": 1e-3}


@pytest.mark.parametrize(
    ("params", "decay"),
    [({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.2}, 0.2)],
)
def test_torch_adam_of_a_file_brings_torchs_weight_decay(params, decay):
    """DeepSpeed 0.19.8 builds torch.optim.AdamW with that class's default."""
    spec = load({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, **params}}}).optimizer
    made = build_optimizer(spec, [("a", torch.nn.Parameter(torch.zeros(2)))])
    assert type(made) is torch.optim.AdamW and made.param_groups[0]["weight_decay"] == decay


def test_secrets_are_not_shown():
    (row,) = load({"comet": {"api_key": "hunter2"}}).provenance.rows
    assert "hunter2" not in str(row)
    (problem,) = problems({"comet": {"api_key": ["hunter2"]}})
    assert "comet.api_key" in problem and "hunter2" not in problem


TYPICAL = {"flag": True, "integer": 5e8, "number": 0.5, "text": "x", "list": ["x"], "object": {"enabled": True, "x": 1}, "any": 1}  # fmt: skip
WRONG = {"flag": "maybe", "integer": 0.5, "number": "many", "text": 3, "list": "x", "object": 3}


def check_meaningless(key):
    """Check that the key is accepted with every kind of value and changes nothing."""
    for value in (TYPICAL[key.kind], "auto"):
        config = load(tree_of({key.path: value}))
        assert status_of(config, key.path) == "ignored"
        assert config.provenance.rows[0].meaning == key.why
    base = {key.path.split(".")[0]: {}} if key.path.startswith("optimizer") else {}
    made, plain = resolved(tree_of({key.path: TYPICAL[key.kind]})), resolved(base)
    assert made.model_dump(exclude={"sources"}) == plain.model_dump(exclude={"sources"})


def test_a_meaningless_key_is_accepted_and_explained():
    ignored = {path: key for path, key in TABLE.items() if key.status is Status.IGNORED}
    check_rows(ignored, check_meaningless)


def check_refused(key):
    """Check that the key is refused where it asks for something, and ignored where it is off."""
    active = next(
        value
        for value in (True, False, {"enabled": True}, 4, "cpu")
        if type_problem(key, value) is None and not requests_nothing(key, value)
    )
    message = f"{key.path} = {active!r}: {key.why}; {key.remedy}"
    assert problems(tree_of({key.path: active})) == [message]
    for off in (*key.off, "auto"):
        assert status_of(load(tree_of({key.path: off})), key.path) == "ignored"


def test_a_refused_key_is_refused_when_it_asks_for_something():
    refused = {path: key for path, key in TABLE.items() if key.status is Status.REFUSED}
    check_rows(refused, check_refused)


def check_wrong_type(key):
    """Check that the message names the value, unless it is a secret."""
    (problem,) = problems(tree_of({key.path: WRONG[key.kind]}))
    value = "(not shown)" if key.path in SECRETS else WRONG[key.kind]
    assert problem.startswith(f"{key.path} = {value!r}: must be ")


def test_a_wrong_type_of_a_meaningless_key_is_refused():
    typed = {path: key for path, key in TABLE.items() if key.kind in WRONG}
    check_rows(typed, check_wrong_type)


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        # A feature is switched on by `enabled`, at the top or in a part.
        ("compression_training", [{}, {"enabled": False, "inner": {"enabled": True}}, {"x": 3}], [{"a": {"enabled": True}}, True]),
        # This section is on if it exists.
        ("sequence_parallel", [{}, {"enabled": False}], [{"size": 4}, {"enabled": True}]),
        ("compile.deepcompile", [0, "false", "False", False], [True]),
        ("managed_gradient_accumulation", [True], [0, "false", "False", False]),
    ],
)  # fmt: skip
def test_what_a_value_requests(key, off, on):
    assert all(requests_nothing(TABLE[key], value) for value in off)
    assert not any(requests_nothing(TABLE[key], value) for value in on)


def test_all_problems_of_a_file_are_told_at_once():
    text = """
        compile.deepcompile=true zero_optimization.stage=7 zero_optimization.overlap_com=true gradient_clipping=-1 fp16=3
        tensor_parallel.tp_size=2 parallel.tp=3
    """
    found = problems(written(text))
    assert [text.split(":")[0] for text in found] == [
        "compile.deepcompile = True",
        "zero_optimization.overlap_com = True",
        "fp16 = 3",
        "tensor_parallel.tp_size = 2 and parallel.tp = 3",
        "gradient_clipping = -1",
        "zero_optimization.stage = 7",
    ]


WRONG_VALUES = """
    train_batch_size=many -> train_batch_size = 'many': must be a whole number; write a whole number
    train_batch_size=2.5 -> train_batch_size = 2.5: must be a whole number; write a whole number
    train_batch_size=0 -> train_batch_size = 0: must be at least 1; use 1 or more
    train_batch_size=true -> train_batch_size = True: must be a number, not true or false; write the number
    zero_optimization.stage=4 -> zero_optimization.stage = 4: must be 0, 1, 2 or 3; use one of them
    zero_optimization.stage=auto -> zero_optimization.stage = 'auto': is answered by a plan
    zero_optimization=[2] -> zero_optimization = [2]: is a section, which must be an object
    fp16.enabled=x -> fp16.enabled = 'x': must be true or false; write true or false
    bf16.enabled="yes" -> bf16.enabled = 'yes': must be true or false
    fp16.hysteresis=0 -> fp16.hysteresis = 0: must be at least 1
    communication_data_type=fp8 -> communication_data_type = 'fp8': must be 'fp32', 'fp16' or 'bf16'; use one of them
    communication_data_type=fp23 -> communication_data_type = 'fp23': must be 'fp32', 'fp16' or 'bf16'; did you mean `fp32`?
    data.packing=joined -> data.packing = 'joined': must be 'documents'; write 'documents', or leave it out
    optimizer.states=own -> optimizer.states = 'own': must be 'bf16', 'int8' or 'float8'; use one of them
    parallel.tp=auto -> parallel.tp = 'auto': is answered by a plan
    parallel.blocks=model.layers -> parallel.blocks = 'model.layers': must be a list; write a list in brackets
    run.processes=all -> run.processes = 'all': must be a whole number or 'auto'
    model.config.model_type=llama model.path=x -> model: a model is either `config` (trained from scratch) or `path`
    scheduler.params={} -> scheduler.type: is required; add it
    optimizer.type=AdmW -> optimizer.type = 'AdmW': `AdmW` is neither an optimizer of DeepSpeed or torch
    optimizer.type=AdamW optimizer.params.adam_w_mode="no" -> optimizer.params
    flops_profiler.enabled="yes" -> flops_profiler
    sparse_attention.mode=fixed compression_training.enabled="yes" -> compression_training
    gradient_clipping=.inf -> gradient_clipping = inf: must be a number
"""


def check_wrong_value(row):
    found = problems(written(row[0]))
    assert [text for text in found if text.startswith(row[1])], found


def test_wrong_values():
    check_rows(rows(WRONG_VALUES), check_wrong_value)


def test_an_override_wins_over_any_name_of_the_file():
    config = load({"tensor_parallel": {"tp_size": 2}}, ["parallel.tp=4"])
    assert config.parallel.tp == 4
    assert config.origin("parallel.tp") == "override"
    config = load({"parallel": {"tp": 2}}, ["tensor_parallel.tp_size=4"])
    assert config.parallel.tp == 4
    assert config.origin("parallel.tp") == "override: tensor_parallel.tp_size"
    assert load({"bfloat16": {"enabled": True}}, ["bf16.enabled=false"]).bf16.enabled is False
    assert load({"pipeline_parallel": 2}, ["parallel.pp=4"]).parallel.pp == 4
    tree = {"zero_optimization": {"cpu_offload": True}}
    config = load(tree, ["zero_optimization.offload_optimizer.device=none"])
    assert config.zero_optimization.stage == 0


def test_overrides_are_parsed_applied_in_order_and_reach_inside():
    text = "optimizer.type=AdamW optimizer.params.lr=1e-3 model.config.model_type=llama model.config.hidden_size=8"
    overrides = "optimizer.params.lr=5e-5 optimizer.params.lr=2e-5 model.config.hidden_size=16 fp16.enabled=true run.steps=7"
    config = load(written(text), overrides.split())
    assert config.optimizer.params == {"lr": 2e-5}
    assert config.model.config == {"model_type": "llama", "hidden_size": 16}
    assert config.fp16.enabled is True
    assert config.run.steps == 7
    assert config.origin("optimizer.params") == "file and override"


def test_null_takes_a_key_out():
    tree = {"train_batch_size": 32, "fp16": {"enabled": True}}
    config = load(tree, ["train_batch_size=null", "fp16=null", "nothing.here=null"])
    assert config.train_batch_size is None and config.fp16.enabled is False


def test_an_object_replaces_the_section():
    config = load({"fp16": {"enabled": True, "hysteresis": 4}}, ['fp16={"enabled": true}'])
    assert (config.fp16.enabled, config.fp16.hysteresis) == (True, 2)
    assert config.origin("fp16.enabled") == "override"


def test_overrides_that_make_no_sense():
    assert problems({"train_batch_size": 8}, "train_batch_size.x=3") == [
        "--set train_batch_size.x = 3: train_batch_size is 8 and has no keys in it; set train_batch_size itself"
    ]
    assert "did you mean zero_optimization.stage?" in problems({}, "zero_optimization.stge=3")[0]
    with pytest.raises(ConfigError, match="apply to a file or a mapping"):
        load(load({}), ["train_batch_size=3"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Number of steps.", "Number of steps."),
        ("Number of\nsteps. 0: none. Ignored.", "Number of steps. 0: none."),
        (f"{'Long ' * 20}text. More text.", f"{'Long ' * 20}text."),
    ],
)
def test_brief_description(text, expected):
    assert brief(text) == expected
