"""Bodies of requests as OpenAI's API has them, and what of them the model is asked.

Fields that change the answer and are not supported are refused by name; fields that only name a caller are taken and not used.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from plait.errors import InputError
from plait.inference.capacity import check_positions
from plait.inference.requests import Request, checked_ids, ids_of, token_ids
from plait.inference.rope_by_length import refuse_served, rope_by_length
from plait.inference.settings import Settings, settings_of

COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat may go on to the limit."""
MOST_BODY = 16 << 20
"""Bytes."""
MOST_STOPS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
}
"""Fields that are not supported, and the values besides null at which they change nothing."""


class Refused(Exception):
    """A request that is answered by an error in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.field, self.code = message, status, field, code

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}


StopString = Annotated[str, Field(min_length=1)]
RULES = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "must be a text of one character or more, or a list of such texts",
}
"""Of fields that take values of several types; pydantic's message is on one of them."""


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """What both endpoints take. Names are OpenAI's, and behind them those that other servers of open models add."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: StopString | list[StopString] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def count(self) -> int:
        """Of prompts."""
        return 1 if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)) else len(self.prompt)


class _Turn(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str | list[dict[str, Any]]
    name: str | None = None


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: Annotated[list[_Turn], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def count(self) -> int:
        """Of prompts."""
        return 1

    @property
    def conversation(self) -> list[dict[str, str]]:
        """For a chat template."""
        return [{"role": turn.role, "content": _text(turn.content, index)} for index, turn in enumerate(self.messages)]


def read_body(raw: bytes, kind: type[CompletionBody] | type[ChatBody]) -> CompletionBody | ChatBody:
    """Raises Refused for what is no such body."""
    if len(raw) > MOST_BODY:
        raise Refused(f"the body has {len(raw):,} bytes, and {MOST_BODY:,} may be sent", status=413)
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused("the body must be a JSON object")
    for name, values in NEUTRAL.items():
        value = fields.pop(name, None)
        if value is not None and not any((value == one and type(value) is type(one)) or _same_number(value, one) for one in values):
            raise Refused(f"{name} = {json.dumps(value)[:80]} is not supported by this server; leave it out", field=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        if field in RULES and field in fields:
            raise Refused(f"{field} = {json.dumps(fields[field])[:80]} {RULES[field]}", field=field) from None
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(f"{where}: {first['msg']}", field=field) from None


def _same_number(value: Any, one: Any) -> bool:
    numbers = (int, float)
    return (
        isinstance(value, numbers)
        and isinstance(one, numbers)
        and not isinstance(value, bool)
        and not isinstance(one, bool)
        and value == one
    )


def _text(content: str | list[dict[str, Any]], index: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"messages.{index}.content: this server takes text alone, not {part.get('type')!r}", field="messages")
    return "".join(part["text"] for part in content)


@dataclass(frozen=True)
class Served:
    """The model that is served."""

    name: str
    model: nn.Module
    tokenizer: Any
    most_tokens: int
    """Of a request, its prompt included."""


@dataclass(frozen=True)
class Asked:
    """One prompt of a body."""

    request: Request
    settings: Settings


def asked_of(body: CompletionBody | ChatBody, served: Served) -> list[Asked]:
    """What the model is asked, in the order of the prompts. Raises Refused, with the numbers, for what cannot be."""
    if body.model and body.model != served.name:
        raise Refused(
            f"the model {body.model!r} is not here; this server has {served.name!r}", status=404, field="model", code="model_not_found"
        )
    if len(body.stops) > MOST_STOPS:
        raise Refused(f"{len(body.stops)} stop strings, and {MOST_STOPS} may be given", field="stop")
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 63:
        raise Refused("seed must be a number of 64 bits", field="seed")
    if isinstance(body, ChatBody) and None not in (limits := {body.max_completion_tokens, body.max_tokens}) and len(limits) > 1:
        rule = "are two limits; give max_completion_tokens alone"
        raise Refused(f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} {rule}", field="max_tokens")
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    try:
        if isinstance(body, ChatBody):
            prompts, limit = _of_conversation(body, served), body.max_completion_tokens or body.max_tokens
        else:
            prompts, limit = token_ids(body.prompt, served.tokenizer), body.max_tokens or COMPLETION_TOKENS
        if not prompts:
            raise Refused("prompt: there is none", field="prompt")
        checked_ids(served.model, prompts)
        return [_asked(ids, index, body, limit, given, served) for index, ids in enumerate(prompts)]
    except InputError as error:
        raise Refused(str(error)) from None


def _of_conversation(body: ChatBody, served: Served) -> list[tuple[int, ...]]:
    try:
        return [ids_of(body.conversation, "messages", served.tokenizer)]
    except InputError as error:
        raise Refused(str(error), field="messages") from None


def _asked(ids: tuple[int, ...], index: int, body: Body, limit: int | None, given: dict[str, Any], served: Served) -> Asked:
    new = limit if limit is not None else served.most_tokens - len(ids)
    together = len(ids) + max(new, 1)
    if together > served.most_tokens:
        raise Refused(
            f"the prompt has {len(ids):,} tokens and {max(new, 1):,} may be added, {together:,} together; this server keeps keys "
            f"and values of {served.most_tokens:,} tokens of a request (--max-model-len): ask for fewer tokens, or shorten the prompt",
            code="context_length_exceeded",
        )
    check_positions(getattr(served.model, "config", None), len(ids) + new)
    refuse_served(rope_by_length(served.model), len(ids) + new)
    arguments = {**given, "max_new_tokens": new, "stop_strings": list(body.stops) or None}
    settings = settings_of(served.model, arguments, pad=getattr(served.tokenizer, "pad_token_id", None))
    seed = None
    if settings.do_sample:
        seed = secrets.randbits(62) if body.seed is None else (body.seed + index) % (1 << 63)
    return Asked(Request(ids, new, seed), settings)


Endpoint = Literal["completion", "chat"]
