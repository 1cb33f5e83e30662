"""Files of Accelerate and of the Trainer are converted to what Accelerate and the Trainer do."""

import copy
import dataclasses
import json
import random
import re
from itertools import product

import pytest
import yaml

from plait.config.convert import accelerate
from plait.config.convert.conversion import convert, load_foreign
from plait.config.convert.fsdp import SHARDING_KEYS, TRAINER_KEYS

# `load` recognises these files by fields that it must not import from `convert`.
from plait.config.dialects.foreign import _TRAINER_FSDP
from plait.config.resolving.explain import values_of
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import leaf_paths, read_samples
from tests.unit.config.mutations import VALUES, paths_inside

ACCELERATE, ACCELERATE_REFUSED, TRAINER, TRAINER_REFUSED = read_samples("foreign.yaml").values()
SAMPLES = {
    "yaml": {**ACCELERATE, **ACCELERATE_REFUSED},
    "json": {**TRAINER, **TRAINER_REFUSED},
}
# Pairs of ending and name.
CONVERTED = [*product(["yaml"], ACCELERATE), *product(["json"], TRAINER)]
REFUSED = [*product(["yaml"], ACCELERATE_REFUSED), *product(["json"], TRAINER_REFUSED)]
TRAINER_FIELDS = {*(key.path for key in TRAINER_KEYS), *SHARDING_KEYS}


def write_file(folder, ending, content):
    """Write the text of a YAML file, or the tree of a JSON file."""
    file = folder / f"file.{ending}"
    file.write_text(content if ending == "yaml" else json.dumps(content))
    return file


def write_sample(folder, ending, name):
    """Write a sample. Return the file and what is expected of it."""
    content, expected = SAMPLES[ending][name].values()
    return write_file(folder, ending, content), expected


def check_samples(folder, samples, check):
    """Call `check` with the file of each sample and what is expected of it."""
    rows = {f"{name} ({ending})": (ending, name) for ending, name in samples}
    check_rows(rows, lambda row: check(*write_sample(folder, *row)))


def check_load(file, _):
    """Check that `load` refuses the file and names the command that converts it."""
    with pytest.raises(ConfigError, match=f"run: plait config convert {file}"):
        load(file)


def test_load_names_the_command_that_converts(tmp_path):
    check_samples(tmp_path, CONVERTED, check_load)


def test_load_recognises_every_field_of_the_trainer():
    assert set(_TRAINER_FSDP) == TRAINER_FIELDS


def resolve_file(file):
    """Return the settings of a file, resolved for its number of processes, or for 4."""
    config = load_foreign(file)
    processes = config.run.processes if config.run is not None else "auto"
    world_size = processes if isinstance(processes, int) else 4
    return config, resolve(config, world_size=world_size, micro_batch_size=2)


def problems_of(file):
    with pytest.raises(ConfigError) as error:
        resolve_file(file)
    return error.value.problems


def check_accepted(file, expected):
    """Check the values that a file resolves to."""
    config, resolved = resolve_file(file)
    values = {value.name: value.value for value in values_of(dict(resolved), resolved.sources)}
    for key, value in expected.items():
        actual = values[key] if key in values else config.value(key)
        assert actual == value, key


def test_accepted(tmp_path):
    check_samples(tmp_path, CONVERTED, check_accepted)


def check_conversion(file, _):
    """Check that the converted file loads as the original, and is not converted again."""
    conversion = convert(file)
    assert not conversion.problems
    converted = file.with_name("plait.json")
    converted.write_text(json.dumps(conversion.tree))
    assert load(converted).model_dump() == load_foreign(file).model_dump()
    assert convert(converted).tree == conversion.tree


def test_a_converted_file_means_the_same(tmp_path):
    check_samples(tmp_path, CONVERTED, check_conversion)


def check_refused(file, expected):
    """Check which keys are refused, and the messages."""
    problems = problems_of(file)
    fields = [problem.field.replace(f"{file.parent}/", "") for problem in problems]
    assert fields == [key for key, _ in expected]
    for problem, (_, message) in zip(problems, expected, strict=True):
        assert message in str(problem)


def test_refused(tmp_path):
    check_samples(tmp_path, REFUSED, check_refused)


def check_keys(file, _):
    """Check that the report names each key of the file once."""
    tree = yaml.safe_load(file.read_text())
    rows = [row.key for row in convert(file).keys if row.key != "(left out)"]
    assert len(rows) == len(set(rows))
    for path in leaf_paths(tree):
        if any(path == row or path.startswith(f"{row}.") for row in rows):
            continue
        # A file with the section of the Trainer alone has no `fsdp_config` around it.
        assert f"fsdp_config.{path}" in rows and path in rows, path


def test_every_key_has_a_row(tmp_path):
    check_samples(tmp_path, [*CONVERTED, *REFUSED], check_keys)


def test_every_key_of_accelerate_is_in_the_tables():
    """Earlier releases of Accelerate lack some of the keys in the tables."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    keys = {field.name for field in dataclasses.fields(ClusterConfig)}
    sections = accelerate.SECTIONS
    known = {key.path for key in accelerate.TOP} | set(sections)
    known |= {"distributed_type", "mixed_precision", "num_processes"}
    assert keys <= known | {"fp8_config", "megatron_lm_config"}

    options = {action.dest for action in launch_command_parser()._actions}

    def options_with(*prefixes):
        return {option for option in options if option.startswith(prefixes)}

    sharding = {f"fsdp_{name}" for name in SHARDING_KEYS}
    assert options_with("parallelism_config_") <= set(sections["parallelism_config"])
    assert options_with("dynamo_") == set(sections["dynamo_config"])
    assert options_with("fsdp_") <= set(sections["fsdp_config"]) | sharding
    deepspeed = options_with("deepspeed_", "zero", "offload_", "gradient_")
    assert deepspeed == {*sections["deepspeed_config"], "deepspeed_config_file"}


def set_launch_environment(file, monkeypatch):
    """Set the variables that `accelerate launch` hands to a script."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    command = ["--config_file", str(file), "--num_processes", "2", "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.setenv(name, value)
    # These look for a GPU.
    for name in ("SYNC_MODULE_STATES", "CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(f"FSDP_{name}", "false")


STAGES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "_HYBRID_SHARD_ZERO2": 2,
}


def samples_of_type(kind):
    return [name for name, row in ACCELERATE.items() if f"distributed_type: {kind}" in row["file"]]


@pytest.mark.parametrize("name", samples_of_type("FSDP"))
def test_sharding_is_that_of_accelerate(tmp_path, monkeypatch, name):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    file, _ = write_sample(tmp_path, "yaml", name)
    set_launch_environment(file, monkeypatch)
    plugin = FullyShardedDataParallelPlugin()
    config = load_foreign(file)
    stage = config.zero_optimization.stage
    if plugin.fsdp_version == 2:
        assert stage == (3 if plugin.reshard_after_forward else 2)
    elif name == "fsdp 1 by the other name":
        # Accelerate ignores this key, as the report says.
        (row,) = [row for row in convert(file).keys if row.key.endswith("reshard_after_forward")]
        assert plugin.sharding_strategy.name == "FULL_SHARD"
        assert "`accelerate launch` still uses FULL_SHARD" in row.meaning
    else:
        assert stage == STAGES[plugin.sharding_strategy.name]

    assert (config.parallel.recompute.mode == "full") == plugin.activation_checkpointing
    # Earlier releases lack this field and `sp_size`.
    if hasattr(plugin, "activation_checkpointing_offload"):
        offloads = config.activation_checkpointing.cpu_checkpointing
        assert offloads == plugin.activation_checkpointing_offload
    sizes = ParallelismConfig()
    if sizes.total_size > 1:
        layout = resolve(config, world_size=sizes.total_size, micro_batch_size=2).layout
        assert (layout.dp_replicate, layout.dp_shard, layout.tp) == (
            sizes.dp_replicate_size,
            sizes.dp_shard_size,
            sizes.tp_size,
        )
        assert layout.cp == sizes.cp_size * getattr(sizes, "sp_size", 1)


@pytest.mark.parametrize("name", samples_of_type("DEEPSPEED"))
def test_accelerates_file_for_deepspeed_means_the_same(tmp_path, name):
    """`DeepSpeedPlugin` writes the file that DeepSpeed reads."""
    from accelerate.utils import DeepSpeedPlugin

    file, _ = write_sample(tmp_path, "yaml", name)
    tree = yaml.safe_load(file.read_text())
    names = {field.name for field in dataclasses.fields(DeepSpeedPlugin)} - {"zero3_init_flag"}
    settings = {key: value for key, value in tree["deepspeed_config"].items() if key in names}
    plugin = DeepSpeedPlugin(**settings)
    plugin.set_mixed_precision(tree.get("mixed_precision", "no"))

    # The plugin leaves the batch sizes to the script.
    without_sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"))
    expected = load(plugin.deepspeed_config | without_sizes)
    config = load_foreign(file)
    assert config.zero_optimization == expected.zero_optimization
    assert config.bf16 == expected.bf16
    assert config.fp16.enabled == expected.fp16.enabled
    assert expected.gradient_clipping in ("auto", config.gradient_clipping)


@pytest.mark.parametrize("name", sorted(set(TRAINER) - {"off", "off in JSON"}))
def test_sharding_is_that_of_the_trainer(tmp_path, name):
    from transformers import TrainingArguments

    tree = copy.deepcopy(TRAINER[name]["file"])
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    arguments.fsdp = tree.get("fsdp", True)
    arguments.fsdp_config = tree.get("fsdp_config", tree if "fsdp" not in tree else None)
    # A private method, because the public step needs processes.
    plugin = arguments._process_fsdp_args()

    config = load_foreign(write_file(tmp_path, "json", TRAINER[name]["file"]))
    reshard = plugin["reshard_after_forward"]
    if isinstance(reshard, bool):
        stage = 3 if reshard else 2
    else:
        stage = STAGES[reshard.upper()]
    assert config.zero_optimization.stage == stage
    recomputes = plugin.get("activation_checkpointing", False)
    assert (config.parallel.recompute.mode == "full") == recomputes
    offloads = plugin.get("cpu_offload", False)
    assert (config.zero_optimization.offload_param.device == "cpu") == offloads


def test_every_documented_key_of_the_trainer_is_in_the_table():
    from transformers import TrainingArguments

    text = (TrainingArguments.__doc__ or "").partition("fsdp_config (`str` or `dict`")[2]
    names = set(re.findall(r"- (\w+) \(", text.partition("> DeepSpeed")[0]))
    assert names <= TRAINER_FIELDS


REFERRING = """
distributed_type: DEEPSPEED
num_processes: 4
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: true
"""
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 2,
}


def write_pair(folder, tree, text=REFERRING):
    """Write a file of DeepSpeed, and one of Accelerate that refers to it. Return the latter."""
    (folder / "ds.json").write_text(json.dumps(tree))
    return write_file(folder, "yaml", text)


def test_a_referenced_file_is_read_from_the_same_folder(tmp_path):
    file = write_pair(tmp_path, DEEPSPEED)
    config = load_foreign(file)
    assert config.zero_optimization == load(DEEPSPEED).zero_optimization
    assert config.bf16.enabled
    assert config.origin("zero_optimization.stage") == "file"
    statuses = {row.key: str(row.status) for row in config.provenance.rows}
    assert statuses["zero_optimization.overlap_comm"] == "ignored"
    assert statuses["zero_optimization.stage"] == "supported"
    assert load_foreign(file, ["zero_optimization.stage=1"]).zero_optimization.stage == 1

    section = {"reshard_after_forward": False, "activation_checkpointing": True}
    (tmp_path / "fsdp.json").write_text(json.dumps(section))
    tree = {"fsdp": "auto_wrap", "fsdp_config": "fsdp.json"}
    config = load_foreign(write_file(tmp_path, "json", tree))
    assert (config.zero_optimization.stage, config.parallel.recompute.mode) == (2, "full")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("  zero_stage: 2\n", "deepspeed_config.zero_stage"),
        ("  gradient_clipping: 1.0\n", "deepspeed_config.gradient_clipping"),
        ("mixed_precision: bf16\n", "mixed_precision"),
    ],
)
def test_a_setting_in_both_files_is_refused_as_in_accelerate(tmp_path, line, key):
    (problem,) = problems_of(write_pair(tmp_path, DEEPSPEED, REFERRING + line))
    assert problem.field == key and "which decides it" in problem.rule


@pytest.mark.parametrize(
    ("section", "field", "rule"),
    [
        (
            {"compile": {"enabled": False}},
            "dynamo_config.dynamo_backend",
            "sets compile.enabled, and the file that this one names has False",
        ),
        ({"sequence_parallel_size": 4}, "parallel.cp", "both set parallel.cp and disagree"),
    ],
)
def test_a_section_that_contradicts_the_other_file(tmp_path, section, field, rule):
    text = f"""{REFERRING}
dynamo_config: {{dynamo_backend: INDUCTOR}}
parallelism_config: {{parallelism_config_sp_size: 2}}
"""
    (problem,) = problems_of(write_pair(tmp_path, {**DEEPSPEED, **section}, text))
    assert field in str(problem) and rule in problem.rule


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"bf16": {"enabled": True}}, "has no such section, which Accelerate asks for"),
        ({**DEEPSPEED, "distributed_type": "FSDP"}, "unknown key"),
        ({**DEEPSPEED, "fsdp": True}, "unknown key"),
        ([1], "is a list"),
    ],
)
def test_an_unsuitable_referenced_file_is_refused(tmp_path, tree, message):
    messages = [str(problem) for problem in problems_of(write_pair(tmp_path, tree))]
    assert any(message in text for text in messages)


def test_overrides_win_over_the_file(tmp_path):
    file, _ = write_sample(tmp_path, "yaml", "three dimensions")
    config = load_foreign(file, ["parallel.tp=4", "parallel.dp_shard=1"])
    assert (config.parallel.tp, config.parallel.dp_shard) == (4, 1)
    assert config.origin("parallel.tp") == "override"
    key = "parallelism_config.parallelism_config_dp_replicate_size"
    assert config.origin("parallel.dp_replicate") == f"file: {key}"


def test_mutated_files_raise_nothing_but_config_errors():
    trees = [yaml.safe_load(row["file"]) for row in SAMPLES["yaml"].values()]
    trees += [row["file"] for row in SAMPLES["json"].values()]
    draw = random.Random(0)
    for _ in range(400):
        tree = copy.deepcopy(draw.choice(trees))
        for _ in range(draw.randint(1, 3)):
            *path, last = draw.choice(paths_inside(tree))
            container = tree
            for name in path:
                container = container[name]
            container[last] = copy.deepcopy(draw.choice(VALUES))
        try:
            conversion = convert(tree)
        except ConfigError:
            continue
        for problem in conversion.problems:
            assert problem.rule and problem.remedy and str(problem), tree
        if not conversion.problems:
            assert load(conversion.tree).model_dump() == load_foreign(tree).model_dump()
