"""`plait generate`: one prompt, a file of them, a chat, within a budget; and docs/how-to/generation.md."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

import plait
from plait.cli.main import main
from plait.inference.source import open_source
from plait.inference.weight_files import stored_tensors
from tests.integration.model_folder import PAGE, adapter_of, model_folder

LINES = [{"prompt": "def read", "id": 7}, {"token_ids": [5, 6, 7]}, {"prompt": "a"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of random weights with a tokenizer, as Transformers saves it."""
    return model_folder(tmp_path_factory.mktemp("llama"))


def run(*arguments, code=0):
    try:
        main(["generate", *arguments])
    except SystemExit as end:
        assert (end.code or 0) == code


def answers(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_of_prompts_and_one_within_a_budget(folder, tmp_path, capsys):
    from transformers import LlamaForCausalLM

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    common = [
        "--model",
        str(folder),
        "--prompts",
        str(prompts),
        *["--temperature", "0", "--max-new-tokens", "6"],
    ]
    run(*common, "--out", str(tmp_path / "one.jsonl"), "--batch-size", "2")
    assert "it fits on one device" in capsys.readouterr().err
    run(*common, "--out", str(tmp_path / "two.jsonl"), "--cpu-budget", "250KiB")
    assert re.search(r"[3456] layers \(.*\) are read for every token", capsys.readouterr().err)
    found = answers(tmp_path / "one.jsonl")
    assert found == answers(tmp_path / "two.jsonl")
    assert found[0].keys() == {"prompt", "id", "text", "token_ids", "finish_reason"} and found[
        1
    ].keys() == {"text", "token_ids", "finish_reason"}
    expected = LlamaForCausalLM.from_pretrained(folder).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert found[1]["token_ids"] == expected[0, 3:].tolist()
    run(*common, "--out", str(tmp_path / "two.jsonl"), code=2)
    assert (
        "exists; pass another name" in capsys.readouterr().err
        and answers(tmp_path / "two.jsonl") == found
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.jsonl",
        "prompts.jsonl",
        "two.jsonl",
    ]


def test_one_prompt_and_a_chat(folder, capsys, monkeypatch):
    common = [
        "--model",
        str(folder),
        *["--max-new-tokens", "8", "--seed", "3", "--temperature", "0.9"],
    ]
    run(*common, "--prompt", "def read")
    told = capsys.readouterr().out
    assert len(told) > 1
    monkeypatch.setattr("sys.stdin", io.StringIO("def read\n\n"))
    run(*common)
    assert capsys.readouterr().out == told


def test_a_chat_takes_bytes_that_are_no_text(folder, monkeypatch, capsys):
    """The chat answers and ends at the end of its input."""
    for errors in ("strict", "surrogateescape"):
        typed = io.TextIOWrapper(io.BytesIO(b"hi\xff\n\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", typed)
        run("--model", str(folder), "--max-new-tokens", "2")
        assert capsys.readouterr().out.strip()


def test_a_chat_goes_on_after_a_line_that_is_too_long(folder, monkeypatch, capsys):
    arguments = ["--model", str(folder), "--max-new-tokens", "8", "--seed", "3"]
    monkeypatch.setattr("sys.stdin", io.StringIO("def read\n\n"))
    run(*arguments)
    answer = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("a b " * 250_000 + "\ndef read\n\n"))
    run(*arguments)
    output = capsys.readouterr()
    assert output.out == answer
    assert re.search(
        r"the line of 999,999 characters: .* may have [\d,]+ tokens .* end at [\d,]+", output.err
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--prompt", "a", "--cpu-budget", "9KiB"],
            "--cpu-budget|budget of 9.0 KiB is too small: .* pass at least",
        ),
        (["--prompt", "a", "--cpu-budget", "lots"], "--cpu-budget lots: pass a size such as 2GiB"),
        (
            ["--prompt", "a", "--cpu-budget", "1MiB", "--tp", "2"],
            "--tp = 2: chooses a layout of several devices, and a budget",
        ),
        (["--prompt", "a", "--tp", "3"], "--tp 3: must divide the model's 4 attention heads"),
        (["--prompt", "a", "--tp", "x"], "--tp x: pass a number of devices, or auto"),
        (["--prompt", "a", "--pp", "\u00b2"], "--pp \u00b2: pass a number of devices, or auto"),
        (["--prompt", "a", "--tp", "9" * 5000], "9: pass a number of devices, or auto"),
        (["--prompt", "a", "--top-p", "7"], "top_p = 7.0 must be above 0"),
        (["--prompt", "a", "--max-new-tokens", "400"], "the model's positions end at 256"),
        (["--prompt", "a", "--prompts", "b", "--out", "c"], "pass only one of them"),
        (["--out", "c"], "belong together"),
        (
            ["--prompts", __file__, "--out", "x" * 300],
            "'x{100}': File name too long; pass another path",
        ),
        (
            ["--prompt", "a", "--adapter", "x" * 300],
            "'x{100}': File name too long; pass another path",
        ),
        (
            ["--prompts", __file__, "--out", "no/c"],
            "--out no/c: no is not a folder; create it first",
        ),
    ],
)
def test_a_wrong_input(arguments, words, folder, capsys):
    run("--model", str(folder), *arguments, code=2)
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: is not JSON"),
        ('{"prompt": "a", "id": NaN}', "line 2: is not JSON: NaN is not a JSON number; write null"),
        ("[]", "line 2: needs exactly one of prompt, token_ids, messages"),
        ('{"prompt": "a", "token_ids": [1]}', "needs exactly one"),
        ('{"prompt": "a", "id": 1, "id": 2}', "line 2: has id twice; leave one of them out"),
        ('{"prompt": "a", "of": {"x": 1, "x": 2}}', "line 2: has x twice"),
        ('{"token_ids": []}', "token_ids must be a list of token ids"),
        ('{"token_ids": [true]}', "must be a list of token ids"),
        ('{"messages": ["x"]}', "messages must be a list of objects with role and content"),
        (
            '{"messages": [{"role": "user", "contents": "x"}]}',
            "messages must be a list of objects with role and content",
        ),
        ('{"prompt": "a\\ud800"}', "line 2: holds '\\ud800', half of a character"),
        ('{"prompt": "a", "name": "\\udfff"}', "line 2: holds '\\udfff', half of a character"),
        ("[" * 100_000, "line 2: is nested too deeply"),
    ],
)
def test_a_wrong_line(line, words, folder, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    run(
        "--model",
        str(folder),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--out",
        str(tmp_path / "out.jsonl"),
        code=2,
    )
    assert words in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


def test_line_separators_in_a_text_end_no_line(folder, tmp_path):
    """U+2028, U+0085 and form feeds may stand in a JSON text; --out writes them as they are."""
    texts = ["a\u2028b", "a\u0085b", "a\x0bb"]
    given, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    given.write_text(
        "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts),
        encoding="utf-8",
    )
    run(
        "--model",
        str(folder),
        "--prompts",
        str(given),
        "--out",
        str(out),
        "--max-new-tokens",
        "2",
        code=0,
    )
    assert [
        json.loads(line)["prompt"] for line in out.read_text(encoding="utf-8").split("\n")[:-1]
    ] == texts


def test_a_folder_that_is_none(tmp_path, folder, capsys):
    run("--model", str(tmp_path / "no"), "--prompt", "a", code=2)
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    run("--model", str(tmp_path), "--prompt", "a", code=4)
    assert (
        "neither model.safetensors.index.json nor model.safetensors is there"
        in capsys.readouterr().err
    )


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def _miscounted(path):
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "num_attention_heads": "four"}))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard that is cut off": (
        lambda path: _cut(path / "model.safetensors"),
        "model.safetensors is not a readable safetensors file",
    ),
    "a shard of other bytes": (
        lambda path: (path / "model.safetensors").write_bytes(b"\xa5" * 5000),
        "model.safetensors is not a readable safetensors file",
    ),
    "an index that is no JSON": (
        lambda path: (path / "model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json is not a safetensors index",
    ),
    "an index without names": (
        lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": []}'),
        "weight_map does not map tensor names to files",
    ),
    "an index of other files": (
        lambda path: (
            (path / "model.safetensors")
            .rename(path / "model.safetensors.index.json")
            .write_text('{"weight_map": {"lm_head.weight": "model-9.safetensors"}}')
        ),
        "lists files that do not exist: model-9.safetensors",
    ),
    "a tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("{}"),
        "its tokenizer cannot be loaded",
    ),
    "generation settings": (
        lambda path: (path / "generation_config.json").write_text("{"),
        "generation settings of generation_config.json, or of config.json if it is missing, cannot be read",
    ),
    "a configuration": (
        _miscounted,
        "Transformers cannot build it: TypeError: Field 'num_attention_heads' expected int",
    ),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_folder(what, folder, tmp_path, capsys):
    """A message, and no traceback, with and without a budget."""
    broken = shutil.copytree(folder, tmp_path / "model")
    change, words = BROKEN[what]
    change(broken)
    for more in ([], ["--cpu-budget", "300KiB"]):
        run(
            "--model",
            str(broken),
            *["--prompt", "a", "--max-new-tokens", "2"],
            *more,
            code=4 if "index" in what or "shard" in what else 2,
        )
        assert words in capsys.readouterr().err, more


def test_an_index_of_wrong_files(folder, tmp_path, capsys):
    broken = shutil.copytree(folder, tmp_path / "model")
    names = stored_tensors(broken / "model.safetensors")
    (broken / "model.safetensors").rename(broken / "first.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, broken / "second.safetensors")
    table = dict.fromkeys(names, "first.safetensors") | {"lm_head.weight": "second.safetensors"}
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    run("--model", str(broken), "--prompt", "a", code=4)
    assert (
        "second.safetensors is not a readable safetensors file (File does not contain tensor lm_head.weight"
        in capsys.readouterr().err
    )


def test_the_page(folder, tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    block, scores, hand_over, to_files, _ = re.findall(
        r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
    )
    engine = plait.initialize(
        AutoModelForCausalLM.from_pretrained(folder), {"train_micro_batch_size_per_gpu": 1}
    )
    exec(block, {"engine": engine, "tokenizer": AutoTokenizer.from_pretrained(folder)})
    assert len(re.findall(r"(stop|length)$", capsys.readouterr().out, re.MULTILINE)) == 2
    exec(scores, {"engine": engine})
    assert float(capsys.readouterr().out) < 1e-5
    names = {
        "plait": plait,
        "engine": engine,
        "model": AutoModelForCausalLM.from_pretrained(folder),
    }
    exec(hand_over, names)
    assert capsys.readouterr().out == "1\n"
    names["generator"].close()
    monkeypatch.chdir(tmp_path)
    exec(to_files, {"plait": plait, "engine": engine, "safetensors": safetensors})
    saved = safetensors.torch.load_file(tmp_path / "weights-00000.safetensors")
    assert saved.keys() == engine.module.state_dict().keys()
    engine.close()


def test_an_adapter(folder, tmp_path, capsys):
    """On one device, on two with tp, streamed, and by its own folder; the base alone says something else."""
    adapter = str(adapter_of(folder, tmp_path / "adapter"))
    said = {}
    for name, options in {
        "base": ["--model", str(folder)],
        "one": ["--model", str(folder), "--adapter", adapter],
        "its own folder": ["--model", adapter],
        "tp": ["--model", str(folder), "--adapter", adapter, "--tp", "2"],
        "streamed": ["--model", adapter, "--cpu-budget", "300KiB"],
    }.items():
        prompts, out = tmp_path / "prompts.jsonl", tmp_path / f"{name}.jsonl"
        prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
        run(
            *options,
            "--prompts",
            str(prompts),
            "--out",
            str(out),
            *["--temperature", "0", "--max-new-tokens", "6"],
        )
        said[name] = answers(out)
        assert name != "streamed" or re.search(
            r"[23456] layers \(.*\) are read for every token", capsys.readouterr().err
        )
    assert said["one"] == said["its own folder"] == said["tp"] == said["streamed"] != said["base"]
    run("--model", str(folder), "--adapter", adapter, "--adapter", adapter, "--prompt", "a", code=2)
    assert "--adapter: 2 were given, but at most one is supported" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(
            [
                *["plan", "infer", "--model"],
                adapter,
                *["--prompt-tokens", "8", "--new-tokens", "4", "--cpu-budget", "300KiB", "--json"],
            ]
        )
    account = json.loads(capsys.readouterr().out)["bytes"]
    elements = sum(p.numel() for p in open_source(Path(adapter)).model().parameters())
    assert account["weights"] + account["in_files"] == 4 * elements


STREAMED = ["--prompt", "a", "--max-new-tokens", "60", "--cpu-budget", "420KiB"]


def test_a_disk_that_fails_in_the_middle(folder, capsys, monkeypatch):
    """The message names the file and the byte."""
    read, calls = os.preadv, 0

    def preadv(file, views, offset):
        nonlocal calls
        calls += 1
        if calls > 300:
            raise OSError(5, "Input/output error")
        return read(file, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    run("--model", str(folder), *STREAMED, code=4)
    words = r"model.safetensors cannot be read at byte [\d,]+: Input/output error"
    assert re.search(words, capsys.readouterr().err) and calls > 300


HANGING_DISK = """
import os, sys, threading
from plait.cli.main import main
from plait.inference import weight_files
read, calls = os.preadv, [0]
weight_files.PATIENCE_SECONDS = 2.0
def preadv(file, views, offset):
    calls[0] += 1
    if calls[0] > 300:
        threading.Event().wait()
    return read(file, views, offset)
os.preadv = preadv
main(sys.argv[1:])
"""


@pytest.mark.proof
def test_a_disk_that_hangs_in_the_middle(folder):
    """The process ends although a read of it never returns."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGING_DISK, "generate", "--model", str(folder), *STREAMED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    words = (
        r"model.safetensors: the weights of model.layers.\d have not arrived, "
        r"and no bytes were read for 2 s from byte [\d,]+ on"
    )
    assert done.returncode == 4 and re.search(words, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("layout", ["--tp", "--pp"])
def test_a_rank_that_is_killed(folder, tmp_path, layout):
    """The command ends within ten seconds with an error that names the process; finished answers are kept, and nothing is left in the
    folder of temporary files."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "def read"}) + "\n" for _ in range(4000)), encoding="utf-8"
    )
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    partial = tmp_path / "out.jsonl.partial"
    options = [layout, "2", "--max-new-tokens", "200", "--temperature", "0", "--batch-size", "2"]
    command = [sys.executable, "-m", "plait", "generate", "--model", str(folder), *files, *options]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        ranks = []
        end = time.monotonic() + 60
        while not (partial.exists() and partial.stat().st_size):  # answers are written
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        ranks = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if "plait.cli.generate" in " ".join(one.cmdline())
        ]
        assert len(ranks) == 2
        ranks[1].kill()
        killed = time.monotonic()
        _, said = process.communicate(timeout=30)
        assert time.monotonic() - killed < 10 and process.returncode not in (0, None)
        assert re.search(r"rank 1", said) and "SIGKILL" in said
        assert not [
            one for one in ranks if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]
        assert not (tmp_path / "out.jsonl").exists() and not list(
            (tmp_path / "temporary").iterdir()
        )
        kept = partial.read_text(encoding="utf-8")
        assert kept.endswith("\n") and all(
            json.loads(line)["finish_reason"] for line in kept.splitlines()
        )
        assert (
            f"{len(kept.splitlines())} of 4000 answers are finished and kept in {partial}" in said
        )
    finally:
        process.kill()
        process.wait()


def exported(tmp_path):
    """The run's model as Transformers saves it."""
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")])
    return tmp_path / "exported"


def test_the_folder_of_a_run(folder, tmp_path, capsys):
    """Its config.json is the run's, and its weights are those of the newest checkpoint."""
    run_file = tmp_path / "run.json"
    model = {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
        }
    }
    data = {
        "source": "files",
        "paths": [str(Path(plait.__file__).parent / "sizes.py")],
        "sequence_length": 32,
        "vocab_size": 300,
    }
    section = {"folder": str(tmp_path / "run"), "steps": 1, "processes": 1}
    run_file.write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 2, "model": model, "data": data, "run": section}
        ),
        encoding="utf-8",
    )
    with pytest.raises(SystemExit):
        main(["train", str(run_file)])
    capsys.readouterr()
    common = [
        "--model",
        str(tmp_path / "run"),
        "--prompt",
        "def ",
        *["--temperature", "0", "--max-new-tokens", "4"],
    ]
    run(*common)
    answer = capsys.readouterr().out.rstrip("\n")
    assert answer
    run(*common, "--scratch", str(tmp_path), "--cpu-budget", "210KiB")
    streamed = capsys.readouterr()
    assert re.search(
        r"[23] layers .* every token \(written to new files first: the tensors of a checkpoint lie in parts\)",
        streamed.err,
    )
    assert streamed.out.rstrip("\n") == answer
    run(*common, "--scratch", str(tmp_path), "--cpu-budget", "1MiB", code=2)
    assert (
        "--scratch: stores layers that are converted before they are streamed, but this model"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(
            [
                *["plan", "infer", "--model"],
                str(tmp_path / "run"),
                *["--prompt-tokens", "4", "--new-tokens", "4", "--cpu-budget", "210KiB"],
            ]
        )
    planned = capsys.readouterr().out
    assert "written to new files first" in planned and "from files for every token" in planned
    pytest.importorskip("peft")
    with_adapter = str(adapter_of(exported(tmp_path), tmp_path / "adapter"))
    run(*common, "--adapter", with_adapter)
    assert capsys.readouterr().out.rstrip("\n") not in ("", answer)
