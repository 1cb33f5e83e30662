"""Requests that join and leave get the tokens that they get alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import InputError
from plait.inference.generate import generate
from plait.inference.load import load_model
from plait.inference.requests import Request
from plait.inference.serving import scheduler as scheduler_module
from plait.inference.serving.job import Job, Told
from plait.inference.serving.scheduler import Full, Scheduler
from plait.inference.settings import Settings
from plait.inference.source import open_source
from plait.sharded.model import ShardedModel
from tests.unit.inference.models import saved
from tests.unit.inference.words import Words

LENGTHS = [(3, 9), (12, 4), (1, 14), (7, 1), (20, 6), (5, 12), (2, 3)]
"""(tokens of the prompt, new ones)."""
SAMPLED = Settings(do_sample=True, temperature=1.3, top_k=0)


class Client:
    """What one request is told."""

    def __init__(self, index: int, *, settings: Settings = SAMPLED, new: int | None = None, leaves_after: int = 1000) -> None:
        prompt, most = LENGTHS[index % len(LENGTHS)]
        self.prompt, self.tokens, self.end = tuple(1 + (7 * index + 3 * at) % 90 for at in range(prompt)), [], Told()
        self.ended, self.seed, self._leaves_after = threading.Event(), index, leaves_after
        self.new = new or most
        self.job = Job(Request(self.prompt, self.new, self.seed if settings.do_sample else None), settings, self.tell)

    tokens: list[int]

    def tell(self, told: Told) -> None:
        assert not self.ended.is_set()
        if told.token is not None:
            self.tokens.append(told.token)
        if len(self.tokens) >= self._leaves_after:
            self.job.cancel()
        self.end = told
        if told.finish_reason or told.error:
            self.ended.set()


def served(folder: Path, kind: str, **fields: Any) -> ShardedModel:
    saved(folder, kind, **fields)
    return load_model(open_source(folder))


@pytest.mark.parametrize(("kind", "fields"), [("llama", {}), ("mistral", {"sliding_window": 6}), ("gpt2", {})])
def test_tokens_are_those_of_a_request_alone(kind: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = served(tmp_path / "model", kind, **fields)
    monkeypatch.setattr(scheduler_module, "PREFILL", 5)
    clients = [Client(index) for index in range(len(LENGTHS))]
    gone = Client(5, new=60, leaves_after=4)
    scheduler = Scheduler(sharded, Words(), at_once=3, waiting=20)
    scheduler.submit(*(client.job for client in clients[:2]), gone.job)
    scheduler.start()
    for client in clients[2:]:  # while others are decoded
        scheduler.submit(client.job)
    for client in clients:
        assert client.ended.wait(60)
    greedy = Client(0, settings=Settings(), new=5)
    scheduler.submit(greedy.job)
    assert greedy.ended.wait(60)
    scheduler.stop()
    assert scheduler.running == 0 and len(gone.tokens) == 4 and not gone.end.finish_reason
    for client in (*clients, greedy):
        settings = {"temperature": 1.3, "top_k": 0, "seed": client.seed} if client.job.settings.do_sample else {}
        (alone,) = generate(sharded, [list(client.prompt)], max_new_tokens=client.new, **settings)
        assert client.tokens == alone.token_ids and client.end.finish_reason == "length", (kind, client.prompt)
    sharded.close()


def test_what_is_cut_off_and_freed(tmp_path: Path) -> None:
    sharded = served(tmp_path / "model", "llama")
    scheduler = Scheduler(sharded, Words(), at_once=8, waiting=20)
    long, short = Client(4, new=2), Client(2, new=50)
    for client in (long, short):
        scheduler.submit(client.job)
    with torch.no_grad(), sharded.evaluating():
        scheduler._pass()
        (rows,) = scheduler._batches
        assert [job is client.job for job, client in zip(rows.jobs, (short,), strict=True)] == [True] and long.ended.is_set()
        assert rows.length == rows.cache.layers[0].keys.shape[2] == len(short.prompt) + 1  # the long one's tokens are not kept
        short.job.cancel()
        scheduler._pass()
    assert not scheduler._batches and rows.cache is None
    sharded.close()


def test_failures_reach_those_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = served(tmp_path / "model", "llama")
    scheduler = Scheduler(sharded, Words(), at_once=2, waiting=3)
    first, second = Client(0, new=50), Client(1, new=50)
    with pytest.raises(Full, match="4 prompts in one request, and 3 may wait; send fewer at once"):
        scheduler.submit(*(Client(0).job for _ in range(4)))
    full = Scheduler(sharded, Words(), at_once=2, waiting=3)
    full.submit(first.job, second.job)
    with pytest.raises(Full, match="2 requests wait, and 3 may; try again later"):
        full.submit(*(Client(0).job for _ in range(2)))
    first.job.cancel()  # one whose client is gone waits for nothing
    full.submit(*(Client(0).job for _ in range(2)))
    with pytest.raises(Full, match="3 requests wait"):
        full.submit(Client(0).job)
    first = Client(0, new=50)
    predict, calls = scheduler._predict, []

    def failing(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("the disk is gone")
        return predict(*args)

    monkeypatch.setattr(scheduler, "_predict", failing)
    scheduler.submit(first.job, second.job)
    scheduler.start()
    for client in (first, second):
        assert client.ended.wait(60) and client.end.error == "RuntimeError: the disk is gone"
    again, waits = Client(2), Client(3, new=90)
    scheduler.submit(again.job)
    assert again.ended.wait(60) and again.end.finish_reason == "length"  # the server goes on
    scheduler.submit(waits.job)
    scheduler.stop()
    assert waits.ended.is_set()
    with pytest.raises(InputError, match="the server is stopping"):
        scheduler.submit(again.job)
    sharded.close()
