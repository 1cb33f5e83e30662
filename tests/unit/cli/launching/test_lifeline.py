from __future__ import annotations

import os
import signal
import threading

import pytest

from plait.cli.launching import remote


class Agent:
    grace_seconds = 300.0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    numbers: list[int] = []
    monkeypatch.setattr(
        remote.os,
        "kill",
        lambda pid, number: numbers.append(number) if pid == os.getpid() else None,
    )
    return numbers


def _follow(agent: Agent, lines: list[bytes]) -> None:
    remote.follow(agent, lines)
    for thread in threading.enumerate():
        if thread.name == "plait-lifeline":
            thread.join(10)


def test_a_line_is_a_signal_with_a_grace(sent: list[int]) -> None:
    agent = Agent()
    _follow(agent, [remote.format_line(signal.SIGINT, 12.5)])
    assert sent[0] == signal.SIGINT
    assert agent.grace_seconds == 12.5


def test_the_end_of_the_line_ends_the_ranks(sent: list[int]) -> None:
    agent = Agent()
    _follow(agent, [])
    assert sent == [signal.SIGTERM]
    assert agent.grace_seconds == 300


def test_other_lines_do_nothing(sent: list[int]) -> None:
    _follow(Agent(), [b"\n", b"SIGKILL 3\n", b"hello\n", b"\xff\n"])
    assert sent == [signal.SIGTERM]
