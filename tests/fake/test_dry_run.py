"""`plait dryrun`: what it prints and writes, which rank and which layout it runs, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from plait.cli.main import main

pytest.importorskip("transformers")
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
PLAN = ("--world-size", "8", "--gpu", "h100", "--batch", "16", "--seq", "64")
FIXED = ("--fix", "pp=1,tp=1,stage=3,dp_shard=8,micro_batch=2")
"""Leaves little to search."""


def config(tmp_path, **changes):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL | changes), encoding="utf-8")
    return str(file)


def run_file(tmp_path, **parallel):
    file = tmp_path / "run.json"
    tree = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "parallel": parallel,
        "model": {"config": MODEL},
        "data": {"sequence_length": 64},
    }
    file.write_text(json.dumps(tree), encoding="utf-8")
    return str(file)


def run(*arguments):
    try:
        return int(main(["dryrun", *arguments]) or 0)
    except SystemExit as end:
        return int(end.code or 0)


def told(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_winner(tmp_path, capsys):
    found = told(capsys, "--model", config(tmp_path), *PLAN)
    assert found["world_size"] == 8 and found["rank"] == 0
    for kind in ("parameters", "optimizer", "peak"):
        assert found["bytes"][kind]["ratio"] == pytest.approx(1, abs=0.03), kind
    assert found["bytes"]["gradients"]["dry_run"] == found["bytes"]["parameters"]["dry_run"]
    assert found["flops"] > 0 and found["operators"][0]["calls"] > 0


def test_what_is_fixed_changes_the_traffic(tmp_path, capsys):
    found = told(
        capsys, "--model", config(tmp_path), *PLAN, "--fix", "tp=2,pp=1,stage=3,dp_shard=4"
    )
    axes = {(entry["axis"], entry["kind"]): entry["ranks"] for entry in found["traffic"]}
    assert axes["dp_shard", "all_gather"] == 4 and {axis for axis, _ in axes} >= {"tp", "dp_shard"}


def test_a_file_that_fixes_its_layout_is_run_as_it_is(tmp_path, capsys):
    file = run_file(tmp_path, pp=2, tp=2)
    arguments = (file, "--world-size", "8", "--gpu", "h100")
    first = told(capsys, *arguments, "--rank", "0")
    last = told(capsys, *arguments, "--rank", "4")
    assert (first["stage"], last["stage"]) == (
        "rank 0 of 2 in the pipeline",
        "rank 1 of 2 in the pipeline",
    )
    assert first["micro_batches_of_a_step"] == 2
    assert first["bytes"]["parameters"]["dry_run"] != last["bytes"]["parameters"]["dry_run"]
    assert first["bytes"]["peak"]["ratio"] == pytest.approx(1, abs=0.03)
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert (
        "fixes its layout" in printed.out
        and "ratio" in printed.out
        and "building rank" in printed.err
    )


def test_a_whole_step_has_more_calls_and_the_same_peak(tmp_path, capsys):
    common = (
        "--model",
        config(tmp_path),
        *PLAN,
        "--fix",
        "tp=1,pp=1,stage=3,dp_shard=2,dp_replicate=4,micro_batch=1",
    )
    common = tuple("32" if text == "16" else text for text in common)
    part, whole = told(capsys, *common), told(capsys, *common, "--full-step")
    assert (part["micro_batches_run"], whole["micro_batches_run"]) == (2, 4)
    assert part["bytes"]["peak"]["dry_run"] == pytest.approx(
        whole["bytes"]["peak"]["dry_run"], rel=0.01
    )
    assert part["flops"] * 2 == whole["flops"]


def test_a_rank_that_the_layout_does_not_have(tmp_path, capsys):
    assert run("--model", config(tmp_path), *PLAN, *FIXED, "--rank", "8") == 2
    assert "the layout has ranks 0 to 7" in capsys.readouterr().err


def test_a_model_that_transformers_does_not_have(tmp_path, capsys):
    assert run("--model", config(tmp_path, model_type="llamma"), *PLAN, *FIXED) == 2
    assert "did you mean llama" in capsys.readouterr().err


def test_what_it_advises_works(tmp_path, capsys):
    """Ranks that exist, a folder for a public name, and the architecture that is meant."""
    model = ("--model", config(tmp_path))
    file = tmp_path / "file.json"
    tree = json.loads(Path(run_file(tmp_path)).read_text("utf-8"))
    on_one = (str(file), "--world-size", "1", "--gpu", "h100")

    def refusal(*arguments):
        assert run(*arguments) == 2
        return capsys.readouterr().err

    def name_model(path):
        file.write_text(json.dumps(tree | {"model": {"path": str(path)}}), "utf-8")

    said = refusal(*model, *PLAN, *FIXED, "--rank", "8")
    assert "the layout has ranks 0 to 7; pass one of them" in said
    assert run(*model, *PLAN, *FIXED, "--rank", "7") == 0
    name_model("llama-3-8b")
    assert "pass model.config, or a folder with a config.json" in refusal(*on_one)
    name_model(tmp_path)
    assert run(*on_one) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_kernels_need_a_gpu(tmp_path, capsys):
    assert run("--model", config(tmp_path), *PLAN, *FIXED, "--on-device") == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    """Not run anywhere yet: no GPU was at hand when it was written."""
    found = told(capsys, "--model", config(tmp_path), *PLAN, "--on-device")
    assert (
        found["step_seconds"] > 0
        and sum(entry["device_seconds"] for entry in found["operators"]) > 0
    )
    assert found["bytes"]["peak"]["dry_run"] > found["bytes"]["parameters"]["dry_run"]
