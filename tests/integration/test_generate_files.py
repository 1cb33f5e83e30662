"""`plait generate` with files: wrong prompts, pipes, interrupted commands, and full disks."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from plait.cli import generate as command
from plait.cluster import process_groups
from plait.errors import InputError
from plait.inference.prompt_files import AnswerFile, answer_file, read_prompts
from plait.inference.requests import Generation
from tests.integration.commands import run_plait
from tests.integration.json_lines import read_rows, write_rows
from tests.table import check_each

PROMPT = '{"prompt": "def read"}\n'
GENERATION = Generation([1], [2], [-0.5], "stop", "b")
ANSWER = {"prompt": "def read", "text": "b", "token_ids": [2], "finish_reason": "stop"}


@pytest.fixture
def prompts(tmp_path):
    """Path of a file with one prompt."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPT, encoding="utf-8")
    return path


CONVERSATION = {"messages": [{"role": "user", "content": "a"}]}
REFUSED = [
    # line 3 of the file, options, message
    ({"token_ids": [5, 300]}, "", "line 3 has token 300, but the model's tokens are 0 to 299"),
    ({"prompt": "a " * 300}, "", "line 3: the longest request may have"),
    ({"prompt": ""}, "", "line 3 has no token"),
    (CONVERSATION, "", "line 3 is a conversation, but the tokenizer has no chat template"),
    ({"prompt": "a"}, "--top-p 3", "top_p = 3.0 must be"),
    ({"prompt": "a"}, "--seed -1", "--seed = '-1'"),
    ({"prompt": "a"}, f"--seed {2**63 - 1}", f"below 2**63; use at most {2**63 - 2}"),
    ({"prompt": "a", "text": "b"}, "", "has the key text, which --out uses for the answer; give"),
    ({"prompt": "a", "finish_reason": "b"}, "", "line 3: has the key finish_reason, which --out"),
]


def test_input_is_checked_before_the_model_is_loaded(
    llama_folder, prompts, tmp_path, capsys, monkeypatch
):
    def load(*_):
        raise AssertionError("the model is loaded")

    def check(line, options, message):
        prompts.write_text(f"{PROMPT}\n{json.dumps(line)}\n", encoding="utf-8")
        arguments = f"--prompts {prompts} --out {tmp_path}/out.jsonl --max-new-tokens 2 {options}"
        run_plait(f"generate --model {llama_folder} --batch-size 1 {arguments}", code=2)
        assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == [prompts]

    monkeypatch.setattr(command, "_load", load)
    check_each(REFUSED, check)


def folder_with_template(llama_folder, target, template):
    folder = shutil.copytree(llama_folder, target)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_conversation_that_the_template_refuses(llama_folder, prompts, tmp_path, capsys):
    template = "{{ raise_exception('turns must alternate') }}"
    folder = folder_with_template(llama_folder, tmp_path / "model", template)
    prompts.write_text(json.dumps(CONVERSATION) + "\n", encoding="utf-8")
    run_plait(f"generate --model {folder} --prompts {prompts} --out {tmp_path}/out.jsonl", code=2)
    message = "the model's chat template does not take this conversation (turns must alternate)"
    assert f"line 1: {message}" in capsys.readouterr().err


def test_prompt_for_a_chat_model_is_noted(llama_folder, tmp_path, capsys):
    """A chat model may answer nothing to a text that is not a conversation."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat = folder_with_template(llama_folder, tmp_path / "model", template)
    note = "the model has a chat template, which is not applied to a prompt"
    for model in (chat, llama_folder):
        run_plait(f"generate --model {model} --prompt a --max-new-tokens 1")
        assert (note in capsys.readouterr().err) == (model is chat)


def test_prompts_from_a_pipe(llama_folder, tmp_path, monkeypatch):
    """A pipe is read once, even for several processes, and may start with a byte order mark."""
    pipe = tmp_path / "pipe"
    out = tmp_path / "out.jsonl"
    passed_on = []

    def launch(arguments, _):
        settings = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
        passed_on.extend(read_prompts(Path(settings["prompts"])))
        return 0

    # Two processes are not started, because the test is about what they would read.
    monkeypatch.setattr(command.launch, "run", launch)
    os.mkfifo(pipe)
    for options in ("--tp 2", ""):
        options += f" --prompts {pipe} --out {out} --max-new-tokens 2"
        encoding = {"encoding": "utf-8-sig"}
        writer = Thread(target=pipe.write_text, args=(PROMPT * 2,), kwargs=encoding, daemon=True)
        writer.start()
        run_plait(f"generate --model {llama_folder} {options}")
        writer.join(timeout=60)
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2
    assert [line.fields for line in passed_on] == [json.loads(PROMPT)] * 2


def test_full_disk_for_arguments_of_processes(llama_folder, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    run_plait(f"generate --model {llama_folder} --prompt a --tp 2 --max-new-tokens 2", code=2)
    message = "No space left on device; several processes read their arguments there"
    assert message in capsys.readouterr().err


def test_second_command_does_not_write_the_same_answers(llama_folder, prompts, tmp_path, capsys):
    lines = read_prompts(prompts)
    out = tmp_path / "out.jsonl"
    with answer_file(out, lines, {}) as answers:
        run_plait(f"generate --model {llama_folder} --prompts {prompts} --out {out}", code=2)
        message = f"--out {out}: another command is writing it; wait until it ends"
        assert message in capsys.readouterr().err
        answers.add([GENERATION])
    assert json.loads(out.read_text(encoding="utf-8")) == ANSWER
    assert_refused(out, lines, {}, "exists; pass another name")
    assert sorted(tmp_path.iterdir()) == [out, prompts]

    (tmp_path / "other.partial").symlink_to(prompts)
    assert_refused(tmp_path / "other", lines, {}, "symbolic links; pass a file")
    assert prompts.read_text(encoding="utf-8") == PROMPT


def assert_refused(out, lines, options, message):
    with pytest.raises(InputError, match=message), answer_file(out, lines, options):
        pass


def write_answers(out, lines, options=None, after_first=lambda: None):
    """Write all answers, and call a function after the first one."""
    with answer_file(out, lines, options or {}) as answers:
        answers.add([GENERATION])
        after_first()
        answers.add([GENERATION] * (len(lines) - 1))


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(
    "end", [KeyboardInterrupt(), SystemExit(143), InputError("a disk that fails")]
)
def test_command_continues_after_finished_answers(
    end, sampled, llama_folder, prompts, tmp_path, monkeypatch, capsys
):
    """The tokens equal those of a command that was not interrupted, even in other batches."""
    rows = [{"prompt": "def " * (1 + number % 3), "id": number} for number in range(5)]
    write_rows(prompts, rows)
    common = f"generate --model {llama_folder} --prompts {prompts} --max-new-tokens 4"
    if sampled:
        common += " --seed 5 --temperature 1"
    expected = tmp_path / "expected.jsonl"
    run_plait(f"{common} --out {expected}")

    out = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    add = AnswerFile.add

    def interrupt(answers, generations):
        if answers.done:
            os.write(answers._file.fileno(), b'{"half')
            raise end
        add(answers, generations)

    code = {KeyboardInterrupt: 130, SystemExit: 143}.get(type(end), 2)
    # A signal cannot be timed between two batches.
    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", interrupt)
        run_plait(f"{common} --out {out} --batch-size 2", code=code)
    message = f"2 of 5 answers are finished and kept in {partial}; the same command continues after"
    assert message in capsys.readouterr().err and not out.exists()
    assert [answer["id"] for answer in read_rows(partial)] == [0, 1]

    with open(partial, "ab") as file:
        file.write(b'{"of a process that was killed')
    run_plait(f"{common} --out {out} --max-new-tokens 5", code=2)
    message = "finished answers of another command (--max-new-tokens was 4 and is 5); pass another"
    assert message in capsys.readouterr().err
    run_plait(f"{common} --out {out} --batch-size 3")
    assert f"2 of 5 answers are in {partial} already" in capsys.readouterr().err
    assert out.read_bytes() == expected.read_bytes()
    assert sorted(tmp_path.iterdir()) == [expected, out, prompts]


def test_prompts_that_are_not_utf_8_are_refused(prompts):
    prompts.write_bytes(PROMPT.encode() + b'{"prompt": "caf\xe9"}\n')
    message = "prompts.jsonl, line 2: byte 16 is 0xe9, which is not UTF-8; save the file as UTF-8$"
    with pytest.raises(InputError, match=message):
        read_prompts(prompts)


def test_line_numbers_of_all_line_ends(prompts):
    prompts.write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r{"prompt": "c"}')
    lines = [(line.prompt, line.name[-1]) for line in read_prompts(prompts)]
    assert lines == [("a", "1"), ("b", "3"), ("c", "4")]


def test_answers_of_another_command_are_not_overwritten(prompts, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    prompts.write_text(PROMPT * 2, encoding="utf-8")
    lines = read_prompts(prompts)
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    options = {"--seed": 1}
    with pytest.raises(KeyboardInterrupt):
        write_answers(out, lines, options, interrupt)
    content = partial.read_bytes()

    assert_refused(out, lines[:1], options, "its --prompts differ")
    assert_refused(out, lines, {"--seed": 2}, "--seed was 1 and is 2")
    assert_refused(out, lines, {"--seed": 1, "--top-k": 3}, "--top-k was not given and is 3")
    assert partial.read_bytes() == content

    partial.write_bytes(content.replace(b"def", b"abc"))
    message = r"out.partial, line 1: is not an answer to .*line 1; remove"
    assert_refused(out, lines, options, message)
    partial.write_bytes(content)
    (tmp_path / "out.partial.json").unlink()
    message = "out.partial.json does not record the options of the command"
    assert_refused(out, lines, options, message)
    assert partial.read_bytes() == content


def test_full_disk_keeps_finished_answers(prompts, tmp_path):
    """Complete lines stay in a file that reaches its largest size."""
    prompts.write_text(PROMPT * 2, encoding="utf-8")
    lines = read_prompts(prompts)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    one_answer = (len(json.dumps(ANSWER)) + 20, limits[1])

    def limit_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, one_answer)

    try:
        with pytest.raises(InputError, match="out: File too large"):
            write_answers(tmp_path / "out", lines, after_first=limit_size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads((tmp_path / "out.partial").read_text(encoding="utf-8")) == ANSWER


def test_long_settings_reach_several_processes(llama_folder, monkeypatch):
    """The kernel limits the length of an argument, and all users of a machine can read it."""
    long = "\u00e9" * 100_000
    calls = []

    def launch(arguments, settings):
        # A rank may wait for another that a signal has ended.
        assert settings.processes == 2 and settings.grace_seconds <= 10
        calls.append((arguments, json.loads(Path(arguments[1]).read_text(encoding="utf-8"))))
        return 0

    monkeypatch.setattr(command.launch, "run", launch)
    common = f"generate --model {llama_folder} --prompt a --tp 2 --max-new-tokens 2"
    run_plait(common, "--stop", long)
    ((arguments, settings),) = calls
    assert max(map(len, arguments)) < 1000
    assert settings["settings"]["stop_strings"] == [long]
    assert not Path(arguments[1]).parent.exists()


@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_before_the_first_answer_leaves_no_file(
    number, llama_folder, prompts, tmp_path, capsys, monkeypatch
):
    def interrupt(*_):
        assert (tmp_path / "out.jsonl.partial").exists()
        assert signal.getsignal(number) is not signal.SIG_DFL
        os.kill(os.getpid(), number)

    # The signal arrives while the model is loaded.
    monkeypatch.setattr(command, "_load", interrupt)
    handler = signal.getsignal(number)
    arguments = f"--prompts {prompts} --out {tmp_path}/out.jsonl"
    run_plait(f"generate --model {llama_folder} {arguments}", code=128 + number)
    assert list(tmp_path.iterdir()) == [prompts] and signal.getsignal(number) is handler
    assert "Traceback" not in capsys.readouterr().err


def test_disk_that_reports_at_fsync_that_it_is_full(prompts, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    lines = read_prompts(prompts)
    monkeypatch.setattr(os, "fsync", full)
    # The record of options is written before and would fail first.
    monkeypatch.setattr("plait.inference.prompt_files.write_atomically", lambda *_: None)
    with pytest.raises(InputError, match="out: No space left on device"):
        write_answers(tmp_path / "out", lines)
    assert sorted(os.listdir(tmp_path)) == ["out.partial", "prompts.jsonl"]


def test_file_of_another_program_is_not_overwritten(prompts, tmp_path):
    lines = read_prompts(prompts)
    out = tmp_path / "out"

    def create():
        out.write_text("of another program", encoding="utf-8")

    message = "another program has created it; the answers are in .*out.partial, so rename"
    with pytest.raises(InputError, match=message):
        write_answers(out, lines, after_first=create)
    assert out.read_text(encoding="utf-8") == "of another program"
    assert json.loads((tmp_path / "out.partial").read_text(encoding="utf-8")) == ANSWER


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EPIPE, 128 + signal.SIGPIPE), (errno.ENOSPC, 1)]
)
def test_standard_output_that_fails(number, code, monkeypatch):
    """A rank of several ends at once. A single process raises, and `main` prints the error."""

    def full(*_, **__):
        raise OSError(number, "no more")

    # The process of the test must neither lose its standard output nor end.
    codes: list[int] = []
    monkeypatch.setattr("builtins.print", full)
    monkeypatch.setattr(command, "close_stdout", lambda error: code if error.errno == number else 0)
    monkeypatch.setattr(process_groups, "end_process", codes.append)
    arguments = command.GenerateArguments("m", None, "stored", 2, 1, "a", None, None, 1, None)
    command._write(arguments, "text")
    assert codes == [code]
    with pytest.raises(OSError, match="no more"):
        command._write(replace(arguments, tp=1), "text")


@pytest.mark.proof
def test_closed_pipe_ends_all_processes(llama_folder):
    arguments = f"generate --model {llama_folder} --prompt a --max-new-tokens 90 --tp 2"
    process = subprocess.Popen(
        [sys.executable, "-m", "plait", *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert "Traceback" not in error and "on_token" not in error, error
