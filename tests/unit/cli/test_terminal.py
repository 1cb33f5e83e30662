"""SIGTERM and SIGHUP end a command in order."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.cli.main import main
from plait.cli.terminal import ENDING_SIGNALS, exit_on_signals


@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_raises_once(number):
    before = signal.getsignal(number)
    handlers = []

    def kill():
        try:
            os.kill(os.getpid(), number)
        finally:
            handlers.append(signal.getsignal(number))

    with pytest.raises(SystemExit) as end, exit_on_signals():
        kill()
    # A second signal ends the process.
    assert handlers == [signal.SIG_DFL]
    assert end.value.code == 128 + number and signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    """`nohup` ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("verb", "inner"),
    [
        (["export", "run", "--out", "out"], "plait.train.export.export"),
        (["import", "folder", "--out", "out"], "plait.checkpoint.foreign.convert.convert"),
    ],
)
def test_commands_end_in_order(verb, inner, monkeypatch):
    def work(*_, **__):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)

    # The work of the command, and the checkpoint that it reads.
    monkeypatch.setattr(inner, work)
    monkeypatch.setattr(
        "plait.checkpoint.inspect.open_checkpoint",
        lambda place: SimpleNamespace(path=Path("run")),
    )
    with pytest.raises(SystemExit) as end:
        main(verb)
    assert end.value.code == 143
