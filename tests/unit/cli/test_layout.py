"""`plait layout` prints the grid, the split of parameters and the bytes of a rank."""

import json

import pytest

from tests.unit.cli import commands
from tests.unit.planner.jobs import llama

MODEL = llama(intermediate_size=101, num_key_value_heads=2, vocab_size=201)
FILE = {"zero_optimization": {"stage": 3}, "parallel": {"tp": 2}, "model": {"config": MODEL}}


def run(folder, line=""):
    """Run the command on `FILE`, and return its exit code."""
    (folder / "file.json").write_text(json.dumps(FILE))
    return commands.run(f"layout {line}", folder / "file.json")


def test_json(tmp_path, capsys):
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
    # Every parameter of two blocks, and three outside of blocks.
    assert len(split) == 2 * 9 + 3
    assert report["memory"]["optimizer"] > 2 * report["memory"]["parameters"]


def test_tensor_parallel_groups_that_span_nodes_are_reported(tmp_path, capsys):
    assert run(tmp_path, "--nnodes 2 --nproc-per-node 1") == 0
    printed = capsys.readouterr().out
    assert "parallel.tp = 2: 1 of 1 tensor parallel groups span nodes" in printed
    # The blocks are equal, so one of them is shown.
    assert "model.layers.0.mlp.up_proj.weight" in printed and "model.layers.1." not in printed
    assert "uneven: 51 to 50 of 101" in printed


def test_the_peak_of_a_step(tmp_path, capsys):
    pipeline = "--nproc-per-node 4 --set parallel.pp=2 --set gradient_accumulation_steps=2"
    assert run(tmp_path, f"{pipeline} --peak --sequence-length 64 --json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [peak["rank"] for peak in report["peak"]] == [0, 2]
    assert report["peak_not_foretold"] is None
    for peak in report["peak"]:
        assert sum(peak["kinds"].values()) == peak["peak_bytes"] == max(peak["phases"].values())
        assert peak["kinds"]["activations"] > 0
    assert run(tmp_path, "--peak --sequence-length 64") == 0
    printed = capsys.readouterr().out
    for text in (
        "activations of all micro-batches in flight",
        "timeline point",
        "peak of optimizer step",
    ):
        assert text in printed


def test_bytes_of_offload_to_files(tmp_path, capsys):
    def on_disk(section):
        key = f"zero_optimization.{section}"
        return f" --set {key}.device=nvme --set {key}.nvme_path=a"

    def memory(offload):
        assert run(tmp_path, f"{zero} --json{offload}") == 0
        return json.loads(capsys.readouterr().out)["memory"]

    zero = "--set zero_optimization.stage=3 --nproc-per-node 4"
    parameters = on_disk("offload_param")
    states = on_disk("offload_optimizer")
    without = memory("")
    assert "files" not in without
    # The buffer pool is larger than this model by default.
    shards = memory(parameters)
    assert shards["files"] == shards["step_buffers"] == without["parameters"]
    assert shards["files"] + memory(states)["files"] == memory(parameters + states)["files"]
    assert run(tmp_path, zero + parameters) == 0
    assert "of these, in files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "predicted with --peak"),
        ("--peak", "the file has no data.sequence_length; pass --sequence-length too"),
        (
            "--set zero_optimization.offload_optimizer.device=cpu --nproc-per-node 4 --peak "
            "--sequence-length 64",
            "not modelled yet: zero_optimization.offload_optimizer",
        ),
        (
            "--set gradient_accumulation_steps=1000000000 --peak --sequence-length 64",
            "not modelled yet: gradient_accumulation_steps above 1000, because every micro-batch",
        ),
    ],
)
def test_a_missing_peak_has_its_reason(options, message, tmp_path, capsys):
    assert run(tmp_path, options) == 0
    assert message in capsys.readouterr().out


def test_published_models_need_no_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(tmp_path, "--model llama-3-8b") == 0
    assert "8.0 B parameters" in capsys.readouterr().out


def test_tables_of_hundreds_of_ranks_are_shortened(tmp_path, capsys):
    assert run(tmp_path, "--nnodes 16 --nproc-per-node 16") == 0
    printed = capsys.readouterr().out
    assert "9 more machines, in the same order" in printed and "... 8 more ..." in printed
    assert "node15" in printed and "node9" not in printed
