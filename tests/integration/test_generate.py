"""`plait generate`: prompts, chats, budgets, adapters, errors, and docs/how-to/generation.md."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

import plait
from plait.inference.source import open_source
from plait.inference.weight_files import stored_tensors
from tests.integration.commands import run_plait
from tests.integration.json_lines import read_rows, write_rows
from tests.integration.model_folder import PAGE, adapter_of
from tests.integration.tiny import llama
from tests.table import check_each, check_rows

PROMPTS = [{"prompt": "def read", "id": 7}, {"token_ids": [5, 6, 7]}, {"prompt": "a"}]
GREEDY = "--temperature 0 --max-new-tokens 6"


def test_file_of_prompts_with_and_without_a_budget(llama_folder, tmp_path, capsys):
    from transformers import LlamaForCausalLM

    prompts = write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    common = f"generate --model {llama_folder} --prompts {prompts} {GREEDY} --out {tmp_path}"
    run_plait(f"{common}/resident.jsonl --batch-size 2")
    assert "it fits on one device" in capsys.readouterr().err
    run_plait(f"{common}/streamed.jsonl --cpu-budget 250KiB")
    assert re.search(r"[3456] layers \(.*\) are read for every token", capsys.readouterr().err)

    answers = read_rows(tmp_path / "resident.jsonl")
    assert answers == read_rows(tmp_path / "streamed.jsonl")
    assert answers[0].keys() == {"prompt", "id", "text", "token_ids", "finish_reason"}
    assert answers[1].keys() == {"text", "token_ids", "finish_reason"}
    model = LlamaForCausalLM.from_pretrained(llama_folder)
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert answers[1]["token_ids"] == expected[0, 3:].tolist()

    run_plait(f"{common}/streamed.jsonl", code=2)
    assert "exists; pass another name" in capsys.readouterr().err
    assert read_rows(tmp_path / "streamed.jsonl") == answers
    assert sorted(os.listdir(tmp_path)) == ["prompts.jsonl", "resident.jsonl", "streamed.jsonl"]


def test_prompt_and_chat_get_the_same_answer(llama_folder, capsys, monkeypatch):
    common = f"generate --model {llama_folder} --max-new-tokens 8 --seed 3 --temperature 0.9"
    run_plait(common, "--prompt", "def read")
    answer = capsys.readouterr().out
    assert len(answer) > 1

    # An overlong line is refused, and the chat continues.
    monkeypatch.setattr("sys.stdin", io.StringIO("a b " * 250_000 + "\ndef read\n\n"))
    run_plait(common)
    output = capsys.readouterr()
    assert output.out == answer
    message = r"the line of 999,999 characters: .* may have [\d,]+ tokens .* end at [\d,]+"
    assert re.search(message, output.err)


def test_chat_accepts_bytes_that_are_not_text(llama_folder, monkeypatch, capsys):
    """The chat answers, and ends at the end of its input."""
    for errors in ("strict", "surrogateescape"):
        typed = io.TextIOWrapper(io.BytesIO(b"hi\xff\n\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", typed)
        run_plait(f"generate --model {llama_folder} --max-new-tokens 2")
        assert capsys.readouterr().out.strip()


LONG_NAME = "x" * 300
WRONG_ARGUMENTS = {
    "--prompt a --cpu-budget 9KiB": "budget of 9.0 KiB is too small: .* pass at least",
    "--prompt a --cpu-budget lots": "--cpu-budget lots: pass a size such as 2GiB",
    "--prompt a --cpu-budget 1MiB --tp 2": "--tp = 2: chooses a layout of several devices, and a",
    "--prompt a --tp 3": "--tp 3: must divide the model's 4 attention heads",
    "--prompt a --tp x": "--tp x: pass a number of devices, or auto",
    "--prompt a --pp \u00b2": "--pp \u00b2: pass a number of devices, or auto",
    f"--prompt a --tp {'9' * 5000}": "9: pass a number of devices, or auto",
    "--prompt a --top-p 7": "top_p = 7.0 must be above 0",
    "--prompt a --max-new-tokens 400": "the model's positions end at 256",
    "--prompt a --prompts b --out c": "pass only one of them",
    "--out c": "belong together",
    f"--prompts {__file__} --out {LONG_NAME}": "'x{100}': File name too long; pass another path",
    f"--prompt a --adapter {LONG_NAME}": "'x{100}': File name too long; pass another path",
    f"--prompts {__file__} --out no/c": "--out no/c: no is not a folder; create it first",
}


def test_wrong_arguments_are_refused(llama_folder, capsys):
    def check(arguments, message):
        run_plait(f"generate --model {llama_folder} {arguments}", code=2)
        assert re.search(message, capsys.readouterr().err)

    check_each(WRONG_ARGUMENTS.items(), check)


WRONG_LINES = {
    "{": "line 2: is not JSON",
    '{"prompt": "a", "id": NaN}': "line 2: is not JSON: NaN is not a JSON number; write null",
    "[]": "line 2: needs exactly one of prompt, token_ids, messages",
    '{"prompt": "a", "token_ids": [1]}': "needs exactly one",
    '{"prompt": "a", "id": 1, "id": 2}': "line 2: has id twice; leave one of them out",
    '{"prompt": "a", "of": {"x": 1, "x": 2}}': "line 2: has x twice",
    '{"token_ids": []}': "token_ids must be a list of token ids",
    '{"token_ids": [true]}': "must be a list of token ids",
    '{"messages": ["x"]}': "messages must be a list of objects with role and content",
    '{"messages": [{"role": "user", "contents": "x"}]}': "objects with role and content",
    '{"prompt": "a\\ud800"}': "line 2: holds '\\ud800', half of a character",
    '{"prompt": "a", "name": "\\udfff"}': "line 2: holds '\\udfff', half of a character",
    "[" * 100_000: "line 2: is nested too deeply",
}


def test_wrong_lines_are_refused(llama_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"

    def check(line, message):
        prompts.write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
        run_plait(f"generate --model {llama_folder} --prompts {prompts} --out {out}", code=2)
        assert message in capsys.readouterr().err and not out.exists()

    check_each(WRONG_LINES.items(), check)


def test_unicode_line_separators_end_no_line(llama_folder, tmp_path):
    """U+2028, U+0085 and vertical tabs may be in a JSON text, and are written unchanged."""
    texts = ["a\u2028b", "a\u0085b", "a\x0bb"]
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts]
    prompts.write_text("".join(lines), encoding="utf-8")
    arguments = f"--prompts {prompts} --out {out} --max-new-tokens 2"
    run_plait(f"generate --model {llama_folder} {arguments}")
    answers = out.read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["prompt"] for line in answers] == texts


def test_folder_without_a_model_is_refused(llama_folder, tmp_path, capsys):
    run_plait(f"generate --model {tmp_path}/no --prompt a", code=2)
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    run_plait(f"generate --model {tmp_path} --prompt a", code=4)
    message = "neither model.safetensors.index.json nor model.safetensors is there"
    assert message in capsys.readouterr().err


def with_text_for_a_number(content):
    return json.dumps({**json.loads(content), "num_attention_heads": "four"}).encode()


DAMAGES = {
    # file, exit code, message, function from the old content to the new one
    "truncated shard": (
        "model.safetensors",
        4,
        "model.safetensors is not a readable safetensors file",
        lambda content: content[:-1000],
    ),
    "shard of other bytes": (
        "model.safetensors",
        4,
        "model.safetensors is not a readable safetensors file",
        lambda _: b"\xa5" * 5000,
    ),
    "index that is not JSON": (
        "model.safetensors.index.json",
        4,
        "model.safetensors.index.json is not a safetensors index",
        lambda _: b"{",
    ),
    "index without names": (
        "model.safetensors.index.json",
        4,
        "weight_map does not map tensor names to files",
        lambda _: b'{"weight_map": []}',
    ),
    "index of missing files": (
        "model.safetensors.index.json",
        4,
        "lists files that do not exist: model-9.safetensors",
        lambda _: b'{"weight_map": {"lm_head.weight": "model-9.safetensors"}}',
    ),
    "tokenizer": ("tokenizer.json", 2, "its tokenizer cannot be loaded", lambda _: b"{}"),
    "generation settings": (
        "generation_config.json",
        2,
        "generation settings of generation_config.json, or of config.json if it is missing, cannot",
        lambda _: b"{",
    ),
    "configuration": (
        "config.json",
        2,
        "Transformers cannot build it: TypeError: Field 'num_attention_heads' expected int",
        with_text_for_a_number,
    ),
}


def test_damaged_folders_are_refused(llama_folder, tmp_path, capsys):
    def check(damage):
        name, code, message, change = damage
        folder = shutil.copytree(llama_folder, tmp_path / "model")
        file = folder / name
        file.write_bytes(change(file.read_bytes() if file.exists() else b""))
        if "do not exist" in message:  # a single file would be read in their place
            (folder / "model.safetensors").unlink()
        try:
            for budget in ("", "--cpu-budget 300KiB"):
                arguments = f"--prompt a --max-new-tokens 2 {budget}"
                run_plait(f"generate --model {folder} {arguments}", code=code)
                assert message in capsys.readouterr().err, budget
        finally:
            shutil.rmtree(folder)

    check_rows(DAMAGES, check)


def test_index_of_wrong_files_is_refused(llama_folder, tmp_path, capsys):
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    names = stored_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, folder / "second.safetensors")
    files = dict.fromkeys(names, "first.safetensors") | {"lm_head.weight": "second.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    run_plait(f"generate --model {folder} --prompt a", code=4)
    message = "second.safetensors is not a readable safetensors file (File does not contain tensor"
    assert f"{message} lm_head.weight" in capsys.readouterr().err


def test_code_of_the_page_runs(llama_folder, tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    generation, scores, hand_over, to_files, _ = blocks
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    engine = plait.initialize(model, {"train_micro_batch_size_per_gpu": 1})
    exec(generation, {"engine": engine, "tokenizer": AutoTokenizer.from_pretrained(llama_folder)})
    assert len(re.findall(r"(stop|length)$", capsys.readouterr().out, re.MULTILINE)) == 2
    exec(scores, {"engine": engine})
    assert float(capsys.readouterr().out) < 1e-5

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    names = {"plait": plait, "engine": engine, "model": model}
    exec(hand_over, names)
    assert capsys.readouterr().out == "1\n"
    names["generator"].close()

    monkeypatch.chdir(tmp_path)
    exec(to_files, {"plait": plait, "engine": engine, "safetensors": safetensors})
    saved = safetensors.torch.load_file(tmp_path / "weights-00000.safetensors")
    assert saved.keys() == engine.module.state_dict().keys()
    engine.close()


def test_adapter(llama_folder, tmp_path, capsys):
    """Layouts, streaming and the adapter's own folder agree, and the base model alone differs."""
    adapter = adapter_of(llama_folder, tmp_path / "adapter")
    prompts = write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    with_base = f"--model {llama_folder} --adapter {adapter}"
    answers = {}
    for name, options in {
        "base": f"--model {llama_folder}",
        "one device": with_base,
        "folder of the adapter": f"--model {adapter}",
        "tp": f"{with_base} --tp 2",
        "streamed": f"--model {adapter} --cpu-budget 300KiB",
    }.items():
        out = tmp_path / f"{name.replace(' ', '-')}.jsonl"
        run_plait(f"generate {options} --prompts {prompts} --out {out} {GREEDY}")
        answers[name] = read_rows(out)
    assert re.search(r"[23456] layers \(.*\) are read for every token", capsys.readouterr().err)
    base = answers.pop("base")
    expected = answers["one device"]
    assert base != expected
    assert answers == dict.fromkeys(answers, expected)

    run_plait(f"generate {with_base} --adapter {adapter} --prompt a", code=2)
    assert "--adapter: 2 were given, but at most one is supported" in capsys.readouterr().err
    lengths = "--prompt-tokens 8 --new-tokens 4 --cpu-budget 300KiB --json"
    run_plait(f"plan infer --model {adapter} {lengths}")
    account = json.loads(capsys.readouterr().out)["bytes"]
    elements = sum(p.numel() for p in open_source(adapter).model().parameters())
    assert account["weights"] + account["in_files"] == 4 * elements


STREAMED = "--prompt a --max-new-tokens 60 --cpu-budget 420KiB"


def test_read_error_names_the_file_and_the_byte(llama_folder, capsys, monkeypatch):
    read = os.preadv
    calls = 0

    def preadv(file, views, offset):
        nonlocal calls
        calls += 1
        if calls > 300:
            raise OSError(5, "Input/output error")
        return read(file, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    run_plait(f"generate --model {llama_folder} {STREAMED}", code=4)
    message = r"model.safetensors cannot be read at byte [\d,]+: Input/output error"
    assert re.search(message, capsys.readouterr().err) and calls > 300


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
def test_read_that_never_returns_ends_the_process(llama_folder):
    arguments = ["generate", "--model", str(llama_folder), *STREAMED.split()]
    done = subprocess.run(
        [sys.executable, "-c", HANGING_DISK, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    message = (
        r"model.safetensors: the weights of model.layers.\d have not arrived, "
        r"and no bytes were read for 2 s from byte [\d,]+ on"
    )
    assert done.returncode == 4 and re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("layout", ["--tp", "--pp"])
def test_killed_rank_ends_the_command(llama_folder, tmp_path, layout):
    """The error names the process. Answers are kept, and no temporary file is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    out = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "def read"}] * 4000)
    options = f"--prompts {prompts} --out {out} {layout} 2 --batch-size 2"
    options += " --max-new-tokens 200 --temperature 0"
    process = subprocess.Popen(
        [*f"{sys.executable} -m plait generate --model {llama_folder} {options}".split()],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        end = time.monotonic() + 60
        while not (partial.exists() and partial.stat().st_size):  # until the first answers
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if "plait.cli.generate" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        ranks[1].kill()
        killed = time.monotonic()
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()

    assert time.monotonic() - killed < 10 and process.returncode not in (0, None)
    assert "rank 1" in error and "SIGKILL" in error
    for rank in ranks:
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert not out.exists() and not list(temporary.iterdir())
    assert partial.read_bytes().endswith(b"\n")
    answers = read_rows(partial)
    assert all(answer["finish_reason"] for answer in answers)
    assert f"{len(answers)} of 4000 answers are finished and kept in {partial}" in error


def test_folder_of_a_run(tmp_path, capsys):
    """The configuration is that of the run, and weights are those of its newest checkpoint."""
    run = tmp_path / "run"
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "model": llama(num_hidden_layers=3),
        "data": {
            "source": "files",
            "paths": [str(Path(plait.__file__).parent / "sizes.py")],
            "sequence_length": 32,
            "vocab_size": 300,
        },
        "run": {"folder": str(run), "steps": 1, "processes": 1},
    }
    run_plait("train", write_rows(tmp_path / "run.json", [config]))
    capsys.readouterr()
    common = f"generate --model {run} --prompt 'def ' --temperature 0 --max-new-tokens 4"
    run_plait(common)
    answer = capsys.readouterr().out.rstrip("\n")
    assert answer

    run_plait(f"{common} --scratch {tmp_path} --cpu-budget 210KiB")
    streamed = capsys.readouterr()
    note = r"every token \(written to new files first: the tensors of a checkpoint lie in parts\)"
    assert re.search(rf"[23] layers .* {note}", streamed.err)
    assert streamed.out.rstrip("\n") == answer
    run_plait(f"{common} --scratch {tmp_path} --cpu-budget 1MiB", code=2)
    message = "--scratch: stores layers that are converted before they are streamed, but this model"
    assert message in capsys.readouterr().err
    lengths = "--prompt-tokens 4 --new-tokens 4 --cpu-budget 210KiB"
    run_plait(f"plan infer --model {run} {lengths}")
    planned = capsys.readouterr().out
    assert "written to new files first" in planned and "from files for every token" in planned

    pytest.importorskip("peft")
    run_plait(f"export {run} --out {tmp_path}/exported")
    adapter = adapter_of(tmp_path / "exported", tmp_path / "adapter")
    capsys.readouterr()
    run_plait(f"{common} --adapter {adapter}")
    assert capsys.readouterr().out.rstrip("\n") not in ("", answer)
