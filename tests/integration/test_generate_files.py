"""`plait generate` with a file of prompts that is wrong, comes from a pipe, or has answers that another command writes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from plait.cli import generate as command
from plait.cli.main import main
from plait.cluster import ending
from plait.errors import InputError
from plait.inference.prompt_file import Line, results_file
from plait.inference.requests import Generation
from tests.integration.model_folder import model_folder

GOOD = '{"prompt": "def read"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama"))


def run(folder: Path, *arguments: str, code: int = 0) -> None:
    try:
        main(["generate", "--model", str(folder), *arguments])
    except SystemExit as end:
        assert (end.code or 0) == code


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ({"token_ids": [5, 300]}, [], "line 3 has token 300, and the model's tokens are 0 to 299"),
        ({"prompt": "a " * 300}, [], "line 3: the longest request may have"),
        ({"prompt": ""}, [], "line 3 has no token"),
        ({"messages": [{"role": "user", "content": "a"}]}, [], "line 3 is a conversation, and the tokenizer has no chat template"),
        ({"prompt": "a"}, ["--top-p", "3"], "top_p = 3.0 must be"),
        ({"prompt": "a"}, ["--seed", "-1"], "--seed = '-1'"),
        ({"prompt": "a"}, ["--seed", str(2**63 - 1)], f"under 2**63; give {2**63 - 2} at most"),
        ({"prompt": "a", "text": "b"}, [], "line 3: has text, which the answer's would replace in --out; give it another name"),
        ({"prompt": "a", "finish_reason": "b"}, [], "line 3: has finish_reason, which the answer's would replace"),
    ],
)
def test_all_is_checked_before_the_first_answer(
    line: dict[str, Any], options: list[str], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def loaded(*_: Any) -> None:
        raise AssertionError("the model is loaded for nothing")

    monkeypatch.setattr(command, "_loaded", loaded)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(GOOD + "\n" + json.dumps(line) + "\n", encoding="utf-8")
    run(folder, "--prompts", str(prompts), "--out", str(out), "--batch-size", "1", "--max-new-tokens", "2", *options, code=2)
    assert words in capsys.readouterr().err and list(tmp_path.iterdir()) == [prompts]


def test_a_template_that_takes_no_such_conversation(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shutil import copytree

    other, prompts = copytree(folder, tmp_path / "model"), tmp_path / "prompts.jsonl"
    (other / "chat_template.jinja").write_text("{{ raise_exception('turns must alternate') }}")
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n", encoding="utf-8")
    run(other, "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), code=2)
    assert "line 1: the model's chat template does not take this conversation (turns must alternate)" in capsys.readouterr().err


def test_prompts_from_a_pipe(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are read once, and may begin with a byte order mark; several processes would each read them."""
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    for options, code in ((["--tp", "2"], 2), ([], 0)):
        writer = Thread(target=pipe.write_text, args=(GOOD * 2,), kwargs={"encoding": "utf-8-sig"}, daemon=True)
        writer.start()
        run(folder, "--prompts", str(pipe), "--out", str(out), "--max-new-tokens", "2", *options, code=code)
        writer.join(timeout=60)
        said = capsys.readouterr().err
        assert ("can be read once, and each of 2 processes (tp 2 x pp 1) reads it; write it to a file" in said) == bool(code), said
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2


def test_another_command_writes_the_answers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(GOOD, encoding="utf-8")
    (tmp_path / ".out.jsonl.tmp").write_text("of a command that was killed", encoding="utf-8")
    with results_file(out):
        run(folder, "--prompts", str(prompts), "--out", str(out), code=2)
        assert f"--out {out}: another command writes it now; wait for its end" in capsys.readouterr().err
        assert (tmp_path / ".out.jsonl.tmp").exists()
    assert out.read_text(encoding="utf-8") == ""
    with pytest.raises(InputError, match="exists; give another name"), results_file(out):
        pass
    assert sorted(tmp_path.iterdir()) == [out, prompts]
    (tmp_path / ".other.tmp").symlink_to(prompts)
    with pytest.raises(InputError, match="symbolic links; give a file"), results_file(tmp_path / "other"):
        pass
    assert prompts.read_text(encoding="utf-8") == GOOD


def test_several_processes_get_long_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones than the kernel takes for an argument, which all users of a machine may read."""
    long, given = "\u00e9" * 100_000, []

    def launched(words: list[str], _: Any) -> int:
        given.append((words, json.loads(Path(words[1]).read_text(encoding="utf-8"))))
        return 0

    monkeypatch.setattr(command.launch, "run", launched)
    run(folder, "--prompt", "a", "--tp", "2", "--max-new-tokens", "2", "--stop", long)
    ((words, asked),) = given
    assert max(map(len, words)) < 1000 and asked["settings"]["stop_strings"] == [long] and not Path(words[1]).parent.exists()


@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(
    number: signal.Signals, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is loaded, with the file of answers begun."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(GOOD, encoding="utf-8")

    def loaded(*_: Any) -> None:
        assert (tmp_path / ".out.jsonl.tmp").exists() and signal.getsignal(number) is not signal.SIG_DFL
        os.kill(os.getpid(), number)

    monkeypatch.setattr(command, "_loaded", loaded)
    before = signal.getsignal(number)
    run(folder, "--prompts", str(prompts), "--out", str(out), code=128 + number)
    assert list(tmp_path.iterdir()) == [prompts] and signal.getsignal(number) is before
    assert "Traceback" not in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some say so only when what was written has to be on them."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="out: No space left on device"), results_file(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_that_another_program_has_made_meanwhile(tmp_path: Path) -> None:
    """It is left as it is, and so are the answers."""
    out, kept = tmp_path / "out", tmp_path / ".out.tmp"
    made = Generation([1], [2], [-0.5], "stop", "b")

    def write_both() -> None:
        with results_file(out) as write:
            write([Line("a", {"prompt": "a"}, "line 1")], [made])
            out.write_text("of another program", encoding="utf-8")

    with pytest.raises(InputError, match="another program has made it meanwhile; the answers are in .*out.tmp: rename"):
        write_both()
    assert out.read_text(encoding="utf-8") == "of another program"
    assert json.loads(kept.read_text(encoding="utf-8")) == {"prompt": "a", "text": "b", "token_ids": [2], "finish_reason": "stop"}


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 128 + signal.SIGPIPE), (errno.ENOSPC, 1)])
def test_standard_output_that_takes_no_more(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several processes ends at once; a single one raises what `main` tells."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, "no more")

    monkeypatch.setattr("builtins.print", full)
    ended: list[int] = []
    monkeypatch.setattr(command, "close_stdout", lambda error: code if error.errno == number else 0)
    monkeypatch.setattr(ending, "end_process", ended.append)
    asked = command.Asked("m", None, "stored", 2, 1, "a", None, None, 1, None)
    command._write(asked, "text")
    assert ended == [code]
    with pytest.raises(OSError, match="no more"):
        command._write(replace(asked, tp=1), "text")


@pytest.mark.proof
def test_a_reader_that_goes_ends_all_processes(folder: Path) -> None:
    """Without a traceback."""
    asked = ["--model", str(folder), "--prompt", "a", "--max-new-tokens", "90", "--tp", "2"]
    process = subprocess.Popen([sys.executable, "-m", "plait", "generate", *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(60) == 128 + signal.SIGPIPE and "Traceback" not in said and "on_token" not in said, said
