"""Requests to stop of one process. tests/parity/test_stop_signal.py has several."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from plait.errors import CommunicationError
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


def test_a_rank_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise gloo's error would be the whole message, with exit code 1."""

    def lose(*_: object, **__: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    # A group of two ranks whose other rank has ended, without the processes.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lose)
    with pytest.raises(CommunicationError, match="requests to stop: rank 0 lost the connection"):
        StopRequest().shared(device=torch.device("cpu"))
