"""Whatever is wrong with a command line or with what it names: an exit code of its own, no traceback, and a line that names the field, its
value or the file, and the rule (faults F, bad values).

In process, up to where other processes would start: to have started some is a failure too.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.integration.bad_values import Case, cases, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bad")
    write_files(made)
    return made


@pytest.fixture
def here(folder, monkeypatch):
    from plait.cli import train
    from plait.cli.launching import agent, remote

    def started(*_, **__):
        raise AssertionError("processes were started")

    monkeypatch.setattr(agent, "launch", started)
    monkeypatch.setattr(remote, "run", started)
    monkeypatch.setattr(train, "_train", started)
    monkeypatch.setenv("PLAIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folder)
    return folder


def refused(case, capsys):
    with pytest.raises(SystemExit) as end:
        main(case.arguments)
    said = capsys.readouterr().err
    assert end.value.code == (1 if case.words.startswith("nothing fits") else 2), said
    assert "Traceback" not in said
    words = case.words.encode("utf-8", "backslashreplace").decode()  # as the terminal gets it
    assert words in said.replace(str(Path.cwd()), "")
    assert all(len(line) < 5000 for line in said.splitlines())


def _name(case):
    return ascii(" ".join(case.arguments))[1:81]


@pytest.mark.parametrize("case", [case for case in cases() if case.quick], ids=_name)
def test_a_bad_value(case, here, capsys):
    refused(case, capsys)


@pytest.mark.proof
@pytest.mark.parametrize("case", [case for case in cases() if not case.quick], ids=_name)
def test_every_bad_value(case, here, capsys):
    refused(case, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "x" * 300 + ".json"], "cannot be read (File name too long)"),
        (
            ["train", "run.json", "--set", "run.folder=" + "x" * 300],
            "must be a path of at most 4095 bytes",
        ),
        (
            [
                *["plan", "--model", "llama-3-8b", "--gpu", "h100", "--world-size", "8", "--out"],
                "a" * 300 + ".json",
            ],
            "cannot be written",
        ),
        (["launch", "x" * 300], "no such script"),
    ],
)
def test_names_that_no_file_can_have(arguments, words, here, capsys):
    refused(Case(arguments, words, True), capsys)


def test_nothing_is_written_over(here):
    """A file that is no folder stays what it is, and nothing is left of looking whether one can write."""
    before = sorted(path.name for path in here.iterdir())
    with pytest.raises(SystemExit):
        main(["train", "run.json", "--set", "run.folder=text.txt"])
    assert sorted(path.name for path in here.iterdir() if path.name != "cache") == [
        name for name in before if name != "cache"
    ]
    assert (here / "text.txt").read_text().startswith("It was")


PLAIT = [sys.executable, "-m", "plait"]


def test_a_closed_and_a_full_standard_output():
    """As of `plait --help | head -1`: the signal's code and not a word; a full disk is told."""
    with subprocess.Popen(
        [*PLAIT, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (128 + signal.SIGPIPE, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*PLAIT, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 1 and done.stderr.startswith(
            "plait: standard output cannot be written"
        )


@pytest.mark.proof
def test_ctrl_c_while_something_is_computed(folder):
    run = [
        *PLAIT,
        *[
            "plan",
            "--model",
            "llama-3-70b",
            "--world-size",
            "1024",
            "--gpu",
            "h100",
            "--top",
            "1000",
        ],
    ]
    with subprocess.Popen(
        run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        assert process.stderr is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        os.kill(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in said
