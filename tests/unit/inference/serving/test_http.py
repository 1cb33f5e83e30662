"""The routes, without a server and without a decoded token: clients that go, texts that take long, and the end. `make serving` runs
these, where FastAPI is."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from plait.inference.serving import http
from plait.inference.serving.bodies import Served
from plait.inference.serving.job import Job, Told
from plait.inference.serving.scheduler import Scheduler
from tests.unit.inference.models import built
from tests.unit.inference.words import Words

WAITING = 5


class Jobs(Scheduler):
    """A scheduler that is given jobs and decodes none; `tells` is called with each, on a thread of its own."""

    def __init__(self, tells: Callable[[Job], None] = lambda job: None) -> None:
        self.jobs: list[Job] = []
        self._tells, self._most_waiting, self._batches = tells, WAITING, []

    def submit(self, *jobs: Job) -> None:
        self.jobs += jobs
        for job in jobs:
            threading.Thread(target=self._tells, args=(job,), daemon=True).start()


def app_of(jobs: Jobs, words: Any = None) -> Any:
    return http.app_of(Served("tiny", built(layers=1), words or Words(), 64), jobs)


async def asked(app: Any, body: dict[str, Any] | None, *, goes_after: float | None = None) -> list[dict[str, Any]]:
    """What the client gets; it goes after so many seconds, if it does. Without a body the request is for /health."""
    left = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop()
        if goes_after is None:
            await asyncio.Event().wait()
        if (left_seconds := began + (goes_after or 0.0) - time.monotonic()) > 0:  # a server's has it at once when it has come
            await asyncio.sleep(left_seconds)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    method, path = ("GET", "/health") if body is None else ("POST", "/v1/completions")
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": method, "path": path, "query_string": b"", "headers": headers}
    began = time.monotonic()
    await app(scope, receive, send)
    return sent


def status_and_text(sent: list[dict[str, Any]]) -> tuple[int, str]:
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


def test_a_client_that_is_gone_before_the_first_event() -> None:
    """One that is streamed to."""
    jobs = Jobs()
    asyncio.run(asked(app_of(jobs), {"prompt": ["a", "b"], "stream": True}, goes_after=0.0))
    assert len(jobs.jobs) == 2 and all(job.is_cancelled for job in jobs.jobs)


def test_a_client_that_goes_while_tokens_come_fast() -> None:
    """One that is not streamed to."""

    def tells(job: Job) -> None:
        end = time.monotonic() + 5
        while not job.is_cancelled and time.monotonic() < end:
            job.tell(Told(token=3))
            time.sleep(0.01)
        job.tell(Told(token=3, finish_reason="length"))

    jobs, began = Jobs(tells), time.monotonic()
    asyncio.run(asked(app_of(jobs), {"prompt": "a"}, goes_after=0.1))
    assert jobs.jobs[0].is_cancelled and time.monotonic() - began < 2


class Slow(Words):
    """A tokenizer that takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, text: str) -> Any:
        self.begun.set()
        assert self.may_end.wait(10)
        return super().__call__(text)


def test_others_are_answered_while_a_long_text_is_read() -> None:
    words = Slow()
    app = app_of(Jobs(lambda job: job.tell(Told(token=3, finish_reason="length"))), words)

    async def both() -> None:
        long = asyncio.create_task(asked(app, {"prompt": "a"}))
        while not words.begun.is_set():
            await asyncio.sleep(0.01)
        assert status_and_text(await asked(app, None))[0] == 200 and not long.done()
        words.may_end.set()
        assert status_and_text(await long)[0] == 200

    asyncio.run(asyncio.wait_for(both(), 10))


def test_too_many_prompts_are_refused_before_they_are_read() -> None:
    words = Slow()
    status, text = status_and_text(asyncio.run(asked(app_of(Jobs(), words), {"prompt": ["a"] * 6})))
    assert status == 429 and "6 prompts in one request, and 5 may wait; send fewer at once" in text and not words.begun.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_cut_off_at_the_end(stream: bool) -> None:
    """It is answered where nothing was sent, and nothing is raised, which uvicorn would log with a traceback."""
    jobs = Jobs()

    async def cut_off() -> list[dict[str, Any]]:
        task = asyncio.create_task(asked(http._UntilTheEnd(app_of(jobs)), {"prompt": "a", "stream": stream}))
        while not jobs.jobs:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        return await task

    status, text = status_and_text(asyncio.run(cut_off()))
    assert (status, text) == (200, "") if stream else (status == 503 and "the server was stopped" in text)
    assert jobs.jobs[0].is_cancelled
