"""The endpoint: FastAPI's routes over a scheduler, on uvicorn. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from plait.errors import InputError
from plait.inference.daemon_threads import DaemonThreads
from plait.inference.serving.answers import Answer, Choice, StoppedText
from plait.inference.serving.bodies import MOST_BODY, Asked, ChatBody, CompletionBody, Endpoint, Refused, Served, asked_of, read_body
from plait.inference.serving.job import Job, Told
from plait.inference.serving.scheduler import Full, Scheduler

LOOK_SECONDS = 0.25
"""How often it is asked whether a client that is not streamed to is still there."""
GRACE_SECONDS = 10
"""For requests that run when the server is told to end."""
ANSWER_SECONDS = 2
"""More, for telling those that still run then."""
READERS = 4
"""Threads that make token ids of bodies. One of 16 MiB takes a minute, in which other clients are answered."""


class _Running:
    """The jobs of one body, whose tokens come from the scheduler's thread."""

    def __init__(
        self, asked: list[Asked], body: CompletionBody | ChatBody, endpoint: Endpoint, served: Served, scheduler: Scheduler
    ) -> None:
        """`asked`: of the body. Raises InputError where they cannot wait."""
        loop, self._told = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Told]]()

        def teller(index: int) -> Any:
            def tell(told: Told) -> None:
                with suppress(RuntimeError):  # the loop has ended with the server
                    loop.call_soon_threadsafe(self._told.put_nowait, (index, told))

            return tell

        self._jobs = [Job(one.request, one.settings, teller(index)) for index, one in enumerate(asked)]
        choices = [Choice(index, StoppedText(served.tokenizer, body.stops), len(one.request.token_ids)) for index, one in enumerate(asked)]
        self.answer = Answer(endpoint, served.name, choices)
        scheduler.submit(*self._jobs)

    def cancel(self) -> None:
        """Nobody waits for the answer."""
        for job in self._jobs:
            job.cancel()

    async def parts(self, client: Request) -> AsyncIterator[tuple[Choice, str] | None]:
        """(choice, new text) until all have ended; None now and then. Raises Refused where one fails."""
        left, look_at = len(self._jobs), 0.0
        while left:
            if time.monotonic() >= look_at:  # also while tokens come faster than that
                if await client.is_disconnected():
                    self.cancel()
                    return
                look_at = time.monotonic() + LOOK_SECONDS
            try:
                index, told = await asyncio.wait_for(self._told.get(), LOOK_SECONDS)
            except TimeoutError:
                yield None
                continue
            if told.error:
                self.cancel()
                raise Refused(told.error, status=500)
            left -= bool(told.finish_reason)
            choice = self.answer.choices[index]
            yield choice, choice.add(told)


def app_of(served: Served, scheduler: Scheduler) -> FastAPI:
    """The routes of a model."""
    readers = DaemonThreads(READERS, "plait-requests")
    app = FastAPI(title="plait serve", openapi_url=None, docs_url=None, redoc_url=None)
    # A page that a browser shows may send requests to loopback under a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]", "testserver"])

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return JSONResponse(error.body, status_code=error.status)

    @app.exception_handler(HTTPException)
    async def no_such(request: Request, error: HTTPException) -> Response:
        message = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
        told = Refused(message.get(error.status_code, str(error.detail)), status=error.status_code)
        return JSONResponse(told.body, status_code=error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:  # in the middle of its body; nobody reads this
        return Response(status_code=400)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": scheduler.running}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": served.name, "object": "model", "created": 0, "owned_by": "plait", "max_model_len": served.most_tokens}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _body(request, CompletionBody)
        return await _respond(request, body, "completion", served, scheduler, readers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _body(request, ChatBody)
        return await _respond(request, body, "chat", served, scheduler, readers)

    return app


async def _body(request: Request, kind: type[CompletionBody] | type[ChatBody]) -> CompletionBody | ChatBody:
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise Refused("the body must be sent as application/json", status=415)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BODY:
            break
    return read_body(bytes(raw), kind)


async def _respond(
    request: Request, body: CompletionBody | ChatBody, endpoint: Endpoint, served: Served, scheduler: Scheduler, readers: DaemonThreads
) -> Response:
    try:
        scheduler.check_count(body.count)
        asked = await asyncio.wrap_future(readers.submit(asked_of, body, served))
        running = _Running(asked, body, endpoint, served, scheduler)
    except Full as error:
        raise Refused(str(error), status=429) from None
    except InputError as error:
        raise Refused(str(error), status=503) from None
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_events(running, request, usage=usage), media_type="text/event-stream")
    try:
        async for _ in running.parts(request):
            pass
    finally:
        running.cancel()
    return JSONResponse(running.answer.full())


async def _events(running: _Running, request: Request, *, usage: bool) -> AsyncIterator[str]:
    answer = running.answer
    try:
        for choice in answer.choices:
            if (first := answer.begins(choice)) is not None:
                yield _event(first)
        async for new in running.parts(request):
            if new is not None and (part := answer.part(*new)) is not None:
                yield _event(part)
        if usage:
            yield _event(answer.last())
        yield "data: [DONE]\n\n"
    except Refused as error:
        yield _event(error.body)
    finally:
        running.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _UntilTheEnd:
    """An app whose requests uvicorn cancels when they have had their time: bodies that have not come, and clients that do not read. They
    get an answer where there was none, and the log gets no traceback."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        has_begun = False

        async def sent(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            if not has_begun:
                error = Refused("the server was stopped", status=503)
                await JSONResponse(error.body, status_code=error.status)(scope, receive, send)


class _Server(uvicorn.Server):
    """Ends by itself on SIGTERM and Ctrl-C, with exit code 0: uvicorn's would end the process by the signal."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests that still run after GRACE_SECONDS are told so; uvicorn alone would break their connections."""

        async def stop() -> None:
            await asyncio.sleep(GRACE_SECONDS)
            threading.Thread(target=self._scheduler.stop, daemon=True).start()  # it waits for a forward to end

        late = asyncio.create_task(stop())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    @contextmanager
    def capture_signals(self) -> Any:
        """See above."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listening(port: int) -> socket.socket:
    """A socket on loopback; port 0 is a free one. Raises InputError where it is taken."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
        made.listen(1024)  # from now on clients wait, until requests are answered
    except OSError as error:
        made.close()
        raise InputError(f"--port {port}: {error.strerror}; give another one, or 0 for a free one") from None
    return made


def serve(app: FastAPI, on: socket.socket, scheduler: Scheduler) -> None:
    """Until SIGTERM or Ctrl-C. Requests that run get `GRACE_SECONDS`, and then an error."""
    most = GRACE_SECONDS + ANSWER_SECONDS
    config = uvicorn.Config(_UntilTheEnd(app), log_level="warning", lifespan="off", timeout_graceful_shutdown=most, access_log=False)
    _Server(config, scheduler).run(sockets=[on])
