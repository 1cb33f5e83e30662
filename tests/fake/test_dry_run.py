"""`plait dryrun`: its output, the choice of rank and layout, and its errors."""

import json

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
"""Choices that leave a small search."""


def model_file(tmp_path, **changes):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL | changes), encoding="utf-8")
    return str(file)


def run_file(tmp_path, *, model=None, **parallel):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "parallel": parallel,
        "model": model or {"config": MODEL},
        "data": {"sequence_length": 64},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(file)


def run(*arguments):
    """Return the exit code of a dry run."""
    try:
        return int(main(["dryrun", *arguments]) or 0)
    except SystemExit as end:
        return int(end.code or 0)


def report_of(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys, *arguments):
    assert run(*arguments) == 2
    return capsys.readouterr().err


def test_planned_layout(tmp_path, capsys):
    report = report_of(capsys, "--model", model_file(tmp_path), *PLAN)
    assert report["world_size"] == 8 and report["rank"] == 0
    for kind in ("parameters", "optimizer", "peak"):
        assert report["bytes"][kind]["ratio"] == pytest.approx(1, abs=0.03), kind
    assert report["bytes"]["gradients"]["dry_run"] == report["bytes"]["parameters"]["dry_run"]
    assert report["flops"] > 0 and report["operators"][0]["calls"] > 0


def test_fixed_degrees_change_the_traffic(tmp_path, capsys):
    degrees = "tp=2,pp=1,stage=3,dp_shard=4"
    report = report_of(capsys, "--model", model_file(tmp_path), *PLAN, "--fix", degrees)
    axes = {(entry["axis"], entry["kind"]): entry["ranks"] for entry in report["traffic"]}
    assert axes["dp_shard", "all_gather"] == 4 and {axis for axis, _ in axes} >= {"tp", "dp_shard"}


def test_layout_of_a_file_is_not_searched(tmp_path, capsys):
    arguments = (run_file(tmp_path, pp=2, tp=2), "--world-size", "8", "--gpu", "h100")
    first = report_of(capsys, *arguments, "--rank", "0")
    last = report_of(capsys, *arguments, "--rank", "4")
    assert first["stage"] == "rank 0 of 2 in the pipeline"
    assert last["stage"] == "rank 1 of 2 in the pipeline"
    assert first["micro_batches_of_a_step"] == 2
    assert first["bytes"]["parameters"]["dry_run"] != last["bytes"]["parameters"]["dry_run"]
    assert first["bytes"]["peak"]["ratio"] == pytest.approx(1, abs=0.03)

    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert "fixes its layout" in printed.out and "ratio" in printed.out
    assert "building rank" in printed.err


def test_vocabulary_of_the_trained_tokenizer(tmp_path, capsys):
    """A model without a vocabulary has the tokenizer's, in the dry run as in the plan."""
    fields = {name: value for name, value in MODEL.items() if name != "vocab_size"}
    file = run_file(tmp_path, model={"config": fields})
    sizes = report_of(capsys, file, "--world-size", "1", "--gpu", "h100")["bytes"]
    assert sizes["parameters"]["dry_run"] > 2 * 8192 * 64 * 4
    assert sizes["parameters"]["ratio"] == 1


def test_full_step_has_more_calls_and_the_same_peak(tmp_path, capsys):
    arguments = (
        *("--model", model_file(tmp_path), "--world-size", "8", "--gpu", "h100"),
        *("--batch", "32", "--seq", "64"),
        *("--fix", "tp=1,pp=1,stage=3,dp_shard=2,dp_replicate=4,micro_batch=1"),
    )
    short = report_of(capsys, *arguments)
    full = report_of(capsys, *arguments, "--full-step")
    assert (short["micro_batches_run"], full["micro_batches_run"]) == (2, 4)
    peak = full["bytes"]["peak"]["dry_run"]
    assert short["bytes"]["peak"]["dry_run"] == pytest.approx(peak, rel=0.01)
    assert short["flops"] * 2 == full["flops"]


def test_remedies_of_errors_work(tmp_path, capsys):
    model = ("--model", model_file(tmp_path))
    message = error_of(capsys, *model, *PLAN, *FIXED, "--rank", "8")
    assert "the layout has ranks 0 to 7; pass one of them" in message
    assert run(*model, *PLAN, *FIXED, "--rank", "7") == 0

    one_rank = ("--world-size", "1", "--gpu", "h100")
    message = error_of(capsys, run_file(tmp_path, model={"path": "llama-3-8b"}), *one_rank)
    assert "pass model.config, or a folder with a config.json" in message
    assert run(run_file(tmp_path, model={"path": str(tmp_path)}), *one_rank) == 0

    misspelt = model_file(tmp_path, model_type="llamma")
    assert "did you mean llama" in error_of(capsys, "--model", misspelt, *PLAN, *FIXED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without a GPU")
def test_kernels_need_a_gpu(tmp_path, capsys):
    arguments = ("--model", model_file(tmp_path), *PLAN, *FIXED, "--on-device")
    assert "needs a GPU" in error_of(capsys, *arguments)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    report = report_of(capsys, "--model", model_file(tmp_path), *PLAN, "--on-device")
    assert report["step_seconds"] > 0
    assert sum(entry["device_seconds"] for entry in report["operators"]) > 0
    assert report["bytes"]["peak"]["dry_run"] > report["bytes"]["parameters"]["dry_run"]
