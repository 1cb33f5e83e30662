"""The endpoint: FastAPI's routes over a scheduler, on uvicorn. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
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
from plait.inference.serving.answers import Answer, Choice, StoppedText
from plait.inference.serving.bodies import MOST_BODY, ChatBody, CompletionBody, Endpoint, Refused, Served, asked_of, read_body
from plait.inference.serving.job import Job, Told
from plait.inference.serving.scheduler import Full, Scheduler

LOOK_SECONDS = 0.25
"""How often it is asked whether a client that is not streamed to is still there."""
GRACE_SECONDS = 10
"""For requests that run when the server is told to end."""


class _Running:
    """The jobs of one body, whose tokens come from the scheduler's thread."""

    def __init__(self, body: CompletionBody | ChatBody, endpoint: Endpoint, served: Served, scheduler: Scheduler) -> None:
        loop, self._told = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Told]]()

        def teller(index: int) -> Any:
            def tell(told: Told) -> None:
                with suppress(RuntimeError):  # the loop has ended with the server
                    loop.call_soon_threadsafe(self._told.put_nowait, (index, told))

            return tell

        asked = asked_of(body, served)
        self._jobs = [Job(one.request, one.settings, teller(index)) for index, one in enumerate(asked)]
        choices = [Choice(index, StoppedText(served.tokenizer, body.stops), len(one.request.token_ids)) for index, one in enumerate(asked)]
        self.answer = Answer(endpoint, served.name, choices)
        try:
            scheduler.submit(*self._jobs)
        except Full as error:
            raise Refused(str(error), status=429) from None
        except InputError as error:
            raise Refused(str(error), status=503) from None

    def cancel(self) -> None:
        """Nobody waits for the answer."""
        for job in self._jobs:
            job.cancel()

    async def parts(self, client: Request) -> AsyncIterator[tuple[Choice, str] | None]:
        """(choice, new text) until all have ended; None now and then. Raises Refused where one fails."""
        left = len(self._jobs)
        while left:
            try:
                index, told = await asyncio.wait_for(self._told.get(), LOOK_SECONDS)
            except TimeoutError:
                if await client.is_disconnected():
                    self.cancel()
                    return
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
        return await _respond(request, CompletionBody, "completion", served, scheduler)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _respond(request, ChatBody, "chat", served, scheduler)

    return app


async def _respond(
    request: Request, kind: type[CompletionBody] | type[ChatBody], endpoint: Endpoint, served: Served, scheduler: Scheduler
) -> Response:
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise Refused("the body must be sent as application/json", status=415)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BODY:
            break
    body = read_body(bytes(raw), kind)
    running = _Running(body, endpoint, served, scheduler)
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


class _Server(uvicorn.Server):
    """Ends by itself on SIGTERM and Ctrl-C, with exit code 0: uvicorn's would end the process by the signal."""

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


def serve(app: FastAPI, on: socket.socket) -> None:
    """Until SIGTERM or Ctrl-C. Requests that run get `GRACE_SECONDS`."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE_SECONDS, access_log=False)
    _Server(config).run(sockets=[on])
