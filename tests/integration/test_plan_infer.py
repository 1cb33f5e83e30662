"""`plait plan infer`: placement, bytes, times; the commands of docs/how-to/generation.md; what is refused."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from plait.cli.main import main
from tests.integration.model_folder import PAGE, model_folder

COMMANDS = re.findall(r"^plait (plan infer .*?)(?:  +#.*)?$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("llama"))


def run(*arguments, code=0):
    try:
        main(["plan", "infer", *arguments])
    except SystemExit as end:
        assert (end.code or 0) == code


def test_the_commands_of_the_page(folder, capsys):
    assert len(COMMANDS) >= 3
    for command in COMMANDS:
        run(*shlex.split(command.replace("FOLDER", str(folder)).replace("2GiB", "3MiB"))[2:])
        shown = capsys.readouterr().out
        assert "resident weights" in shown and "\nbound: " in shown, command


def test_bytes_are_those_that_generate_decides_with(folder, tmp_path, capsys):
    lengths = ["--prompt-tokens", "6", "--new-tokens", "5", "--batch-size", "2"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [5, 6, 7, 8, 9, 10]}\n{"token_ids": [5]}\n', encoding="utf-8")
    for options in (
        [],
        ["--cpu-budget", "220KiB"],
        ["--cpu-budget", "130KiB", "--dtype", "bfloat16"],
    ):
        run("--model", str(folder), *lengths, *options, "--json")
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        out = tmp_path / f"{len(options)}.jsonl"
        with pytest.raises(SystemExit):
            main(
                [
                    "generate",
                    "--model",
                    str(folder),
                    "--prompts",
                    str(prompts),
                    "--out",
                    str(out),
                    "--max-new-tokens",
                    "5",
                    *options,
                ]
            )
        assert found["placement"]["why"] == capsys.readouterr().err.splitlines()[0]
        assert found["placement"]["streamed"] is bool(options)
        assert (found["bytes"]["in_files"] > 0) is bool(options) and found["bytes"]["on_host"] == 0
        account = found["bytes"]
        assert (
            sum(account[name] for name in ("weights", "cache", "activations", "slots"))
            <= account["memory"]
        )
        assert found["bound"] is None, "the catalogue has no bandwidth of this machine's cores"


def test_a_catalogue_gpu(capsys):
    run(
        *[
            "--model",
            "llama-3-70b",
            "--gpu",
            "h100",
            "--nproc-per-node",
            "4",
            "--batch-size",
            "8",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert found["placement"]["tp"] == 2 and 65e9 < found["bytes"]["weights"] < 75e9
    read_bytes = found["bytes"]["weights"] + found["bytes"]["cache"]
    assert (
        found["bound"]["token_seconds"] == pytest.approx(read_bytes / 3.35e12)
        and found["bound"]["limit"] == "the GPU's memory"
    )
    run("--model", "llama-3-70b", "--gpu", "h100", "--gpu-budget", "40GiB", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (
        found["bytes"]["on_host"] > 80e9 and found["bound"]["limit"] == "the link from host memory"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3-70b"], "no such folder or file, and no public model; did you mean"),
        (["--model", "llama-3-70b", "--gpu", "h1000"], "not in the catalogue"),
        (
            ["--model", "llama-3-70b", "--gpu", "h100", "--tp", "3"],
            "--tp 3: must divide the model's 64 attention heads",
        ),
        (
            ["--model", "llama-3-70b", "--gpu", "h100", "--tp", "1", "--pp", "1"],
            r"at tp = 1, pp = 1 a device would hold 131\..* GiB of weights",
        ),
        (
            ["--model", "llama-3-70b", "--gpu", "h100", "--gpu-budget", "2GiB"],
            "a budget of 2.0 GiB is too small: .* pass at least",
        ),
        (["--model", "gpt2", "--tp", "2"], "--tp = 2: is for GPUs"),
        (["--model", "gpt2", "--gpu-budget", "1GiB"], "this machine has no visible GPU"),
        (
            ["--model", "gpt2", "--cpu-budget", "1GiB", "--gpu", "h100", "--pp", "2"],
            "and a budget streams weights to one",
        ),
        (["--model", "gpt2", "--new-tokens", "0"], "--new-tokens"),
    ],
)
def test_a_wrong_input(arguments, words, capsys):
    run(*arguments, code=2)
    assert re.search(words, capsys.readouterr().err)


def test_more_tokens_than_positions(folder, capsys):
    run("--model", str(folder), "--prompt-tokens", "200", "--new-tokens", "100", code=2)
    said = capsys.readouterr().err
    assert (
        "(--prompt-tokens" in said
        and "and --new-tokens" in said
        and "the model's positions end at 256" in said
    )


@pytest.mark.parametrize("budget", [[], ["--cpu-budget", "1MiB"]])
def test_a_damaged_file_among_several(folder, tmp_path, budget, capsys):
    """Also where everything fits, and nothing of the files would be read for the plan."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(
        tmp_path / "model", max_shard_size="20KB"
    )
    second = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    content = second.read_bytes()
    for damaged, words in (
        (content[:-1], "the file is truncated"),
        (b"\xff" * len(content), "is not a readable safetensors file"),
    ):
        second.write_bytes(damaged)
        run("--model", str(tmp_path / "model"), "--prompt-tokens", "8", *budget, code=4)
        said = capsys.readouterr().err
        assert second.name in said and words in said
    second.unlink()
    run("--model", str(tmp_path / "model"), "--prompt-tokens", "8", *budget, code=4)
    assert f"lists files that do not exist: {second.name}" in capsys.readouterr().err


def test_a_configuration_alone(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for name in (tmp_path, tmp_path / "config.json"):
        run("--model", str(name), "--prompt-tokens", "6", "--new-tokens", "3")
        assert "it fits on one device" in capsys.readouterr().out


def test_help_is_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run("--help")
    shown = capsys.readouterr().out.strip().splitlines()
    assert "Usage: plait plan infer" in shown[0] and len(shown) <= 50
