"""`plait config explain` and `plait config schema` as a user runs them."""

import json

import pytest

from plait.cli.main import main
from tests.table import check_rows

FILE = """{
  // two processes share every matrix product
  "zero_optimization": {"stage": 2, "overlap_comm": true},
  "tensor_parallel": {"tp_size": 2},
  "train_micro_batch_size_per_gpu": 4,
}"""


def run(*arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    output = capsys.readouterr()
    return ended.value.code, output.out, output.err


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(FILE)
    return str(path)


def test_explain_in_a_pipe_prints_aligned_lines(file, capsys):
    code, out, err = run("explain", file, "--world-size", "8", capsys=capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"keys of {file}"
    assert lines[2].split()[:3] == ["zero_optimization.overlap_comm", "true", "ignored"]
    assert "resolved for 8 processes (set the number with --world-size)" in lines
    [shards] = [line for line in lines if line.split()[:2] == ["parallel.dp_shard", "4"]]
    assert "derived: 8 processes" in shards
    columns = {line.index("supported") for line in lines[1:5] if "supported" in line}
    assert len(columns) == 1
    assert not any(line != line.rstrip() for line in lines)


def test_explain_on_a_terminal_prints_tables(file, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("explain", file, capsys=capsys)
    assert code == 0
    assert "┃" in out
    assert "resolved for 2 processes" in out


def test_explain_as_json(file, capsys):
    code, out, _ = run("explain", file, "--set", "parallel.tp=1", "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert (found["world_size"], found["problems"]) == (1, [])
    assert {"name": "parallel.tp", "value": 1, "source": "override"} in found["values"]
    assert [row["key"] for row in found["keys"]] == [
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "train_micro_batch_size_per_gpu",
        "parallel.tp",
    ]


def test_a_wrong_file_shows_its_keys_and_every_problem(file, capsys):
    wrong = ("--set", "train_batch_size=9", "--set", "data_parallel_size=3")
    code, out, err = run("explain", file, *wrong, capsys=capsys)
    assert code == 2
    assert "zero_optimization.stage" in out
    # E4: the values that can be resolved are shown as well.
    assert "parallel.dp_shard" in out and "gradient_accumulation_steps" not in out
    assert "train_batch_size = 9: micro 4 x dp 1 = 4 and 9 % 4 = 1; use 8 or 12" in err
    assert "data_parallel_size = 3" in err
    assert "Traceback" not in err
    code, out, _ = run("explain", file, "--set", "train_batch_size=9", "--json", capsys=capsys)
    assert code == 2
    assert json.loads(out)["problems"][0]["message"].startswith("train_batch_size = 9: ")


MISTAKES = {
    "nowhere.json": "nowhere.json: there is no such file",
    "{file} --set zero_optimization.stge=3": "did you mean zero_optimization.stage?",
    "{file} --set nonsense": "--set = 'nonsense': an override is a dotted key",
    "{file} --world-size 3": "tp 2 = 2 and 3 % 2 = 1; start 2 or 4 processes",
    "{file} --world-size 0": "--world-size = '0': ",
    "{file} {file}": "one FILE is read at a time, but 2 are given",
    "": "Missing argument",
    "-- --tensor-model-parallel-size 4": "run: plait config convert -- --tensor-model-parallel-size 4",
}


def test_mistakes_exit_with_2_and_a_sentence(file, capsys):
    def check(row):
        code, _, err = run("explain", *row[0].replace("{file}", file).split(), capsys=capsys)
        assert code == 2 and "Traceback" not in err
        assert row[1] in " ".join(err.replace("│", " ").split())

    check_rows({row[0]: row for row in MISTAKES.items()}, check)


def test_schema(capsys):
    code, out, _ = run("schema", capsys=capsys)
    assert code == 0
    schema = json.loads(out)
    assert {"zero_optimization", "parallel", "model", "data", "run"} <= set(schema["properties"])


def test_megatrons_flags_become_a_file(tmp_path, capsys):
    """E8: the file has the meaning of the flags, WSD included. `plait train -- FLAGS` names the command that writes it."""
    from plait.config.convert.conversion import load_foreign
    from plait.config.resolving.resolve import load

    flags = ["--micro-batch-size", "2", "--bf16", "--lr", "1e-4", "--train-iters", "100"]
    flags += ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "10"]
    file = tmp_path / "run.json"
    for _ in range(2):  # the second time it exists
        with pytest.raises(SystemExit) as end:
            main(["config", "convert", "--out", str(file), "--", *flags])
    assert end.value.code == 2 and "exists" in capsys.readouterr().err
    read, meant = load(file), load_foreign(flags)
    assert read.model_dump() == meant.model_dump()
    assert read.scheduler.params["wsd_decay_steps"] == 10
    with pytest.raises(SystemExit) as end:
        main(["train", "--", *flags])
    assert end.value.code == 2 and "plait config convert" in capsys.readouterr().err


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


def test_a_file_of_accelerate_becomes_a_file(accelerate, capsys):
    out = accelerate.with_name("run.json")
    command = ("convert", str(accelerate), "--out", str(out))
    code, table, err = run(*command, capsys=capsys)
    assert (code, err) == (0, "")
    assert json.loads(out.read_text()) == CONVERTED
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in table.splitlines()[:-2]}
    ignored = "ignored: an option of the launcher; see `plait launch --help`"
    assert rows["key"] == ["value", "Plait's", "note"]
    assert rows["fsdp_config.fsdp_reshard_after_forward"] == ["true", "zero_optimization.stage"]
    assert rows["parallelism_config.parallelism_config_tp_size"] == ["2", "parallel.tp"]
    assert rows["machine_rank"] == ["0", "-", ignored]
    assert "(left out)" in table and "Accelerate's default" in table
    assert table.splitlines()[-1].startswith(f"wrote {out}; add the sections model and data")
    code, _, err = run(*command, capsys=capsys)
    assert code == 2 and "exists; pass another name" in err


def test_without_out_the_file_is_on_standard_output(accelerate, capsys):
    code, out, err = run("convert", str(accelerate), "--set", "parallel.tp=1", capsys=capsys)
    assert code == 0 and "machine_rank" in err
    assert json.loads(out) == {**CONVERTED, "parallel": {"dp_replicate": 1, "dp_shard": 2, "tp": 1}}


def test_inconvertible_keys_are_listed_and_nothing_is_written(accelerate, capsys):
    out = accelerate.with_name("run.json")
    text = ACCELERATE.replace("num_processes", "num_procesess").replace("bf16", "fp8")
    accelerate.write_text(text)
    code, table, err = run("convert", str(accelerate), "--out", str(out), capsys=capsys)
    assert code == 2 and not out.exists()
    assert "refused: unknown key of Accelerate" in table
    assert "refused: this release computes in fp16" in table
    assert "num_procesess = 4: unknown key of Accelerate; did you mean num_processes?" in err
    assert "mixed_precision = 'fp8'" in err and "Traceback" not in err


def test_a_deepspeed_file_becomes_a_file_without_what_is_ignored(file, capsys):
    code, out, err = run("convert", file, capsys=capsys)
    assert code == 0
    batch, stage = "train_micro_batch_size_per_gpu", "zero_optimization.stage"
    assert json.loads(out) == {"zero_optimization": {"stage": 2}, batch: 4, "parallel": {"tp": 2}}
    assert [line.split()[2] for line in err.splitlines()[1:]] == [stage, "-", "parallel.tp", batch]
