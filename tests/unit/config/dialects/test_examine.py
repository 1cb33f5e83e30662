"""Names, notations and overrides of a file lead to settings, or are refused."""

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
from plait.errors import ConfigError
from plait.optim.optimizer import build_optimizer
from tests.table import check_rows
from tests.unit.config.cases import (
    check_refusals,
    load,
    parse_rows,
    parse_settings,
    parse_tree,
    resolve_tree,
    status_of,
    tree_of,
)


def problems_of(tree, *overrides):
    """Return the messages of a file that is refused."""
    with pytest.raises(ConfigError) as error:
        load(tree, overrides)
    return [str(problem) for problem in error.value.problems]


MEANINGS = """
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
    ZERO.stage="2" -> zero_optimization.stage=2
    gradient_clipping="0.5" -> gradient_clipping=0.5
    ZERO.reduce_bucket_size=5e8 -> zero_optimization.reduce_bucket_size=500000000
    tensor_parallel.tp_size=2 tensor_parallel.autotp_size=2 parallel.tp=2 -> parallel.tp=2
    tensor_parallel.tp_size="8" parallel.tp=8 -> parallel.tp=8
    pipeline.stages=auto parallel.pp=2 -> parallel.pp=2
    bf16.enabled=auto bfloat16.enabled=true -> bf16.enabled=true
    bf16.enabled=true bfloat16.enabled=true -> bf16.enabled=true
    fp32_allreduce=true communication_data_type=float32 -> communication_data_type=fp32
"""


def check_meaning(row):
    text, setting = row
    ((path, value),) = parse_settings(setting).items()
    assert load(parse_tree(text)).value(path) == value


def test_other_names_and_notations_of_a_setting():
    check_rows(parse_rows(MEANINGS), check_meaning)


STATUSES = """
    zero_optimization.offload_optimizer=false -> ignored
    ZERO.cpu_offload=false -> renamed
    ZERO.stage3_gather_fp16_weights_on_model_save=true -> ignored
    ZERO.stage3_param_persitence_threshold=1e5 -> ignored
    fp16.fp16=true -> ignored
    fp16.comment=1 _comment=remark -> comment
    optimizer.params._note=3 //=remark optimizer.type=AdamW -> comment
    train_batch_size=null -> comment
    ZERO.reduce_bucket_size=5e8 -> supported
    steps_per_print=.inf -> ignored
    ZERO.stage3_max_live_parameters="1e9" -> ignored
    compile.disable=false -> renamed
"""
"""Statuses of the first key of each row. Published files contain all of them."""


def check_status(row):
    text, status = row
    key = next(iter(parse_settings(text)))
    assert status_of(load(parse_tree(text)), key) == status


def test_statuses_of_keys_in_published_files():
    check_rows(parse_rows(STATUSES), check_status)


def test_harmless_keys_are_noted_and_others_refused():
    flags = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    text = "bf16.enabled=true data_types.grad_accum_dtype=bf16 sparse_gradients=true"
    tree = {**parse_tree(text), "activation_checkpointing": dict.fromkeys(flags, True)}
    resolved = resolve_tree({**tree, "parallel": {"tp": 2}}, world_size=2)
    assert not resolved.recompute.partition_inputs
    assert resolved.activation_offload.fraction == 0
    assert resolved.precision.reduce == "bfloat16"

    # The wider dtype satisfies a request for bf16, but not the other way round.
    tree["data_types"] = {"grad_accum_dtype": "fp32"}
    assert resolve_tree(tree).precision.reduce == "float32"
    assert problems_of({"monitor_config": {"enabled": True}})[0].startswith("monitor_config = ")


def test_meaningless_optimizer_parameters_are_dropped():
    params = {"lr": 1e-3, "max_grad_norm": 0, "_why": "x"}
    assert load({"optimizer": {"type": "Adam", "params": params}}).optimizer.params == {"lr": 1e-3}


@pytest.mark.parametrize(
    ("params", "decay"),
    [({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.2}, 0.2)],
)
def test_torch_adam_has_torchs_weight_decay(params, decay):
    """DeepSpeed 0.19.8 builds torch.optim.AdamW with the default of that class."""
    spec = load({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, **params}}}).optimizer
    optimizer = build_optimizer(spec, [("a", torch.nn.Parameter(torch.zeros(2)))])
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_secrets_are_not_shown():
    (row,) = load({"comet": {"api_key": "hunter2"}}).provenance.rows
    assert "hunter2" not in str(row)
    (problem,) = problems_of({"comet": {"api_key": ["hunter2"]}})
    assert "comet.api_key" in problem and "hunter2" not in problem


VALUES = {
    "flag": True,
    "integer": 5e8,
    "number": 0.5,
    "text": "x",
    "list": ["x"],
    "object": {"enabled": True, "x": 1},
    "any": 1,
}
WRONG_TYPES = {
    "flag": "maybe",
    "integer": 0.5,
    "number": "many",
    "text": 3,
    "list": "x",
    "object": 3,
}


def check_ignored(key):
    """Check that the key is accepted with every kind of value and changes nothing."""
    tree = tree_of({key.path: VALUES[key.kind]})
    for accepted in (tree, tree_of({key.path: "auto"})):
        config = load(accepted)
        assert status_of(config, key.path) == "ignored"
        assert config.provenance.rows[0].meaning == key.why

    # A section `optimizer` has defaults even if it is empty.
    base = {"optimizer": {}} if key.path.startswith("optimizer") else {}
    expected = resolve_tree(base).model_dump(exclude={"sources"})
    assert resolve_tree(tree).model_dump(exclude={"sources"}) == expected


def keys_with(status):
    return {path: key for path, key in TABLE.items() if key.status is status}


def test_a_meaningless_key_is_accepted_and_explained():
    check_rows(keys_with(Status.IGNORED), check_ignored)


def check_refused(key):
    """Check that the key is refused if it requests something, and ignored if it is off."""
    for value in (True, False, {"enabled": True}, 4, "cpu"):
        if type_problem(key, value) is None and not requests_nothing(key, value):
            break
    message = f"{key.path} = {value!r}: {key.why}; {key.remedy}"
    assert problems_of(tree_of({key.path: value})) == [message]
    for off in (*key.off, "auto"):
        assert status_of(load(tree_of({key.path: off})), key.path) == "ignored"


def test_a_refused_key_is_refused_if_it_requests_something():
    check_rows(keys_with(Status.REFUSED), check_refused)


def check_wrong_type(key):
    """Check that the message names the value, unless it is a secret."""
    (problem,) = problems_of(tree_of({key.path: WRONG_TYPES[key.kind]}))
    value = "(not shown)" if key.path in SECRETS else WRONG_TYPES[key.kind]
    assert problem.startswith(f"{key.path} = {value!r}: must be ")


def test_a_wrong_type_of_a_meaningless_key_is_refused():
    typed = {path: key for path, key in TABLE.items() if key.kind in WRONG_TYPES}
    check_rows(typed, check_wrong_type)


DISABLED_PART = {"enabled": False, "inner": {"enabled": True}}


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        # `enabled` switches a feature on, at the top or in a part.
        ("compression_training", [{}, DISABLED_PART, {"x": 3}], [{"a": {"enabled": True}}, True]),
        # This section is on if it exists.
        ("sequence_parallel", [{}, {"enabled": False}], [{"size": 4}, {"enabled": True}]),
        ("compile.deepcompile", [0, "false", "False", False], [True]),
        ("managed_gradient_accumulation", [True], [0, "false", "False", False]),
    ],
)
def test_values_that_request_nothing(key, off, on):
    assert all(requests_nothing(TABLE[key], value) for value in off)
    assert not any(requests_nothing(TABLE[key], value) for value in on)


def test_all_problems_of_a_file_are_reported_at_once():
    text = """
        compile.deepcompile=true ZERO.stage=7 ZERO.overlap_com=true gradient_clipping=-1 fp16=3
        tensor_parallel.tp_size=2 parallel.tp=3
    """
    assert [problem.split(":")[0] for problem in problems_of(parse_tree(text))] == [
        "compile.deepcompile = True",
        "zero_optimization.overlap_com = True",
        "fp16 = 3",
        "tensor_parallel.tp_size = 2 and parallel.tp = 3",
        "gradient_clipping = -1",
        "zero_optimization.stage = 7",
    ]


REFUSALS = """
    tensor_parallel.tp_size=2 parallel.tp=4 -> tensor_parallel.tp_size = 2 and parallel.tp = 4: \
        both set parallel.tp and disagree; keep one of them
    micro_batch_size=2 train_micro_batch_size_per_gpu=3 \
        -> micro_batch_size = 2 and train_micro_batch_size_per_gpu = 3
    compile.disable=true compile.enabled=true -> disagree
    tensor_parallel.tp_size=four -> tensor_parallel.tp_size = 'four': must be a whole number
    bfloat16.enabled=maybe -> bfloat16.enabled = 'maybe': must be true or false
    train_batch_size=many -> train_batch_size = 'many': must be a whole number; write a whole number
    train_batch_size=2.5 -> train_batch_size = 2.5: must be a whole number; write a whole number
    train_batch_size=0 -> train_batch_size = 0: must be at least 1; use 1 or more
    train_batch_size=true -> train_batch_size = True: must be a number, not true or false
    ZERO.stage=4 -> zero_optimization.stage = 4: must be 0, 1, 2 or 3; use one of them
    ZERO.stage=auto -> zero_optimization.stage = 'auto': is answered by a plan
    zero_optimization=[2] -> zero_optimization = [2]: is a section, which must be an object
    bf16.enabled="yes" -> bf16.enabled = 'yes': must be true or false; write true or false
    communication_data_type=fp8 \
        -> communication_data_type = 'fp8': must be 'fp32', 'fp16' or 'bf16'; use one of them
    communication_data_type=fp23 -> communication_data_type = 'fp23': ... did you mean `fp32`?
    data.packing=joined -> data.packing = 'joined': must be 'documents'; ... or leave it out
    parallel.blocks=model.layers -> parallel.blocks = 'model.layers': must be a list; write a list
    run.processes=all -> run.processes = 'all': must be a whole number or 'auto'
    model.config.model_type=llama model.path=x \
        -> model: a model is either `config` (trained from scratch) or `path`
    scheduler.params={} -> scheduler.type: is required; add it
    optimizer.type=AdmW -> optimizer.type = 'AdmW': `AdmW` is neither an optimizer of DeepSpeed
    optimizer.type=AdamW optimizer.params.adam_w_mode="no" -> optimizer.params
    flops_profiler.enabled="yes" -> flops_profiler
    sparse_attention.mode=fixed compression_training.enabled="yes" -> compression_training
    gradient_clipping=.inf -> gradient_clipping = inf: must be a number
"""


def test_wrong_values_and_contradictions_are_refused():
    check_refusals(REFUSALS, lambda text: load(parse_tree(text)))


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


def test_overrides_apply_in_order_and_inside_objects():
    model = "model.config.model_type=llama model.config.hidden_size=8"
    file = f"optimizer.type=AdamW optimizer.params.lr=1e-3 {model}"
    overrides = [
        "optimizer.params.lr=5e-5",
        "optimizer.params.lr=2e-5",
        "model.config.hidden_size=16",
        "fp16.enabled=true",
    ]
    config = load(parse_tree(file), overrides)
    assert config.optimizer.params == {"lr": 2e-5}
    assert config.origin("optimizer.params") == "file and override"
    assert config.model.config == {"model_type": "llama", "hidden_size": 16}
    assert config.fp16.enabled is True


def test_an_override_with_null_removes_a_key():
    tree = {"train_batch_size": 32, "fp16": {"enabled": True}}
    config = load(tree, ["train_batch_size=null", "fp16=null", "nothing.here=null"])
    assert config.train_batch_size is None and config.fp16.enabled is False


def test_an_override_with_an_object_replaces_the_section():
    config = load({"fp16": {"enabled": True, "hysteresis": 4}}, ['fp16={"enabled": true}'])
    assert (config.fp16.enabled, config.fp16.hysteresis) == (True, 2)
    assert config.origin("fp16.enabled") == "override"


def test_overrides_without_a_place_are_refused():
    (problem,) = problems_of({"train_batch_size": 8}, "train_batch_size.x=3")
    assert problem.startswith("--set train_batch_size.x = 3: train_batch_size is 8 and has no keys")
    assert problem.endswith("set train_batch_size itself")
    assert "did you mean zero_optimization.stage?" in problems_of({}, "zero_optimization.stge=3")[0]
    with pytest.raises(ConfigError, match="apply to a file or a mapping"):
        load(load({}), ["train_batch_size=3"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Number of\nsteps. 0: none. Ignored.", "Number of steps. 0: none."),
        (f"{'Long ' * 20}text. More text.", f"{'Long ' * 20}text."),
    ],
)
def test_brief_description(text, expected):
    assert brief(text) == expected
