"""A plan decides what a file leaves open, and keeps every value that the file has."""

import copy
import json
import random

import pytest

from plait.cli.main import main
from plait.config.dialects.keys import schema_fields
from plait.config.resolving.resolve import examine_source, load, resolve
from plait.errors import ConfigError, InputError
from plait.planner import configuration, output
from plait.planner.configuration import MODELLED, WITHOUT_EFFECT, unmodelled
from plait.planner.hardware import cluster
from plait.planner.search import plan
from tests.unit.config.cases import leaf_paths
from tests.unit.planner.jobs import llama

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}
MODEL = {"config": llama(**SIZES, **HEADS)}
CLUSTER = cluster("h100", 8)
BASE = {"train_batch_size": 32, "model": MODEL, "data": {"sequence_length": 512}}

VALUES = {
    "train_batch_size": (32, "32", 64.0),
    "train_micro_batch_size_per_gpu": ("auto", 1, "2", None),
    "gradient_accumulation_steps": ("auto", None),
    "zero_optimization": (
        True,
        {"stage": "auto", "overlap_comm": True},
        {"stage": "2", "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        {"stage": 1.0},
        {"stage": 3, "cpu_offload": False},
    ),
    "fp16": (
        None,
        {"enabled": False, "loss_scale": 128, "hysteresis": 3},
        {"enabled": False, "initial_scale_power": 12},
    ),
    "bf16": (
        None,
        {"enabled": True, "check_grad_overflow": False},
        {"enabled": True},
        {"enabled": False},
    ),
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
}
"""Values of each key in every notation of published files. None leaves the key out."""


def random_files(seed, count):
    """Yield files with a random value of each key."""
    draw = random.Random(seed)
    for _ in range(count):
        tree = copy.deepcopy(BASE)
        for key, values in VALUES.items():
            value = draw.choice(values)
            if value is None:
                tree.pop(key, None)
            else:
                tree[key] = copy.deepcopy(value)
        yield tree


def value_at(tree, path):
    for name in path.split("."):
        tree = tree[name]
    return tree


def check_values_are_kept(before, after):
    """Check that every value of `before` that is not open is in `after`, in the same notation."""
    for path in leaf_paths(before):
        value = value_at(before, path)
        if value == "auto" or (path.endswith("dp_shard") and value == -1):
            continue
        planned = value_at(after, path)
        if path == "zero_optimization" and isinstance(planned, dict):
            # The short form `true` becomes a section if the plan adds keys to it.
            assert value is True and planned["stage"] == 1
        else:
            assert planned == value and type(planned) is type(value), path


def read_file(tree):
    return configuration.read_file(examine_source(tree)[1])


def has_consistent_plan(tree):
    """Return whether the file has a plan. If it has one, check the plan.

    The plan keeps the values of the file, and its file resolves to the layout that was priced.
    """
    before = copy.deepcopy(tree)
    try:
        completed, result = configuration.complete(read_file(tree), cluster=CLUSTER)
    except (ConfigError, InputError):
        return False

    assert tree == before
    check_values_are_kept(tree, completed)
    for path in leaf_paths(completed):
        # Only this key has a meaning of "auto" that is no decision of the planner.
        assert value_at(completed, path) != "auto" or path == "gradient_clipping", path

    resolved = resolve(load(completed), world_size=8)
    layout = result.best[0].layout
    for name in ("tp", "pp", "dp_shard", "dp_replicate"):
        assert resolved.layout.degrees[name] == layout[name]
    assert resolved.data_parallel.stage == layout["stage"]
    assert resolved.batch.micro_batch_size == layout["micro_batch"]
    offload = resolved.optimizer_offload
    assert layout["offload"] == (0 if offload.device == "none" else offload.ratio)
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", None: "fp32"}
    assert names[resolved.precision.compute] == result.request.precision
    assert names[resolved.precision.reduce] == result.request.reduce
    return True


def test_a_plan_keeps_the_values_of_a_file():
    assert sum(has_consistent_plan(tree) for tree in random_files(seed=1, count=4)) >= 2


@pytest.mark.proof
def test_a_plan_keeps_the_values_of_many_files():
    assert sum(has_consistent_plan(tree) for tree in random_files(seed=2, count=400)) >= 200


@pytest.fixture
def plan_file(tmp_path, capsys):
    """Return a function that runs `plait plan` on a file.

    The function returns the file that the command wrote, and its output.
    """

    def run(tree, *options):
        file = tmp_path / "file.json"
        file.write_text(json.dumps(tree))
        out = tmp_path / "out.json"
        command = ["plan", str(file), "--gpu", "h100", "--world-size", "8", "--out", str(out)]
        try:
            code = main([*command, *options])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        assert not code, printed.err
        return json.loads(out.read_text()), printed.out

    return run


@pytest.mark.parametrize(
    ("settings", "compute"),
    [
        (
            {
                "zero_optimization": True,
                "fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3},
            },
            "float16",
        ),
        (
            {
                "tensor_parallel": {"autotp_size": 2},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            None,
        ),
        (
            {
                "bf16": {"enabled": True},
                "parallel": {"pipeline": {"schedule": "gpipe"}, "pp": 2},
            },
            "bfloat16",
        ),
    ],
)
def test_the_command_keeps_notations_and_precision(plan_file, settings, compute):
    written, printed = plan_file(BASE | settings)
    check_values_are_kept(BASE | settings, written)
    assert resolve(load(written), world_size=8).precision.compute == compute
    assert "fixes" in printed
    assert ("--precision bf16" in printed) == (compute is None)


def test_the_command_chooses_an_automatic_precision(plan_file):
    written, _ = plan_file(BASE | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})
    assert written["bf16"] == {"enabled": True} and written["fp16"] == {"enabled": False}


def test_an_option_wins_over_the_file_and_is_reported(plan_file, tmp_path):
    tree = {
        "train_batch_size": 32,
        "model": MODEL,
        "tensor_parallel": {"tp_size": 2},
        "fp16": {"enabled": True},
        "data": {"sequence_length": 64},
    }
    options = ["--fix", "tp=4", "--batch", "64", "--precision", "bf16", "--seq", "128"]
    written, printed = plan_file(tree, *options)
    for setting in (
        "tensor_parallel.tp_size = 2",
        "train_batch_size = 32",
        "data.sequence_length = 64",
        "fp16.enabled = True",
    ):
        file = tmp_path / "file.json"
        assert f"{setting} of {file} is overridden by the command line" in printed
    assert (written["parallel"]["tp"], written["train_batch_size"]) == (4, 64)
    assert written["data"]["sequence_length"] == 128 and written["bf16"] == {"enabled": True}
    assert "enabled" not in written["fp16"] and "tp_size" not in written["tensor_parallel"]


def test_a_wrong_degree_is_refused_beside_an_open_one():
    """Settings that a plan cannot keep are in the table `plans` of ../cli/advice.yaml."""
    tree = {"train_batch_size": 32, "model": MODEL, "parallel": {"pp": "auto", "tp": "x"}}
    with pytest.raises(ConfigError, match="parallel.tp = 'x': must be a whole number"):
        configuration.complete(read_file(tree), cluster=CLUSTER)


def test_every_setting_is_priced_or_reported():
    for name in (*MODELLED, *WITHOUT_EFFECT):
        assert any(path == name or path.startswith(f"{name}.") for path in schema_fields()), name
    zero = {"stage": 2}
    tree = {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "run": {},
        "optimizer": {"type": "Adam"},
    }
    assert unmodelled(load(tree)) == ()
    tree = {
        "zero_optimization": {
            **zero,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        },
        "optimizer": {"type": "SGD", "params": {"lr": 1}},
        "parallel": {
            "tensor_overlap": 4,
            "recompute": {"mode": "full", "every": 2},
            "compress_gradients": "int8",
        },
    }
    assert unmodelled(load(tree)) == (
        "zero_optimization.offload_optimizer.device = nvme",
        "zero_optimization.offload_optimizer.nvme_path = /tmp",
        "optimizer.type = SGD",
        "parallel.tensor_overlap = 4",
        "parallel.compress_gradients = int8",
    )


def test_compilation_is_the_reason_against_a_pipeline():
    tree = {"train_batch_size": 32, "model": MODEL, "compile": {"enabled": True}}
    request = configuration.request_of(read_file(tree), CLUSTER)
    with pytest.raises(ConfigError, match="compil") as error:
        plan(request, fixed={"pp": 4})
    assert "this version runs no pipeline" not in str(error.value)
    assert "parallel" not in output.chosen(request, plan(request).best[0], {"parallel": {"tp": 1}})
