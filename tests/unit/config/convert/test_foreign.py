"""Files of Accelerate and of the Trainer: what they say, what they ask in vain, and that Accelerate and the Trainer read them alike."""

import copy
import json
import random
import re
from dataclasses import fields

import pytest
import yaml

from plait.config.convert import accelerate
from plait.config.convert.conversion import convert, load_foreign
from plait.config.convert.fsdp import SHARDING_KEYS, TRAINER_KEYS
from plait.config.dialects.foreign import _TRAINER_FSDP
from plait.config.resolving.explain import values_of
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import leaves, read
from tests.unit.config.mutations import VALUES, places

ACCELERATE, ACCELERATE_REFUSED, TRAINER, TRAINER_REFUSED = read("foreign.yaml").values()
ROWS = {"yaml": ACCELERATE | ACCELERATE_REFUSED, "json": TRAINER | TRAINER_REFUSED}
ALL = [*(("yaml", name) for name in ACCELERATE), *(("json", name) for name in TRAINER)]
REFUSED = [(kind, name) for kind, table in ROWS.items() for name in table if (kind, name) not in ALL]  # fmt: skip
STAGE = "zero_optimization.stage"


def written(folder, kind, tree):
    file = folder / f"file.{kind}"
    file.write_text(tree if kind == "yaml" else json.dumps(tree))
    return file


def sample(folder, kind, name):
    tree, said = ROWS[kind][name].values()
    return written(folder, kind, tree), said


def check_samples(folder, names, check):
    """Call `check` with the file of each sample and what is expected of it."""
    rows = {f"{name} ({kind})": (kind, name) for kind, name in names}
    check_rows(rows, lambda row: check(*sample(folder, *row)))


def check_load(file, _):
    """Check that `load` refuses the file and names the command that converts it."""
    with pytest.raises(ConfigError, match=f"run: plait config convert {file}"):
        load(file)


def test_load_names_the_command_that_converts(tmp_path):
    check_samples(tmp_path, ALL, check_load)


def test_fields_of_the_trainer_that_load_recognises():
    assert set(_TRAINER_FSDP) == {*(key.path for key in TRAINER_KEYS), *SHARDING_KEYS}


def resolved(file):
    """Return what a file says, and what it resolves to for as many processes as it says, else 4."""
    config = load_foreign(file)
    given = config.run.processes if config.run is not None else "auto"
    world = given if isinstance(given, int) else 4
    return config, resolve(config, world_size=world, micro_batch_size=2)


def problems_of(file):
    with pytest.raises(ConfigError) as error:
        resolved(file)
    return error.value.problems


def check_accepted(file, expected):
    """Check the values that a file resolves to."""
    config, made = resolved(file)
    values = {value.name: value.value for value in values_of(dict(made), made.sources)}
    found = {key: values[key] if key in values else config.value(key) for key in expected}
    assert found == expected


def test_accepted(tmp_path):
    check_samples(tmp_path, ALL, check_accepted)


def check_written(file, _):
    """Check that the converted file loads as the file does, and is not converted again."""
    conversion = convert(file)
    assert not conversion.problems
    again = file.with_name("plait.json")
    again.write_text(json.dumps(conversion.tree))
    assert load(again).model_dump() == load_foreign(file).model_dump()
    assert convert(again).tree == conversion.tree


def test_what_is_written_means_the_same(tmp_path):
    check_samples(tmp_path, ALL, check_written)


def check_refused(file, expected):
    """Check which keys are refused, and the messages."""
    found = problems_of(file)
    fields = [problem.field.replace(f"{file.parent}/", "") for problem in found]
    assert fields == [key for key, _ in expected]
    for problem, (_, part) in zip(found, expected, strict=True):
        assert part in str(problem)


def test_refused(tmp_path):
    check_samples(tmp_path, REFUSED, check_refused)


def check_keys(file, _):
    """Check that the report names each key of the file once."""
    tree = yaml.safe_load(file.read_text())
    rows = [row.key for row in convert(file).keys if row.key != "(left out)"]
    assert len(rows) == len(set(rows))
    for leaf in leaves(tree):
        own = any(leaf == row or leaf.startswith(f"{row}.") for row in rows)
        named = isinstance(tree.get("fsdp_config"), dict) or f"fsdp_config.{leaf}" in rows
        assert own or (named and leaf in rows), leaf


def test_every_key_has_a_row(tmp_path):
    check_samples(tmp_path, [*ALL, *REFUSED], check_keys)


def test_every_key_of_accelerate_is_in_the_tables():
    """Earlier releases of Accelerate lack some of the keys in the tables."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    top = {"distributed_type", "mixed_precision", "num_processes", "fp8_config", "megatron_lm_config"}  # fmt: skip
    here = top | set(accelerate.SECTIONS)
    keys = {field.name for field in fields(ClusterConfig)}
    assert keys <= {key.path for key in accelerate.TOP} | here
    options = {action.dest for action in launch_command_parser()._actions}
    sections = accelerate.SECTIONS
    found = {
        name: {option for option in options if option.startswith(name)}
        for name in ("parallelism_config_", "dynamo_", "fsdp_")
    }
    assert found["parallelism_config_"] <= set(sections["parallelism_config"])
    assert found["dynamo_"] == set(sections["dynamo_config"])
    assert found["fsdp_"] <= {*sections["fsdp_config"], *(f"fsdp_{name}" for name in SHARDING_KEYS)}
    starts = ("deepspeed_", "zero", "offload_", "gradient_")
    of_deepspeed = {option for option in options if option.startswith(starts)}
    assert of_deepspeed == {*sections["deepspeed_config"], "deepspeed_config_file"}


def launched(file, monkeypatch):
    """Set what `accelerate launch` hands to a script."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    command = ["--config_file", str(file), "--num_processes", "2", "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.setenv(name, value)
    for name in ("SYNC_MODULE_STATES", "CPU_RAM_EFFICIENT_LOADING"):  # look for a GPU
        monkeypatch.setenv(f"FSDP_{name}", "false")


STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}  # fmt: skip


def of_type(kind):
    return [name for name, row in ACCELERATE.items() if f"distributed_type: {kind}" in row["file"]]


@pytest.mark.parametrize("name", of_type("FSDP"))
def test_accelerate_shards_alike(tmp_path, monkeypatch, name):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    file, expected = sample(tmp_path, "yaml", name)
    launched(file, monkeypatch)
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version == 2:
        stage = 3 if plugin.reshard_after_forward else 2
        assert expected.get(STAGE, stage) == stage
    elif name == "fsdp 1 by the other name":  # what the row of this key says
        (row,) = [row for row in convert(file).keys if row.key.endswith("reshard_after_forward")]
        assert plugin.sharding_strategy.name == "FULL_SHARD"
        assert "`accelerate launch` still uses FULL_SHARD" in row.meaning
    else:
        assert expected[STAGE] == STAGES[plugin.sharding_strategy.name]
    config = load_foreign(file)
    assert (config.parallel.recompute.mode == "full") == plugin.activation_checkpointing
    if hasattr(plugin, "activation_checkpointing_offload"):  # a field of later releases
        offloads = config.activation_checkpointing.cpu_checkpointing
        assert offloads == plugin.activation_checkpointing_offload
    sizes = ParallelismConfig()
    if sizes.total_size > 1:
        layout = resolve(config, world_size=sizes.total_size, micro_batch_size=2).layout
        found = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.cp)
        sp = getattr(sizes, "sp_size", 1)  # a field of later releases
        degrees = (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.cp_size * sp)
        assert found == degrees


@pytest.mark.parametrize("name", of_type("DEEPSPEED"))
def test_accelerates_deepspeed_file_means_the_same(tmp_path, name):
    """`DeepSpeedPlugin` writes the file that DeepSpeed reads."""
    from accelerate.utils import DeepSpeedPlugin

    file, _ = sample(tmp_path, "yaml", name)
    tree = yaml.safe_load(file.read_text())
    names = {field.name for field in fields(DeepSpeedPlugin)} - {"zero3_init_flag"}
    given = {key: value for key, value in tree["deepspeed_config"].items() if key in names}
    plugin = DeepSpeedPlugin(**given)
    plugin.set_mixed_precision(tree.get("mixed_precision", "no"))
    without = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"))
    theirs, ours = load(plugin.deepspeed_config | without), load_foreign(file)
    for section in ("zero_optimization", "bf16", "gradient_clipping"):
        left, right = getattr(theirs, section), getattr(ours, section)
        assert left == right or (section == "gradient_clipping" and left == "auto"), section
    assert theirs.fp16.enabled == ours.fp16.enabled


@pytest.mark.parametrize("name", [name for name in TRAINER if name not in ("off", "off in JSON")])
def test_the_trainer_reads_alike(tmp_path, name):
    from transformers import TrainingArguments

    tree = json.loads(json.dumps(TRAINER[name]["file"]))
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    arguments.fsdp = tree.get("fsdp", True)
    arguments.fsdp_config = tree.get("fsdp_config", tree if "fsdp" not in tree else None)
    plugin = arguments._process_fsdp_args()
    config = load_foreign(written(tmp_path, "json", TRAINER[name]["file"]))
    reshard = plugin["reshard_after_forward"]
    stage = (3 if reshard else 2) if isinstance(reshard, bool) else STAGES[reshard.upper()]
    assert config.zero_optimization.stage == stage
    recomputes = plugin.get("activation_checkpointing", False)
    assert (config.parallel.recompute.mode == "full") == recomputes
    offloads = plugin.get("cpu_offload", False)
    assert (config.zero_optimization.offload_param.device == "cpu") == offloads


def test_every_key_that_the_trainer_documents_is_in_the_table():
    from transformers import TrainingArguments

    text = (TrainingArguments.__doc__ or "").partition("fsdp_config (`str` or `dict`")[2]
    names = set(re.findall(r"- (\w+) \(", text.partition("> DeepSpeed")[0]))
    assert names <= {*(key.path for key in TRAINER_KEYS), *SHARDING_KEYS}


NAMING = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
FILE = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 2,
}


def beside(folder, tree, text=NAMING):
    (folder / "ds.json").write_text(json.dumps(tree))
    return written(folder, "yaml", text)


def test_a_file_that_is_named_is_read_beside_the_other(tmp_path):
    file = beside(tmp_path, FILE)
    config = load_foreign(file)
    assert config.zero_optimization == load(FILE).zero_optimization and config.bf16.enabled
    assert config.origin("zero_optimization.stage") == "file"
    rows = {row.key: str(row.status) for row in config.provenance.rows}
    assert rows["zero_optimization.overlap_comm"] == "ignored"
    assert rows["zero_optimization.stage"] == "supported"
    assert load_foreign(file, ["zero_optimization.stage=1"]).zero_optimization.stage == 1


@pytest.mark.parametrize(
    ("added", "key"),
    [
        ("  zero_stage: 2\n", "deepspeed_config.zero_stage"),
        ("  gradient_clipping: 1.0\n", "deepspeed_config.gradient_clipping"),
        ("mixed_precision: bf16\n", "mixed_precision"),
    ],
)
def test_what_stands_in_two_files_is_refused_as_in_accelerate(tmp_path, added, key):
    (problem,) = problems_of(beside(tmp_path, FILE, NAMING + added))
    assert problem.field == key and "which decides it" in problem.rule


def test_a_section_that_contradicts_the_file(tmp_path):
    text = f"{NAMING}dynamo_config: {{dynamo_backend: INDUCTOR}}\nparallelism_config: {{parallelism_config_sp_size: 2}}\n"
    found = problems_of(beside(tmp_path, {**FILE, "compile": {"enabled": False}}, text))
    assert [problem.field for problem in found] == ["dynamo_config.dynamo_backend"]
    assert "sets compile.enabled, and the file that this one names has False" in str(found[0])
    (problem,) = problems_of(beside(tmp_path, {**FILE, "sequence_parallel_size": 4}, text))
    assert "both set parallel.cp and disagree" in problem.rule


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"bf16": {"enabled": True}}, "has no such section, which Accelerate asks for"),
        ({**FILE, "distributed_type": "FSDP"}, "unknown key"),
        ({**FILE, "fsdp": True}, "unknown key"),
        ([1], "is a list"),
    ],
)
def test_a_file_that_is_none(tmp_path, tree, said):
    assert any(said in str(problem) for problem in problems_of(beside(tmp_path, tree)))


def test_a_trainers_file_beside(tmp_path):
    section = {"reshard_after_forward": False, "activation_checkpointing": True}
    (tmp_path / "fsdp.json").write_text(json.dumps(section))
    tree = {"fsdp": "auto_wrap", "fsdp_config": "fsdp.json"}
    config = load_foreign(written(tmp_path, "json", tree))
    assert (config.zero_optimization.stage, config.parallel.recompute.mode) == (2, "full")


def test_overrides_win(tmp_path):
    file, _ = sample(tmp_path, "yaml", "three dimensions")
    config = load_foreign(file, ["parallel.tp=4", "parallel.dp_shard=1"])
    assert (config.parallel.tp, config.parallel.dp_shard) == (4, 1)
    assert config.origin("parallel.tp") == "override"
    key = "parallelism_config.parallelism_config_dp_replicate_size"
    assert config.origin("parallel.dp_replicate") == f"file: {key}"


SAMPLES = [yaml.safe_load(row["file"]) for row in ROWS["yaml"].values()]
SAMPLES += [row["file"] for row in ROWS["json"].values()]


def test_a_wrong_file_is_a_config_error_and_nothing_else():
    draw = random.Random(0)
    for _ in range(400):
        tree = copy.deepcopy(draw.choice(SAMPLES))
        for _ in range(draw.randint(1, 3)):
            *path, last = draw.choice(places(tree))
            here = tree
            for name in path:
                here = here[name]
            here[last] = copy.deepcopy(draw.choice(VALUES))
        try:
            conversion = convert(tree)
        except ConfigError:
            continue
        for problem in conversion.problems:
            assert problem.rule and problem.remedy and str(problem), tree
        if not conversion.problems:
            assert load(conversion.tree).model_dump() == load_foreign(tree).model_dump()
