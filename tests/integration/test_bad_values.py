"""Wrong command lines and files end with one message, an exit code and no traceback.

The commands run in this process, and fail if they would start others.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.integration.bad_values import Case, cases, write_files

PLAIT = [sys.executable, "-m", "plait"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad")
    write_files(path)
    return path


@pytest.fixture
def workplace(folder, monkeypatch):
    """Current folder, in which no command starts processes or uses the network."""
    from plait.cli import train
    from plait.cli.launching import agent, remote

    def launch(*_, **__):
        raise AssertionError("processes were started")

    monkeypatch.setattr(agent, "launch", launch)
    monkeypatch.setattr(remote, "run", launch)
    monkeypatch.setattr(train, "_train", launch)
    monkeypatch.setenv("PLAIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folder)
    return folder


def assert_refused(case, capsys):
    with pytest.raises(SystemExit) as end:
        main(case.arguments)
    error = capsys.readouterr().err
    assert end.value.code == (1 if case.message.startswith("nothing fits") else 2), error
    assert "Traceback" not in error
    # A terminal escapes what it cannot encode.
    message = case.message.encode("utf-8", "backslashreplace").decode()
    assert message in error.replace(str(Path.cwd()), "")
    assert all(len(line) < 5000 for line in error.splitlines())


def name_of(case):
    return ascii(" ".join(case.arguments))[1:81]


@pytest.mark.parametrize("case", [case for case in cases() if case.quick], ids=name_of)
def test_bad_value(case, workplace, capsys):
    assert_refused(case, capsys)


@pytest.mark.proof
@pytest.mark.parametrize("case", [case for case in cases() if not case.quick], ids=name_of)
def test_every_bad_value(case, workplace, capsys):
    assert_refused(case, capsys)


LONG_NAME = "x" * 300
IMPOSSIBLE_NAMES = {
    f"train {LONG_NAME}.json": "cannot be read (File name too long)",
    f"train run.json --set run.folder={LONG_NAME}": "must be a path of at most 4095 bytes",
    f"plan --model llama-3-8b --gpu h100 --world-size 8 --out {LONG_NAME}.json": (
        "cannot be written"
    ),
    f"launch {LONG_NAME}": "no such script",
}


def test_names_that_no_file_can_have(workplace, capsys):
    for line, message in IMPOSSIBLE_NAMES.items():
        assert_refused(Case(shlex.split(line), message, True), capsys)


def test_file_in_place_of_a_folder_is_kept(workplace):
    """The check of whether a folder can be written leaves no file."""

    def names():
        return {path.name for path in workplace.iterdir()} - {"cache"}

    before = names()
    with pytest.raises(SystemExit):
        main(["train", "run.json", "--set", "run.folder=text.txt"])
    assert names() == before
    assert (workplace / "text.txt").read_text().startswith("It was")


def test_closed_and_full_standard_output():
    """`plait --help | head -1` ends with the code of the signal and without a message."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*PLAIT, "--help"], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (128 + signal.SIGPIPE, b"")

    if Path("/dev/full").exists():
        command = [*PLAIT, "--version"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=pipe, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("plait: standard output cannot be written")


@pytest.mark.proof
def test_ctrl_c_during_a_computation(folder):
    line = "plan --model llama-3-70b --world-size 1024 --gpu h100 --top 1000"
    with subprocess.Popen(
        [*PLAIT, *line.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stderr is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        os.kill(process.pid, signal.SIGINT)
        error = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in error
