"""A plan fills in what a file leaves open. What the file says stays as it is written, and the choice is made for it (D1, D2)."""

import copy
import json
import random
import re

import pytest

from plait.cli.main import main
from plait.config.dialects.keys import schema_fields
from plait.config.resolving.resolve import examine_source, load, resolve
from plait.errors import ConfigError, InputError
from plait.planner import configuration, output
from plait.planner.configuration import MODELLED, WITHOUT_EFFECT, unmodelled
from plait.planner.hardware import cluster
from plait.planner.search import plan

MODEL = {"config": {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096}}  # fmt: skip
CLUSTER = cluster("h100", 8)

CHOICES = {
    # Values of a key, by one of its names: left out, "auto" or fixed, in every form that files have.
    "train_micro_batch_size_per_gpu": ("auto", 1, "2", None),
    "gradient_accumulation_steps": ("auto", None),
    "zero_optimization": (
        True,
        {"stage": "auto", "overlap_comm": True},
        {"stage": "2", "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        {"stage": 1.0},
        {"stage": 3, "cpu_offload": False},
    ),
    "fp16": (None, {"enabled": False, "loss_scale": 128, "hysteresis": 3}, {"enabled": False, "initial_scale_power": 12}),
    "bf16": (None, {"enabled": True, "check_grad_overflow": False}, {"enabled": True}, {"enabled": False}),
    "tensor_parallel": (None, {"autotp_size": "auto"}, {"tp_size": 2}, {"autotp_size": "2"}),
    "pipeline": (None, {"stages": 2}, {"stages": "auto"}),
    "communication_data_type": (None, "fp32", "bf16"),
    "gradient_clipping": (None, 0.5, "auto"),
    "_comment": (None, "kept"),
    "parallel": (
        None,
        {"sequence_parallel": "auto"},
        {"recompute": {"mode": "auto"}, "bucket_mib": 9.5},
        {"recompute": {"mode": "full", "every": 2}},
        {"dp_shard": -1, "pipeline": {"schedule": "1f1b"}},
    ),
    "wall_clock_breakdown": (None, False),
}  # fmt: skip


def files(seed, count):
    draw = random.Random(seed)
    for _ in range(count):
        tree = {"model": MODEL, "data": {"sequence_length": 512}}
        tree["train_batch_size"] = draw.choice([32, "32", 64.0])
        for key, values in CHOICES.items():
            value = draw.choice(values)
            if value is not None:
                tree[key] = copy.deepcopy(value)
        yield tree


def leaves(tree, at=""):
    if not isinstance(tree, dict) or not tree:
        return {at: tree}
    found = {}
    for name, value in tree.items():
        found |= leaves(value, f"{at}.{name}" if at else name)
    return found


def same(before, after):
    """Every value of `before` except "auto" is in `after`, in the same form."""
    short = {"zero_optimization": True}
    for path, value in leaves(before).items():
        if value == "auto" or (path.endswith("dp_shard") and value == -1):
            continue
        if path in short and value is True and isinstance(after[path], dict):
            assert after[path]["stage"] == 1  # written out, because the plan adds keys to it
            continue
        found = leaves(after)[path]
        assert found == value and type(found) is type(value), path


def planned_for(tree):
    return configuration.read_file(examine_source(tree)[1])


def check(tree):
    """Whether the file has a plan. If so, the plan keeps the file's values, and the written file resolves to the priced layout."""
    before = copy.deepcopy(tree)
    try:
        made, found = configuration.complete(planned_for(tree), cluster=CLUSTER)
    except (ConfigError, InputError):
        return False
    assert tree == before
    same(tree, made)
    open_fields = {path for path, value in leaves(made).items() if value == "auto"}
    assert open_fields <= {"gradient_clipping"}
    resolved, at = resolve(load(made), world_size=8), found.best[0].layout
    for name in ("tp", "pp", "dp_shard", "dp_replicate"):
        assert resolved.layout.degrees[name] == at[name]
    assert resolved.data_parallel.stage == at["stage"]
    assert resolved.batch.micro_batch_size == at["micro_batch"]
    offload = resolved.optimizer_offload
    assert at["offload"] == (0 if offload.device == "none" else offload.ratio)
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", None: "fp32"}
    assert names[resolved.precision.compute] == found.request.precision
    assert names[resolved.precision.reduce] == found.request.reduce
    return True


def test_a_plan_keeps_what_a_file_says():
    """D1: plans for random files keep what the files say."""
    assert sum(check(tree) for tree in files(seed=1, count=4)) >= 2


@pytest.mark.proof
def test_a_plan_keeps_what_many_files_say():
    """D1: the same with many files."""
    assert sum(check(tree) for tree in files(seed=2, count=400)) >= 200


def written(tmp_path, tree, *options):
    file, out = tmp_path / "file.json", tmp_path / "out.json"
    file.write_text(json.dumps(tree))
    out.unlink(missing_ok=True)
    command = ["plan", str(file), "--gpu", "h100", "--world-size", "8", "--out", str(out)]
    try:
        code = int(main([*command, *options]) or 0)
    except SystemExit as end:
        code = int(end.code or 0)
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_the_command_keeps_what_a_file_says(tmp_path, capsys):
    """D2: short forms, other names, and files that compute in fp16 or fp32 stay what they are."""
    base = {"train_batch_size": 32, "model": MODEL, "data": {"sequence_length": 512}}
    fp16 = {"enabled": True, "loss_scale": 128, "hysteresis": 3}
    on_host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    gpipe = {"pipeline": {"schedule": "gpipe"}, "pp": 2}
    for more, compute in (
        ({"zero_optimization": True, "fp16": fp16}, "float16"),
        ({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": on_host}, None),
        ({"bf16": {"enabled": True}, "parallel": gpipe}, "bfloat16"),
    ):
        code, made = written(tmp_path, base | more)
        shown = capsys.readouterr()
        assert code == 0, shown.err
        same(base | more, made)
        assert resolve(load(made), world_size=8).precision.compute == compute
        assert "fixes" in shown.out
        assert ("--precision bf16" in shown.out) == (compute is None)
    automatic = {key: {"enabled": "auto"} for key in ("bf16", "fp16")}
    code, made = written(tmp_path, base | automatic)
    assert code == 0 and made["bf16"] == {"enabled": True} and made["fp16"] == {"enabled": False}


def test_an_option_wins_over_the_file_and_says_so(tmp_path, capsys):
    tree = {
        "train_batch_size": 32,
        "model": MODEL,
        "tensor_parallel": {"tp_size": 2},
        "fp16": {"enabled": True},
        "data": {"sequence_length": 64},
    }
    options = ["--fix", "tp=4", "--batch", "64", "--precision", "bf16", "--seq", "128"]
    code, made = written(tmp_path, tree, *options)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    for text in (
        "tensor_parallel.tp_size = 2",
        "train_batch_size = 32",
        "data.sequence_length = 64",
        "fp16.enabled = True",
    ):
        words = f"{text} of {tmp_path / 'file.json'} is overridden by the command line"
        assert words in shown.out
    assert (made["parallel"]["tp"], made["train_batch_size"]) == (4, 64)
    assert made["data"]["sequence_length"] == 128 and made["bf16"] == {"enabled": True}
    assert "enabled" not in made["fp16"] and "tp_size" not in made["tensor_parallel"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parallel": {"pp": "auto", "tp": "x"}}, "parallel.tp = 'x': must be a whole number"),  # D7
        ({"parallel": {"pp": "auto", "pipeline": {"blocks_per_stage": [4, 4]}}}, "it fixes the stages, but parallel.pp leaves their number open"),
        ({"parallel": {"pp": "auto", "pipeline": {"schedule": "looped-bfs"}}}, "not a schedule that the planner supports"),
        ({"parallel": {"tp": "auto", "recompute": {"budget_gib": 4}}}, "the planner chooses budgets itself"),
        ({"parallel": {"tp": "auto", "recompute": {"mode": "full", "budget_gib": 4}}}, "a fixed mode has none; leave it out"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled = 'auto': only Transformers' --bf16 and --fp16 choose it"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_keep_is_refused(more, words):
    base = {"train_batch_size": 32, "model": MODEL, "parallel": {"tp": "auto"}}
    with pytest.raises(ConfigError, match=re.escape(words)):
        configuration.complete(planned_for(base | more), cluster=CLUSTER)


def test_every_setting_is_priced_or_named():
    """A new setting is unmodelled until somebody says otherwise, and the lists name settings that exist."""
    for name in (*MODELLED, *WITHOUT_EFFECT):
        assert any(path == name or path.startswith(f"{name}.") for path in schema_fields()), name
    stage = {"stage": 2}
    tree = {"zero_optimization": stage, "bf16": {"enabled": True}, "run": {}, "optimizer": {"type": "Adam"}}  # fmt: skip
    assert unmodelled(load(tree)) == ()
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    recompute = {"mode": "full", "every": 2}
    tree = {
        "zero_optimization": stage | offload,
        "optimizer": {"type": "SGD", "params": {"lr": 1}},
        "parallel": {"tensor_overlap": 4, "recompute": recompute, "compress_gradients": "int8"},
    }
    assert unmodelled(load(tree)) == (
        "zero_optimization.offload_optimizer.device = nvme",
        "zero_optimization.offload_optimizer.nvme_path = /tmp",
        "optimizer.type = SGD",
        "parallel.tensor_overlap = 4",
        "parallel.compress_gradients = int8",
    )


def test_compilation_says_why_it_has_no_pipeline():
    """D8: the message is the rule that refuses the pair, and not that there was no pipeline at all."""
    tree = {"train_batch_size": 32, "model": MODEL, "compile": {"enabled": True}}
    request = configuration.request_of(planned_for(tree), CLUSTER)
    with pytest.raises(ConfigError) as error:
        plan(request, fixed={"pp": 4})
    assert "compil" in str(error.value) and "this version runs no pipeline" not in str(error.value)
    assert "parallel" not in output.chosen(request, plan(request).best[0], {"parallel": {"tp": 1}})
