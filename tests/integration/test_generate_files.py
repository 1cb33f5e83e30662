"""`plait generate` with a file of prompts that is wrong, comes from a pipe, or has answers that another command writes."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from plait.cli import generate as command
from plait.cli.main import main
from plait.cluster import process_groups
from plait.errors import InputError
from plait.inference.prompt_files import AnswerFile, PromptLine, answer_file, read_prompts
from plait.inference.requests import Generation
from tests.integration.model_folder import model_folder

GOOD = '{"prompt": "def read"}\n'
MADE = Generation([1], [2], [-0.5], "stop", "b")
ANSWER = {"prompt": "def read", "text": "b", "token_ids": [2], "finish_reason": "stop"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("llama"))


def run(folder, *arguments, code=0):
    try:
        main(["generate", "--model", str(folder), *arguments])
    except SystemExit as end:
        assert (end.code or 0) == code


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ({"token_ids": [5, 300]}, [], "line 3 has token 300, but the model's tokens are 0 to 299"),
        ({"prompt": "a " * 300}, [], "line 3: the longest request may have"),
        ({"prompt": ""}, [], "line 3 has no token"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            [],
            "line 3 is a conversation, but the tokenizer has no chat template",
        ),
        ({"prompt": "a"}, ["--top-p", "3"], "top_p = 3.0 must be"),
        ({"prompt": "a"}, ["--seed", "-1"], "--seed = '-1'"),
        ({"prompt": "a"}, ["--seed", str(2**63 - 1)], f"below 2**63; use at most {2**63 - 2}"),
        (
            {"prompt": "a", "text": "b"},
            [],
            "line 3: has the key text, which --out uses for the answer; give it another name",
        ),
        (
            {"prompt": "a", "finish_reason": "b"},
            [],
            "line 3: has the key finish_reason, which --out uses for the answer",
        ),
    ],
)
def test_all_is_checked_before_the_first_answer(
    line, options, words, folder, tmp_path, capsys,
    monkeypatch
):  # fmt: skip
    def loaded(*_):
        raise AssertionError("the model is loaded for nothing")

    monkeypatch.setattr(command, "_load", loaded)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(GOOD + "\n" + json.dumps(line) + "\n", encoding="utf-8")
    run(
        folder,
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        *["--batch-size", "1", "--max-new-tokens", "2"],
        *options,
        code=2,
    )
    assert words in capsys.readouterr().err and list(tmp_path.iterdir()) == [prompts]


def test_a_template_that_takes_no_such_conversation(folder, tmp_path, capsys):
    from shutil import copytree

    other, prompts = copytree(folder, tmp_path / "model"), tmp_path / "prompts.jsonl"
    (other / "chat_template.jinja").write_text("{{ raise_exception('turns must alternate') }}")
    prompts.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n", encoding="utf-8"
    )
    run(other, "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), code=2)
    assert (
        "line 1: the model's chat template does not take this conversation (turns must alternate)"
        in capsys.readouterr().err
    )


def test_a_text_for_a_model_with_a_template(folder, tmp_path, capsys):
    """Is noted: a chat model may answer nothing to a text that is no conversation."""
    from shutil import copytree

    other = copytree(folder, tmp_path / "model")
    (other / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    for model, noted in ((other, True), (folder, False)):
        run(model, "--prompt", "a", "--max-new-tokens", "1")
        assert (
            "the model has a chat template, which is not applied to a prompt"
            in capsys.readouterr().err
        ) == noted


def test_prompts_from_a_pipe(folder, tmp_path, monkeypatch):
    """They are read once, also for several processes, and may begin with a byte order mark."""
    pipe, out, given = tmp_path / "pipe", tmp_path / "out.jsonl", list[list[PromptLine]]()

    def launched(words, _):
        given.append(
            read_prompts(Path(json.loads(Path(words[1]).read_text(encoding="utf-8"))["prompts"]))
        )
        return 0

    monkeypatch.setattr(command.launch, "run", launched)
    os.mkfifo(pipe)
    for options in (["--tp", "2"], []):
        writer = Thread(
            target=pipe.write_text, args=(GOOD * 2,), kwargs={"encoding": "utf-8-sig"}, daemon=True
        )
        writer.start()
        run(folder, "--prompts", str(pipe), "--out", str(out), "--max-new-tokens", "2", *options)
        writer.join(timeout=60)
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2
    assert [line.fields for line in given[0]] == [json.loads(GOOD)] * 2


def test_no_room_for_what_processes_are_told(folder, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    run(folder, "--prompt", "a", "--tp", "2", "--max-new-tokens", "2", code=2)
    assert (
        "No space left on device; several processes read their arguments there"
        in capsys.readouterr().err
    )


def lines_of(tmp_path, text=GOOD):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text, encoding="utf-8")
    return read_prompts(prompts)


def test_another_command_writes_the_answers(folder, tmp_path, capsys):
    lines, prompts, out = lines_of(tmp_path), tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    with answer_file(out, lines, {}) as answers:
        run(folder, "--prompts", str(prompts), "--out", str(out), code=2)
        assert (
            f"--out {out}: another command is writing it; wait until it ends"
            in capsys.readouterr().err
        )
        answers.add([MADE])
    assert json.loads(out.read_text(encoding="utf-8")) == ANSWER
    with pytest.raises(InputError, match="exists; pass another name"), answer_file(out, lines, {}):
        pass
    assert sorted(tmp_path.iterdir()) == [out, prompts]
    (tmp_path / "other.partial").symlink_to(prompts)
    with (
        pytest.raises(InputError, match="symbolic links; pass a file"),
        answer_file(tmp_path / "other", lines, {}),
    ):
        pass
    assert prompts.read_text(encoding="utf-8") == GOOD


def write_one(out, lines, command=None, then=lambda: None):
    """One answer, and what happens after it."""
    with answer_file(out, lines, command or {}) as answers:
        answers.add([MADE])
        then()
        answers.add([MADE] * (len(lines) - 1))


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(
    "end", [KeyboardInterrupt(), SystemExit(143), InputError("a disk that fails")]
)
def test_a_command_goes_on_after_finished_answers(
    end, sampled, folder, tmp_path, monkeypatch, capsys
):
    """With the tokens of a command that was not interrupted, in other batches."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines_of(
        tmp_path,
        "".join(
            json.dumps({"prompt": "def " * (1 + number % 3), "id": number}) + "\n"
            for number in range(5)
        ),
    )
    common = [
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "4",
        *(["--seed", "5", "--temperature", "1"] if sampled else []),
    ]
    run(folder, *common, "--out", str(tmp_path / "whole.jsonl"))
    add, code = AnswerFile.add, {KeyboardInterrupt: 130, SystemExit: 143}.get(type(end), 2)

    def interrupted(answers, made):
        if answers.done:
            os.write(answers._file.fileno(), b'{"half')
            raise end
        add(answers, made)

    monkeypatch.setattr(AnswerFile, "add", interrupted)
    run(folder, *common, "--out", str(out), "--batch-size", "2", code=code)
    partial = out.with_name("out.jsonl.partial")
    said = (
        f"2 of 5 answers are finished and kept in {partial}; the same command continues after them"
    )
    assert said in capsys.readouterr().err and not out.exists()
    assert [
        json.loads(line)["id"] for line in partial.read_text(encoding="utf-8").splitlines()
    ] == [0, 1]
    monkeypatch.setattr(AnswerFile, "add", add)
    with open(partial, "ab") as file:
        file.write(b'{"of a process that was killed')
    run(folder, *common, "--out", str(out), "--max-new-tokens", "5", code=2)
    assert (
        "finished answers of another command (--max-new-tokens was 4 and is 5); pass another --out, or"
        in capsys.readouterr().err
    )
    run(folder, *common, "--out", str(out), "--batch-size", "3")
    assert f"2 of 5 answers are in {partial} already" in capsys.readouterr().err
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.jsonl",
        "prompts.jsonl",
        "whole.jsonl",
    ]


def kept(tmp_path, lines):
    """One of two answers."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_one(tmp_path / "out", lines, {"--seed": 1}, interrupt)
    return tmp_path / "out.partial"


def test_prompts_that_are_no_utf_8(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(GOOD.encode() + b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(
        InputError,
        match=r"prompts.jsonl, line 2: byte 16 is 0xe9, which is not UTF-8; save the file as UTF-8$",
    ):
        read_prompts(prompts)
    prompts.write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r{"prompt": "c"}')
    assert [(line.prompt, line.name[-1]) for line in read_prompts(prompts)] == [
        ("a", "1"),
        ("b", "3"),
        ("c", "4"),
    ]


def test_answers_of_other_prompts_are_left_as_they_are(tmp_path):
    """Or of another command, or without a sign of which; or that somebody has changed."""
    lines = lines_of(tmp_path, GOOD * 2)
    partial, described = kept(tmp_path, lines), tmp_path / "out.partial.json"
    before = partial.read_bytes()
    for change, other, words in (
        (lines[:1], {"--seed": 1}, "its --prompts differ"),
        (lines, {"--seed": 2}, "--seed was 1 and is 2"),
        (lines, {"--seed": 1, "--top-k": 3}, "--top-k was not given and is 3"),
    ):
        with pytest.raises(InputError, match=words), answer_file(tmp_path / "out", change, other):
            pass
        assert partial.read_bytes() == before
    partial.write_bytes(before.replace(b"def", b"abc"))
    with (
        pytest.raises(
            InputError, match=r"out.partial, line 1: is not an answer to .*line 1; remove"
        ),
        answer_file(tmp_path / "out", lines, {"--seed": 1}),
    ):
        pass
    partial.write_bytes(before)
    described.unlink()
    with (
        pytest.raises(
            InputError, match="out.partial.json does not record the options of the command"
        ),
        answer_file(tmp_path / "out", lines, {"--seed": 1}),
    ):
        pass
    assert partial.read_bytes() == before


def test_a_full_disk_keeps_finished_answers(tmp_path):
    """Of a file that may have so many bytes, the lines that are in it to their end."""
    lines = lines_of(tmp_path, GOOD * 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = len(json.dumps(ANSWER)) + 20
    try:
        with pytest.raises(InputError, match="out: File too large"):
            write_one(
                tmp_path / "out",
                lines,
                then=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1])),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert json.loads((tmp_path / "out.partial").read_text(encoding="utf-8")) == ANSWER


def test_several_processes_get_long_settings(folder, monkeypatch):
    """Longer ones than the kernel takes for an argument, which all users of a machine may read."""
    long, given = "\u00e9" * 100_000, []

    def launched(words, settings):
        assert (
            settings.processes == 2 and settings.grace_seconds <= 10
        )  # one may wait for another that a signal has ended
        given.append((words, json.loads(Path(words[1]).read_text(encoding="utf-8"))))
        return 0

    monkeypatch.setattr(command.launch, "run", launched)
    run(folder, "--prompt", "a", "--tp", "2", "--max-new-tokens", "2", "--stop", long)
    ((words, asked),) = given
    assert (
        max(map(len, words)) < 1000
        and asked["settings"]["stop_strings"] == [long]
        and not Path(words[1]).parent.exists()
    )


@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_answer_leaves_nothing(
    number, folder, tmp_path, capsys, monkeypatch
):
    """While the model is loaded, with the file of answers begun."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(GOOD, encoding="utf-8")

    def loaded(*_):
        assert (tmp_path / "out.jsonl.partial").exists() and signal.getsignal(
            number
        ) is not signal.SIG_DFL
        os.kill(os.getpid(), number)

    monkeypatch.setattr(command, "_load", loaded)
    before = signal.getsignal(number)
    run(folder, "--prompts", str(prompts), "--out", str(out), code=128 + number)
    assert list(tmp_path.iterdir()) == [prompts] and signal.getsignal(number) is before
    assert "Traceback" not in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end(tmp_path, monkeypatch):
    """Some say so only when what was written has to be on them."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "in").mkdir()
    lines = lines_of(tmp_path / "in")
    monkeypatch.setattr("plait.inference.prompt_files.write_atomically", lambda *_: None)
    with pytest.raises(InputError, match="out: No space left on device"):
        write_one(tmp_path / "out", lines)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.partial"]


def test_a_file_that_another_program_has_made_meanwhile(tmp_path):
    """It is left as it is, and so are the answers."""
    lines, out = lines_of(tmp_path), tmp_path / "out"

    with pytest.raises(
        InputError,
        match="another program has created it; the answers are in .*out.partial, so rename",
    ):
        write_one(out, lines, then=lambda: out.write_text("of another program", encoding="utf-8"))
    assert out.read_text(encoding="utf-8") == "of another program"
    assert json.loads((tmp_path / "out.partial").read_text(encoding="utf-8")) == ANSWER


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EPIPE, 128 + signal.SIGPIPE), (errno.ENOSPC, 1)]
)
def test_standard_output_that_takes_no_more(number, code, monkeypatch):
    """One of several processes ends at once; a single one raises what `main` tells."""

    def full(*_, **__):
        raise OSError(number, "no more")

    monkeypatch.setattr("builtins.print", full)
    ended: list[int] = []
    monkeypatch.setattr(command, "close_stdout", lambda error: code if error.errno == number else 0)
    monkeypatch.setattr(process_groups, "end_process", ended.append)
    asked = command.GenerateArguments("m", None, "stored", 2, 1, "a", None, None, 1, None)
    command._write(asked, "text")
    assert ended == [code]
    with pytest.raises(OSError, match="no more"):
        command._write(replace(asked, tp=1), "text")


@pytest.mark.proof
def test_a_reader_that_goes_ends_all_processes(folder):
    """Without a traceback."""
    asked = ["--model", str(folder), "--prompt", "a", "--max-new-tokens", "90", "--tp", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "plait", "generate", *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    assert (
        process.wait(60) == 128 + signal.SIGPIPE
        and "Traceback" not in said
        and "on_token" not in said
    ), said
