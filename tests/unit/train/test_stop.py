"""Requests to stop of one process. tests/parity/test_stop_signal.py has several."""

from __future__ import annotations

import signal

import torch

from plait.train.loop import STOP_REQUESTED, StopRequest


def test_without_a_group_it_is_ones_own() -> None:
    stop = StopRequest()
    assert float(stop.shared(device=torch.device("cpu"))) == 0
    stop._handle(signal.SIGINT, None)
    assert float(stop.shared(device=torch.device("cpu"))) == signal.SIGINT


def test_the_user_is_told_at_once() -> None:
    heard: list[int] = []
    stop = StopRequest(on_request=lambda: heard.append(1))
    stop._handle(signal.SIGINT, None)
    assert heard == [1]


def test_a_checkpoint_that_is_due() -> None:
    """Agreed on with the request to stop, in one number; a run that ends writes one anyway."""
    stop = StopRequest()
    assert float(stop.shared(device=torch.device("cpu"), is_due=True)) == 0.5
    stop.ask()
    assert int(stop.shared(device=torch.device("cpu"), is_due=True)) == STOP_REQUESTED
