"""`plait plan` prints, writes and refuses. Predictions are tested with the planner."""

import json
from pathlib import Path

import pytest

from plait.cluster.topology import default_processes
from plait.config.resolving.resolve import load, resolve
from plait.planner.constants import interval_coverage
from tests.unit.cli.commands import PLAN, SMALL_PLAN, run
from tests.unit.planner.jobs import llama

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.json"


def test_a_plan_is_printed_explained_and_written(tmp_path, capsys):
    out = tmp_path / "deep" / "run.json"
    assert run(f"{PLAN} --why tp=8 --why tp=3 --out", out) == 0
    printed = capsys.readouterr().out
    coverage = interval_coverage()["time"]
    for text in (
        "llama-3-8b: 8.0 B parameters; 16 x NVIDIA H100",
        "layouts evaluated",
        "matrix products of the layers",
        "memory at its peak",
        "why not tp=8 is",
        "why not tp=3 cannot be: 16 devices and 16 % 3 = 1",
        "of 79.1 GiB",
        f"Of published runs of other sources, {coverage.share:.0%} of {coverage.rows} step times",
        f"plait train {out}",
    ):
        assert text in printed, text
    assert resolve(load(out), world_size=16).batch.train_batch_size == 64
    assert json.loads(out.with_suffix(".plan.json").read_text())["cluster"]["devices"] == 16


def test_json_on_standard_output_is_nothing_else(capsys):
    assert run(f"{PLAN} --json --why tp=8 --top 2") == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["best"]) == 2 and report["why"][0]["query"] == "tp=8"
    assert load(report["config"]).train_batch_size == 64
    assert report["sidecar"]["step"]["seconds"] == report["best"][0]["step"]["seconds"]


def test_a_training_file_is_planned_for(tmp_path, capsys):
    out = tmp_path / "run.json"
    assert run("plan --gpu a100 --world-size 4 --out", out, QUICKSTART) == 0
    assert "8: 2 samples per device" in capsys.readouterr().out
    original = json.loads(QUICKSTART.read_text())
    planned = json.loads(out.read_text())
    for name in ("optimizer", "run", "model"):
        assert planned[name] == original[name], name
    assert planned["train_batch_size"] == 8 and planned["data"]["sequence_length"] == 128


def test_the_default_devices_are_the_processes_of_training(tmp_path, capsys):
    capacities = []
    file = tmp_path / "run.json"
    out = tmp_path / "planned.json"
    for processes, count in ((1, 1), ("auto", default_processes())):
        tree = json.loads(QUICKSTART.read_text())
        tree["run"]["processes"] = processes
        file.write_text(json.dumps(tree))
        assert run("plan --json --out", out, file) == 0
        best = json.loads(capsys.readouterr().out)["sidecar"]
        assert best["cluster"]["devices"] == count
        # The stage of the file is kept for a single process too.
        assert best["layout"]["stage"] == 2
        assert resolve(load(out), world_size=count).data_parallel.stage == 2
        capacities.append(best["cluster"]["memory_bytes"] * count)
    # Processes share the machine's memory.
    assert capacities[1] == pytest.approx(capacities[0], rel=1e-6)


def test_nothing_fits_is_exit_code_1(capsys):
    assert run("plan --model llama-3-405b --world-size 8 --gpu h100 --batch 8") == 1
    message = capsys.readouterr().err
    for text in ("nothing fits", "of 79.1 GiB: ", "more GPUs"):
        assert text in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--world-size 12 --gpu h100", "12 % 8 = 4"),
        ("--world-size 8 --gpu h100 --batch 7 --fix tp=1", "7 % 8 = 7"),
        ("--nnodes 2 --gpu h100 --world-size 8", "2 machines of 8 GPUs have 16 GPUs"),
    ],
)
def test_mistakes_exit_with_2(options, message, capsys):
    """More mistakes and their remedies are in advice.yaml."""
    assert run(f"plan --model llama-3-8b {options}") == 2
    output = capsys.readouterr().err
    assert message in output and "Traceback" not in output


def test_names_are_listed(capsys):
    assert run("plan models") == 0
    printed = capsys.readouterr().out
    assert "turing-nlg-530b" in printed and "mi300x" in printed


def test_a_file_written_by_hand_is_not_replaced(tmp_path, capsys):
    """A file that a plan wrote is replaced until somebody edits it."""
    out = tmp_path / "run.json"
    out.write_text('{"train_batch_size": 8}')
    plan = f"{SMALL_PLAN} --out {out}"
    assert run(plan) == 2 and "delete it first" in capsys.readouterr().err
    assert out.read_text() == '{"train_batch_size": 8}'
    out.unlink()
    assert run(plan) == run(plan) == 0
    out.write_text(out.read_text().replace("4", "8", 1))
    assert run(plan) == 2


def test_neighbours_are_one_table(capsys):
    """Equal layouts are explained once."""
    assert run(f"{SMALL_PLAN} --fix pp=1 --why neighbours") == 0
    printed = capsys.readouterr().out
    section = printed[printed.index("one step away") :].split("\n\n")[0].splitlines()
    layouts = [line for line in section[1:] if "the same layout as" not in line]
    assert len(section) < 16 and len(set(layouts)) == len(layouts)


def test_machines_and_their_gpus_give_the_world_size(capsys):
    plans = []
    for devices in ("--world-size 16", "--nnodes 2 --nproc_per_node 8"):
        assert run(PLAN.replace("--world-size 16", devices), "--json") == 0
        plans.append(json.loads(capsys.readouterr().out)["best"])
    assert plans[0] == plans[1]


def notes_of(capsys, file, sequence, **config):
    """Return the notes of a plan for a small Llama with 64 positions."""
    config = llama(max_position_embeddings=64, **config)
    file.write_text(json.dumps(config))
    command = "plan --gpu h100 --world-size 1 --batch 1 --json --model"
    assert run(command, file, "--seq", sequence) == 0
    return " ".join(json.loads(capsys.readouterr().out)["notes"])


def test_a_note_says_that_training_refuses_the_model(tmp_path, capsys):
    pytest.importorskip("transformers")
    notes = notes_of(capsys, tmp_path / "config.json", 128, hidden_act="bogus")
    assert "`plait train` refuses this model" in notes and "'bogus'" in notes
    assert "max_position_embeddings is 64" in notes
    notes = notes_of(capsys, tmp_path / "config.json", 64)
    assert "refuses" not in notes and "max_position_embeddings" not in notes


def test_dropout_is_counted(tmp_path, capsys):
    """Masks of dropout, and what is recomputed for them, change the plan and need no note."""
    file = tmp_path / "config.json"
    sizes = {"n_layer": 2, "n_embd": 1024, "n_head": 16, "vocab_size": 512, "n_positions": 1024}
    layout = "--fix recompute=full --fix micro_batch=64"
    reports = []
    for probability in (0.0, 0.1):
        dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), probability)
        file.write_text(json.dumps({"model_type": "gpt2", **sizes, **dropout}))
        devices = "--gpu h100 --world-size 1 --batch 64 --seq 1024"
        assert run(f"plan {devices} {layout} --json --model", file) == 0
        report = json.loads(capsys.readouterr().out)
        assert not any("dropout" in note for note in report["notes"])
        reports.append(report)
    assert reports[0] != reports[1]


def test_a_file_that_training_refuses_is_not_planned(tmp_path, capsys):
    file = tmp_path / "file.json"
    out = tmp_path / "out.json"
    model = {"config": llama()}
    tree = {"train_batch_size": 8, "model": model, "data": {"sequence_length": 64}}
    command = f"plan --gpu h100 --world-size 8 --out {out} {file}"
    file.write_text(json.dumps(tree | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}))
    assert run(command) == 2 and not out.exists()
    assert "fp16.enabled and bf16.enabled: are both true" in capsys.readouterr().err
    # Transformers' --learning_rate.
    file.write_text(json.dumps(tree | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}))
    assert run(command) == 0 and out.exists()
