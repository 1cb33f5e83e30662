"""`plait plan infer`: placement, bytes, times, errors, and commands of the page on generation."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.commands import run_plait
from tests.integration.model_folder import PAGE
from tests.table import check_each

COMMANDS = re.findall(r"^plait (plan infer .*?)(?:  +#.*)?$", PAGE, re.MULTILINE)


def test_commands_of_the_page(llama_folder, capsys):
    assert len(COMMANDS) >= 3
    for command in COMMANDS:
        run_plait(command.replace("FOLDER", str(llama_folder)).replace("2GiB", "3MiB"))
        output = capsys.readouterr().out
        assert "resident weights" in output and "\nbound: " in output, command


def test_placement_is_that_of_generate(llama_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [5, 6, 7, 8, 9, 10]}\n{"token_ids": [5]}\n', encoding="utf-8")
    lengths = "--prompt-tokens 6 --new-tokens 5 --batch-size 2 --json"
    for options in ("", "--cpu-budget 220KiB", "--cpu-budget 130KiB --dtype bfloat16"):
        run_plait(f"plan infer --model {llama_folder} {lengths} {options}")
        plan = json.loads(capsys.readouterr().out)
        out = tmp_path / f"{len(options)}.jsonl"
        files = f"--prompts {prompts} --out {out} --max-new-tokens 5"
        run_plait(f"generate --model {llama_folder} {files} {options}")
        assert plan["placement"]["why"] == capsys.readouterr().err.splitlines()[0]
        assert plan["placement"]["streamed"] is bool(options)

        account = plan["bytes"]
        assert (account["in_files"] > 0) is bool(options) and account["on_host"] == 0
        used = sum(account[name] for name in ("weights", "cache", "activations", "slots"))
        assert used <= account["memory"]
        assert plan["bound"] is None, "the catalogue has no bandwidth of this machine's cores"


def test_bound_of_a_catalogue_gpu(capsys):
    model = "plan infer --model llama-3-70b --gpu h100 --json"
    run_plait(f"{model} --nproc-per-node 4 --batch-size 8")
    plan = json.loads(capsys.readouterr().out)
    assert plan["placement"]["tp"] == 2 and 65e9 < plan["bytes"]["weights"] < 75e9
    read_bytes = plan["bytes"]["weights"] + plan["bytes"]["cache"]
    # 3.35 TB/s is the memory bandwidth of an H100.
    assert plan["bound"]["token_seconds"] == pytest.approx(read_bytes / 3.35e12)
    assert plan["bound"]["limit"] == "the GPU's memory"

    run_plait(f"{model} --gpu-budget 40GiB")
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes"]["on_host"] > 80e9
    assert plan["bound"]["limit"] == "the link from host memory"


WRONG_ARGUMENTS = {
    "lama-3-70b": "no such folder or file, and no public model; did you mean",
    "llama-3-70b --gpu h1000": "not in the catalogue",
    "llama-3-70b --gpu h100 --tp 3": "--tp 3: must divide the model's 64 attention heads",
    "llama-3-70b --gpu h100 --tp 1 --pp 1": r"at tp = 1, pp = 1 a device would hold 131\..* GiB of",
    "llama-3-70b --gpu h100 --gpu-budget 2GiB": "a budget of 2.0 GiB is too small: .* pass at",
    "gpt2 --tp 2": "--tp = 2: is for GPUs",
    "gpt2 --gpu-budget 1GiB": "this machine has no visible GPU",
    "gpt2 --cpu-budget 1GiB --gpu h100 --pp 2": "and a budget streams weights to one",
    "gpt2 --new-tokens 0": "--new-tokens",
}


def test_wrong_arguments_are_refused(capsys):
    def check(arguments, message):
        run_plait(f"plan infer --model {arguments}", code=2)
        assert re.search(message, capsys.readouterr().err)

    check_each(WRONG_ARGUMENTS.items(), check)


def test_more_tokens_than_positions_are_refused(llama_folder, capsys):
    lengths = "--prompt-tokens 200 --new-tokens 100"
    run_plait(f"plan infer --model {llama_folder} {lengths}", code=2)
    error = capsys.readouterr().err
    assert "(--prompt-tokens" in error and "and --new-tokens" in error
    assert "the model's positions end at 256" in error


@pytest.mark.parametrize("budget", ["", "--cpu-budget 1MiB"])
def test_damaged_shard_is_refused(llama_folder, tmp_path, budget, capsys):
    """The shards are checked even if everything fits, and the plan needs no byte of them."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    second = sorted(folder.glob("*.safetensors"))[1]
    content = second.read_bytes()
    for damaged, message in (
        (content[:-1], "the file is truncated"),
        (b"\xff" * len(content), "is not a readable safetensors file"),
    ):
        second.write_bytes(damaged)
        run_plait(f"plan infer --model {folder} --prompt-tokens 8 {budget}", code=4)
        error = capsys.readouterr().err
        assert second.name in error and message in error

    second.unlink()
    run_plait(f"plan infer --model {folder} --prompt-tokens 8 {budget}", code=4)
    assert f"lists files that do not exist: {second.name}" in capsys.readouterr().err


def test_configuration_without_weights(llama_folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    for path in (tmp_path, tmp_path / "config.json"):
        run_plait(f"plan infer --model {path} --prompt-tokens 6 --new-tokens 3")
        assert "it fits on one device" in capsys.readouterr().out


def test_help_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run_plait("plan infer --help")
    lines = capsys.readouterr().out.strip().splitlines()
    assert "Usage: plait plan infer" in lines[0] and len(lines) <= 50
