"""`plait config` explains, converts and describes configuration files."""

import json

import pytest

from plait.config.convert.conversion import load_foreign
from plait.config.resolving.resolve import load
from tests.table import check_rows
from tests.unit.cli import commands

FILE = """{
  // two processes share every matrix product
  "zero_optimization": {"stage": 2, "overlap_comm": true},
  "tensor_parallel": {"tp_size": 2},
  "train_micro_batch_size_per_gpu": 4,
}"""


@pytest.fixture
def run(capsys):
    """Return a function that runs `plait config`, and returns exit code, output and errors."""

    def run_command(*arguments):
        code = commands.run("config", *arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(FILE)
    return str(path)


def test_explain_in_a_pipe_prints_aligned_lines(file, run):
    code, out, err = run("explain", file, "--world-size", "8")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"keys of {file}"
    assert lines[2].split()[:3] == ["zero_optimization.overlap_comm", "true", "ignored"]
    assert "resolved for 8 processes (set the number with --world-size)" in lines
    (shards,) = [line for line in lines if line.split()[:2] == ["parallel.dp_shard", "4"]]
    assert "derived: 8 processes" in shards
    # Columns are aligned, and lines have no spaces at the end.
    assert len({line.index("supported") for line in lines[1:5] if "supported" in line}) == 1
    assert out.splitlines() == [line.rstrip() for line in lines]


def test_explain_on_a_terminal_prints_tables(file, run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("explain", file)
    assert code == 0
    assert "┃" in out
    assert "resolved for 2 processes" in out


def test_explain_as_json(file, run):
    code, out, _ = run("explain", file, "--set", "parallel.tp=1", "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["world_size"], report["problems"]) == (1, [])
    assert {"name": "parallel.tp", "value": 1, "source": "override"} in report["values"]
    assert [row["key"] for row in report["keys"]] == [
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "train_micro_batch_size_per_gpu",
        "parallel.tp",
    ]


def test_a_wrong_file_shows_its_keys_and_every_problem(file, run):
    wrong = ("--set", "train_batch_size=9", "--set", "data_parallel_size=3")
    code, out, err = run("explain", file, *wrong)
    assert code == 2
    assert "zero_optimization.stage" in out
    # Values that do not depend on the wrong ones are shown.
    assert "parallel.dp_shard" in out and "gradient_accumulation_steps" not in out
    assert "train_batch_size = 9: micro 4 x dp 1 = 4 and 9 % 4 = 1; use 8 or 12" in err
    assert "data_parallel_size = 3" in err
    assert "Traceback" not in err
    code, out, _ = run("explain", file, "--set", "train_batch_size=9", "--json")
    assert code == 2
    assert json.loads(out)["problems"][0]["message"].startswith("train_batch_size = 9: ")


MISTAKES = {
    "nowhere.json": "nowhere.json: there is no such file",
    "{file} --world-size 3": "tp 2 = 2 and 3 % 2 = 1; start 2 or 4 processes",
    "{file} --world-size 0": "--world-size = '0': ",
    "{file} {file}": "one FILE is read at a time, but 2 are given",
    "": "Missing argument",
}


def test_mistakes_exit_with_2_and_a_message(file, run):
    def check(row):
        line, message = row
        code, _, err = run("explain", *line.replace("{file}", file).split())
        assert code == 2 and "Traceback" not in err
        # The frame of the terminal breaks lines.
        assert message in " ".join(err.replace("│", " ").split())

    check_rows({row[0]: row for row in MISTAKES.items()}, check)


def test_schema(run):
    code, out, _ = run("schema")
    assert code == 0
    schema = json.loads(out)
    assert {"zero_optimization", "parallel", "model", "data", "run"} <= set(schema["properties"])


def test_megatrons_flags_become_a_file(tmp_path, run, capsys):
    flags = ["--micro-batch-size", "2", "--bf16", "--lr", "1e-4", "--train-iters", "100"]
    flags += ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "10"]
    file = tmp_path / "run.json"
    code, _, _ = run("convert", "--out", str(file), "--", *flags)
    assert code == 0
    config = load(file)
    assert config.model_dump() == load_foreign(flags).model_dump()
    assert config.scheduler.params["wsd_decay_steps"] == 10
    assert commands.run("train --", *flags) == 2
    assert "plait config convert" in capsys.readouterr().err


ACCELERATE = """distributed_type: FSDP
machine_rank: 0
mixed_precision: bf16
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_use_orig_params: true
parallelism_config:
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
CONVERTED = {
    "zero_optimization": {"stage": 3},
    "parallel": {"dp_replicate": 1, "dp_shard": 2, "tp": 2},
    "bf16": {"enabled": True},
    "run": {"processes": 4},
}


@pytest.fixture
def accelerate(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE)
    return path


def test_a_file_of_accelerate_becomes_a_file(accelerate, run):
    out = accelerate.with_name("run.json")
    command = ("convert", str(accelerate), "--out", str(out))
    code, table, err = run(*command)
    assert (code, err) == (0, "")
    assert json.loads(out.read_text()) == CONVERTED
    rows = {}
    for line in table.splitlines()[:-2]:
        key, *columns = line.split(maxsplit=3)
        rows[key] = columns
    ignored = "ignored: an option of the launcher; see `plait launch --help`"
    assert rows["key"] == ["value", "Plait's", "note"]
    assert rows["fsdp_config.fsdp_reshard_after_forward"] == ["true", "zero_optimization.stage"]
    assert rows["parallelism_config.parallelism_config_tp_size"] == ["2", "parallel.tp"]
    assert rows["machine_rank"] == ["0", "-", ignored]
    assert "(left out)" in table and "Accelerate's default" in table
    assert table.splitlines()[-1].startswith(f"wrote {out}; add the sections model and data")


def test_without_out_the_file_is_printed(accelerate, run):
    code, out, err = run("convert", str(accelerate), "--set", "parallel.tp=1")
    assert code == 0 and "machine_rank" in err
    assert json.loads(out) == {**CONVERTED, "parallel": {"dp_replicate": 1, "dp_shard": 2, "tp": 1}}


def test_keys_that_cannot_be_converted_are_listed(accelerate, run):
    out = accelerate.with_name("run.json")
    wrong = ACCELERATE.replace("num_processes", "num_procesess").replace("bf16", "fp8")
    accelerate.write_text(wrong)
    code, table, err = run("convert", str(accelerate), "--out", str(out))
    assert code == 2 and not out.exists()
    assert "refused: unknown key of Accelerate" in table
    assert "refused: this release computes in fp16" in table
    assert "num_procesess = 4: unknown key of Accelerate; did you mean num_processes?" in err
    assert "mixed_precision = 'fp8'" in err and "Traceback" not in err


def test_ignored_keys_of_a_deepspeed_file_are_left_out(file, run):
    code, out, err = run("convert", file)
    assert code == 0
    batch = "train_micro_batch_size_per_gpu"
    stage = "zero_optimization.stage"
    assert json.loads(out) == {"zero_optimization": {"stage": 2}, batch: 4, "parallel": {"tp": 2}}
    assert [line.split()[2] for line in err.splitlines()[1:]] == [stage, "-", "parallel.tp", batch]
