"""`generate`: text from a model on any layout, with nothing exported and training left as it
was.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from plait._torch.units import kept_gathered
from plait.checkpoint.agreement import together
from plait.cluster.host_memory import free_host_bytes
from plait.errors import InputError
from plait.inference.capacity import (
    ROOM,
    check_cache,
    check_positions,
    free_bytes,
    gathered_bytes,
    is_sharded,
)
from plait.inference.decode import Decoder, OnToken
from plait.inference.dry_cache import kept_of
from plait.inference.kept import Asked, cache_bytes, growing_bytes, offloaded_cache
from plait.inference.peft_models import refuse_other_adapters
from plait.inference.predictor import Predictor
from plait.inference.requests import (
    Answer,
    Generation,
    Request,
    check_count,
    check_room,
    checked_ids,
    token_ids,
)
from plait.inference.rope_by_length import groups, refuse_past, rope_by_length
from plait.inference.settings import Settings, settings_of
from plait.inference.text_stream import text_after
from plait.inference.untouched import untouched
from plait.sharded.cache import arguments_of, counts_tokens, reads_prompts_whole, takes_cache
from plait.sharded.misuse import refuse_split_experts
from plait.sharded.model import ShardedModel
from plait.units import dtype_of


def generate(
    sharded: ShardedModel,
    prompts: Any,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    seed: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    prefill_tokens: int | None = None,
    offload_cache: bool = False,
    on_token: OnToken | None = None,
    **settings: Any,
) -> list[Generation]:
    """What the model adds to each of `prompts`, in their order.

    `prompts` are this data-parallel rank's own, and may be none: texts or conversations (with
    `tokenizer`), or token ids. Of the ranks that hold parts of one model (tp, pp), the first one's
    are taken. `settings` are Transformers' (`max_new_tokens`, `temperature`, `top_k`,
    `eos_token_id`, `stop_strings` ...), see `inference.settings`. A request draws from a generator
    of its own: the first of seed `seed`, the next of `seed + 1`; or `seed` has one for each; None
    takes new ones. `batch_size` requests are decoded at once (all), and prompts are read in pieces
    of `prefill_tokens` (whole, as those of a model with a recurrent state always are, and of one
    that attends in both directions). Requests that a rotary embedding gives other frequencies by
    their length are decoded in batches of their own. `offload_cache` keeps keys and values in
    pinned host memory; each layer's come to the GPU while the layer before computes.
    `on_token(request, token)` is called on the ranks that have the request.

    Parameters that are sharded are gathered once where they fit, and in every forward elsewhere.
    Training goes on as if nothing had happened. Collective over all ranks. Raises InputError, on
    all of them, for what one of them cannot do.
    """
    model = sharded.model
    mesh = sharded.mesh
    sharded.refuse_within("generate")

    def prepared() -> tuple[list[Request], Settings, bytes]:
        check_model(sharded)
        found = settings_of(
            model, settings, generation_config, pad=getattr(tokenizer, "pad_token_id", None)
        )
        if found.stop_strings and tokenizer is None:
            raise InputError("stop_strings needs tokenizer=, to see what tokens say")
        check_count("batch_size", batch_size)
        check_count("prefill_tokens", prefill_tokens)
        if on_token is not None and not callable(on_token):
            raise InputError(f"on_token = {on_token!r} must be a function of (request, token)")
        if offload_cache:
            _check_offloaded(sharded, use_cache=found.use_cache)
        requests = _requests(checked_ids(model, token_ids(prompts, tokenizer)), found, seed)
        _check_rope(sharded, requests, use_cache=found.use_cache)
        holds = _fits(
            sharded, requests, batch_size, use_cache=found.use_cache, offload_cache=offload_cache
        )
        return requests, found, bytes([holds, on_token is not None])

    (requests, found, _), brought = together(
        prepared, lambda result: result[2], device=mesh.device, doing="generate", raising=InputError
    )
    gathers = is_sharded(model)
    holds = gathers and all(row[0] for row in brought)
    requests = of_first_rank(sharded, requests)
    use_cache = found.use_cache and _keeps(sharded, requests)
    predictor = Predictor(sharded)
    decoder = Decoder(
        sharded,
        predictor,
        found,
        tokenizer=tokenizer,
        use_cache=use_cache,
        offload_cache=offload_cache,
        prefill_tokens=None if reads_prompts_whole(model) else prefill_tokens,
        on_token=on_token,
        tells=any(row[1] for row in brought),
    )
    answers = [Answer() for _ in requests]

    def work() -> Iterator[None]:
        size = batch_size or len(requests) or 1
        for group in groups(
            rope_by_length(model),
            [(len(request.token_ids), request.most_seen) for request in requests],
        ):
            for first in range(0, len(group), size):
                some = group[first : first + size]
                yield from decoder.forwards(
                    [requests[at] for at in some], some, [answers[at] for at in some]
                )

    with sharded.evaluating(), untouched(model, mesh.device), ExitStack() as stack:
        if holds:
            stack.enter_context(kept_gathered(model))
        predictor.run(work(), apart=not gathers)
    return [
        _generation(request, answer, tokenizer)
        for request, answer in zip(requests, answers, strict=True)
    ]


def check_model(sharded: ShardedModel) -> None:
    """Raise InputError for a model or a layout that does not go on from texts."""
    model = sharded.model
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} has an encoder and a decoder; generate is for models that go"
            " on from a text"
        )
    can = getattr(model, "can_generate", None)
    if callable(can) and not can():
        raise InputError(
            f"{type(model).__name__} has no head for the next token; load its ...ForCausalLM class"
        )
    refuse_split_experts(sharded.parts, "generate")
    refuse_other_adapters(model)
    if sharded.parts.hooks.transform:
        raise InputError(
            "generate: a technique of this layout changes every micro-batch (its part of the"
            " sequence); use a layout without it"
        )


def _requests(
    prompts: list[tuple[int, ...]], settings: Settings, seed: int | Sequence[int] | None
) -> list[Request]:
    for one in seed if isinstance(seed, Sequence) else [seed]:
        if one is not None and (
            isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 1 << 63
        ):
            raise InputError(
                f"seed = {one!r} must be a whole number from 0 to 2**63 - 1, or a list of them"
            )
    if isinstance(seed, Sequence) and len(seed) != len(prompts):
        raise InputError(
            f"seed has {len(seed)} entries for {len(prompts)} prompts; give one for each, or one"
            " number"
        )
    found = []
    for index, ids in enumerate(prompts):
        new = check_room(len(ids), f"prompt {index}", settings)
        own = None
        if settings.do_sample:
            own = (
                secrets.randbits(62)
                if seed is None
                else seed[index]
                if isinstance(seed, Sequence)
                else seed + index
            )
        found.append(Request(ids, new, own))
    return found


def _check_rope(sharded: ShardedModel, requests: Sequence[Request], *, use_cache: bool) -> None:
    """Raise InputError where a request gets other frequencies of a rotary embedding than
    Transformers gives it.
    """
    rope = rope_by_length(sharded.model)
    if rope is None:
        return
    longest = max((request.most_seen for request in requests), default=0)
    remedy = "ask for fewer new tokens, or shorten the prompt"
    if not rope.is_one:
        refuse_past(
            rope,
            longest,
            "generate: layers of several RoPE types are not known to be right",
            remedy,
        )
    if not rope.reads_anew and use_cache and not _keeps(sharded, requests):
        what = "generate: the model keeps no keys and values here, and computes them anew"
        refuse_past(rope, longest, what, f"{remedy}; or use_cache=False")


def _check_offloaded(sharded: ShardedModel, *, use_cache: bool) -> None:
    """Raise InputError where keys and values cannot be kept on the host."""
    if sharded.mesh.device.type == "cpu":
        raise InputError(
            "offload_cache: this model computes on the CPU, where keys and values are in host"
            " memory already; leave it out"
        )
    if sharded.pipeline is not None:
        raise InputError(
            "offload_cache: stages of a pipeline keep the layers of their own alone, and cannot"
            " bring the next; use tp, or pp = 1"
        )
    if not use_cache or not takes_cache(sharded.model):
        raise InputError(
            "offload_cache: the model keeps no keys and values in this call (use_cache); leave"
            " it out"
        )


def _fits(
    sharded: ShardedModel,
    requests: Sequence[Request],
    batch_size: int | None,
    *,
    use_cache: bool,
    offload_cache: bool,
) -> bool:
    """Whether all parameters may stay gathered. Raises InputError where keys and values do not
    fit.
    """
    config = getattr(sharded.model, "config", None)
    mesh = sharded.mesh
    lengths = [len(request.token_ids) + request.new_tokens for request in requests]
    longest = max(lengths, default=0)
    check_positions(config, longest)
    free = free_bytes(mesh.device, mesh.ranks_here)
    at_once = min(batch_size or len(requests), len(requests))
    compute = (
        dtype_of(sharded.config.precision.compute) if sharded.config.precision.compute else None
    )
    dtype = compute or next(sharded.model.parameters()).dtype
    keys = 0
    tp = mesh.layout.tp
    if use_cache:
        kept = kept_of(sharded.model, plan=sharded.config.tensor_parallel.plan)
        asked = Asked(
            at_once, max((request.most_seen for request in requests), default=0), dtype.itemsize
        )
        keys = cache_bytes(
            kept, asked, tp=tp, blocks=None if sharded.pipeline is None else sharded.parts.blocks
        )
        if offload_cache:
            waiting = offloaded_cache(kept, asked, tp=tp)
            free_on_host = free_host_bytes()
            on_host = None if free_on_host is None else free_on_host // mesh.ranks_here
            check_cache(waiting.pinned, on_host, at_once, longest, where="in host memory")
            keys = waiting.device
        else:
            keys += growing_bytes(kept, asked, tp=tp)
    check_cache(keys, free, at_once, longest)
    if not is_sharded(sharded.model) or sharded.config.parameter_offload.device != "none":
        return False
    return free is None or gathered_bytes(sharded.model, compute) + keys <= ROOM * free


def _keeps(sharded: ShardedModel, requests: Sequence[Request]) -> bool:
    """Whether the model takes a cache, and requests of several lengths with one."""
    model = sharded.model
    if not takes_cache(model) or (sharded.pipeline is not None and not counts_tokens(model)):
        return False
    return (
        "attention_mask" in arguments_of(model)
        or len({len(request.token_ids) for request in requests}) == 1
    )


def of_first_rank(sharded: ShardedModel, requests: list[Request]) -> list[Request]:
    """The requests of the first of the ranks that hold parts of one model. Collective over them."""
    box = [requests]
    mesh = sharded.mesh
    for axis in ("tp", "pp"):
        if (group := mesh.group(axis)) is not None and (
            axis == "pp" or mesh.coordinates["pp"] == 0
        ):
            dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def _generation(request: Request, answer: Answer, tokenizer: Any) -> Generation:
    text = None
    if tokenizer is not None:
        text = text_after(tokenizer, request.token_ids, answer.token_ids, skip_special_tokens=True)
    return Generation(
        list(request.token_ids), answer.token_ids, answer.logprobs, answer.finish_reason, text
    )
