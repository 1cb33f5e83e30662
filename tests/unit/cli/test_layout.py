"""`plait layout`: grid, split and bytes from shapes alone."""

import json

import pytest

from tests.unit.cli import commands

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 101, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 201,
}  # fmt: skip
FILE = {"zero_optimization": {"stage": 3}, "parallel": {"tp": 2}, "model": {"config": MODEL}}


def run(folder, line=""):
    """Return the command's exit code."""
    (folder / "file.json").write_text(json.dumps(FILE))
    return commands.run(f"layout {line}", folder / "file.json")


def test_report(tmp_path, capsys):
    """`--json` prints a report for programs."""
    assert run(tmp_path, "--nnodes 2 --nproc-per-node 2 --json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["tp"] == 2 and report["layout"]["dp_shard"] == 2
    assert report["grid"] == [
        ["node0", "0 dp_shard0 tp0", "1 dp_shard0 tp1"],
        ["node1", "2 dp_shard1 tp0", "3 dp_shard1 tp1"],
    ]
    assert report["warning"] is None
    split = {row["parameter"]: row["local_shape"] for row in report["parameters"]}
    assert split["model.layers.0.mlp.up_proj.weight"] == [51, 64]
    assert len(split) == 2 * 9 + 3, "every parameter is named"
    assert report["memory"]["optimizer"] > 2 * report["memory"]["parameters"]


def test_lines_and_warning(tmp_path, capsys):
    """A tensor parallel group that spans nodes is reported."""
    assert run(tmp_path, "--nnodes 2 --nproc-per-node 1") == 0
    shown = capsys.readouterr().out
    assert "parallel.tp = 2: 1 of 1 tensor parallel groups span nodes" in shown
    assert "model.layers.0.mlp.up_proj.weight" in shown and "model.layers.1." not in shown
    assert "uneven: 51 to 50 of 101" in shown


def test_wrong_input(tmp_path, capsys):
    """Head counts are checked before any process starts."""
    assert run(tmp_path, "--set parallel.tp=3") == 2
    assert "num_attention_heads is 4 and 4 % 3 != 0" in capsys.readouterr().err


def test_the_peak_of_a_step(tmp_path, capsys):
    """Peaks are shown by kind, with their moment, for every stage of a pipeline."""
    pipeline = "--nproc-per-node 4 --set parallel.pp=2 --set gradient_accumulation_steps=2"
    assert run(tmp_path, f"{pipeline} --peak --sequence-length 64 --json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [peak["rank"] for peak in report["peak"]] == [0, 2]
    assert report["peak_not_foretold"] is None
    for peak in report["peak"]:
        assert sum(peak["kinds"].values()) == peak["peak_bytes"] == max(peak["phases"].values())
        assert peak["kinds"]["activations"] > 0
    assert run(tmp_path, "--peak --sequence-length 64") == 0
    shown = capsys.readouterr().out
    for words in ("activations of all micro-batches in flight", "timeline point", "peak of optimizer step"):  # fmt: skip
        assert words in shown


def test_what_is_in_files(tmp_path, capsys):
    """Files may hold parameters alone, or states as well."""
    zero = "--set zero_optimization.stage=3 --nproc-per-node 4"
    params, states = (
        f" --set zero_optimization.{name}.device=nvme --set zero_optimization.{name}.nvme_path=a"
        for name in ("offload_param", "offload_optimizer")
    )
    found = []
    for offload in ("", params, states, params + states):
        assert run(tmp_path, f"{zero} --json{offload}") == 0
        found.append(json.loads(capsys.readouterr().out)["memory"])
    memory, shards, rest, everything = found
    assert "files" not in memory
    # The pool's default is larger than this model.
    assert shards["files"] == shards["step_buffers"] == memory["parameters"]
    assert shards["files"] + rest["files"] == everything["files"]
    assert run(tmp_path, zero + params) == 0
    assert "of these, in files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "predicted with --peak"),
        ("--peak", "the file has no data.sequence_length; pass --sequence-length too"),
        ("--set zero_optimization.offload_optimizer.device=cpu --nproc-per-node 4 --peak --sequence-length 64", "not modelled yet: zero_optimization.offload_optimizer"),
    ],
)  # fmt: skip
def test_no_peak_is_said_with_its_reason(options, words, tmp_path, capsys):
    assert run(tmp_path, options) == 0
    assert words in capsys.readouterr().out


def test_a_public_model_by_the_name_that_plan_has(tmp_path, capsys, monkeypatch):
    """E6: found without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(tmp_path, "--model llama-3-8b") == 0
    assert "8.0 B parameters" in capsys.readouterr().out


def test_hundreds_of_ranks_are_shown_in_short(tmp_path, capsys):
    """E11: long tables are shortened."""
    assert run(tmp_path, "--nnodes 16 --nproc-per-node 16") == 0
    shown = capsys.readouterr().out
    assert "9 more machines, in the same order" in shown and "... 8 more ..." in shown
    assert "node15" in shown and "node9" not in shown
