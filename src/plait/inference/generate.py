"""`generate`: text generation on any layout, without an export or side effects on training.

Note [Together on all ranks]
    Ranks that gather parameters together must run the same number of forwards, although their
    requests differ. `Predictor.run` therefore runs idle forwards on ranks that have finished. For
    the same reason all ranks first check their arguments, and any error is raised on all of them
    before the first forward.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from plait._torch.units import leave_gathered
from plait.cluster.host_memory import free_host_bytes
from plait.cluster.small_messages import broadcast_object
from plait.comm.failures import run_on_all_ranks
from plait.errors import InputError
from plait.inference.capacity import (
    USABLE_SHARE,
    CacheDemand,
    cache_bytes,
    cache_layout_of,
    check_cache,
    check_positions,
    free_bytes,
    gathered_bytes,
    growing_bytes,
    is_sharded,
    offloaded_cache,
)
from plait.inference.decode import Decoder, OnToken
from plait.inference.generation_settings import GenerationSettings, settings_of
from plait.inference.predictor import Predictor, untouched
from plait.inference.requests import (
    Answer,
    Generation,
    GenerationRequest,
    check_count,
    check_room,
    checked_ids,
    text_after,
    token_ids,
)
from plait.inference.rope_by_length import group_requests, refuse_above_original, rope_by_length
from plait.model.adapters import adapter_type
from plait.sharded.cache import arguments_of, counts_tokens, requires_single_prefill, supports_cache
from plait.sharded.misuse import refuse_split_experts
from plait.sharded.model import ShardedModel
from plait.sizes import dtype_of, is_integer


def generate(
    sharded: ShardedModel,
    prompts: Any,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    seed: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    prefill_tokens: int | None = None,
    on_token: OnToken | None = None,
    **settings: Any,
) -> list[Generation]:
    """Generate a continuation of each prompt. Collective over all ranks.

    Each data-parallel rank passes its own prompts, which may be none. Within one model replica (tp,
    pp), the prompts of the first rank are used, and all ranks get the results. Sharded parameters
    are gathered once if they fit into memory, and otherwise in every forward. Training continues as
    if nothing had happened.

    Args:
        sharded: The model.
        prompts: One prompt or several: texts or conversations, which require a tokenizer, or token
            ids.
        tokenizer: A tokenizer of Transformers. If it is given, results also contain text.
        generation_config: GenerationConfig or dictionary. It overrides the model's own settings,
            and `settings` override it.
        seed: Seed of the first request; the next one has `seed + 1`, and so on. A list has a seed
            for each request. None chooses new seeds.
        batch_size: Number of requests that are decoded at the same time. None decodes all of them.
            Requests whose rotary frequencies depend on their length are decoded in separate
            batches.
        prefill_tokens: Largest number of tokens of each prompt in one forward. None reads prompts
            in a single forward, as is always done for models with a recurrent state and for models
            that attend in both directions.
        on_token: Function that is called as `on_token(request, token)` on the ranks that have the
            request.
        settings: Transformers' settings (`max_new_tokens`, `temperature`, `top_k`, `eos_token_id`,
            `stop_strings`, ...), see `inference.generation_settings`. `offload_cache=True`, which
            Transformers does not have, keeps keys and values in pinned host memory. Keys and values
            of a layer are copied to the GPU while the previous layer computes.

    Returns:
        The results, in the order of the prompts.

    Raises:
        InputError: A rank cannot serve the call. The error is raised on all ranks.
    """
    model = sharded.model
    mesh = sharded.mesh
    sharded.refuse_within("generate")

    def prepare() -> _PreparedCall:
        check_model(sharded)
        pad = getattr(tokenizer, "pad_token_id", None)
        checked = settings_of(model, settings, generation_config, pad=pad)
        if checked.stop_strings and tokenizer is None:
            raise InputError("stop_strings requires tokenizer= to decode the output")
        check_count("batch_size", batch_size)
        check_count("prefill_tokens", prefill_tokens)
        if on_token is not None and not callable(on_token):
            raise InputError(f"on_token = {on_token!r} must be a function of (request, token)")
        if checked.offload_cache:
            _check_offloaded_cache(sharded, use_cache=checked.use_cache)
        requests = _requests(checked_ids(model, token_ids(prompts, tokenizer)), checked, seed)
        _check_rope(sharded, requests, use_cache=checked.use_cache)
        fits = _gathered_model_fits(sharded, requests, batch_size, checked)
        return _PreparedCall(requests, checked, bytes([fits, on_token is not None]))

    # See Note [Together on all ranks].
    prepared, flags = run_on_all_ranks(
        prepare,
        attrgetter("flags"),
        device=mesh.device,
        activity="generate",
        error_class=InputError,
    )
    gathers = is_sharded(model)
    # Gathering is collective, so all ranks keep gathered parameters or none does.
    gathers_once = gathers and all(rank_flags[0] for rank_flags in flags)
    requests = requests_of_first_rank(sharded, prepared.requests)
    predictor = Predictor(sharded)
    # Each forward over a part of a prompt would reset a recurrent state.
    prefill_limit = None if requires_single_prefill(model) else prefill_tokens
    decoder = Decoder(
        sharded,
        predictor,
        prepared.settings,
        tokenizer=tokenizer,
        use_cache=prepared.settings.use_cache and _can_cache(sharded, requests),
        prefill_tokens=prefill_limit,
        on_token=on_token,
        any_callback=any(rank_flags[1] for rank_flags in flags),
    )
    answers = [Answer() for _ in requests]

    def forwards() -> Iterator[None]:
        lengths = [(len(request.token_ids), request.max_tokens_read) for request in requests]
        for batch in group_requests(rope_by_length(model), lengths, batch_size):
            batch_requests = [requests[index] for index in batch]
            batch_answers = [answers[index] for index in batch]
            yield from decoder.forwards(batch_requests, batch, batch_answers)

    with sharded.evaluating(), untouched(model, mesh.device), ExitStack() as stack:
        if gathers_once:
            stack.enter_context(leave_gathered(model))
        predictor.run(forwards(), independent=not gathers)

    generations = []
    for request, answer in zip(requests, answers, strict=True):
        generations.append(_generation(request, answer, tokenizer))
    return generations


@dataclass(frozen=True)
class _PreparedCall:
    """Checked arguments of a call on this rank."""

    requests: list[GenerationRequest]
    settings: GenerationSettings
    flags: bytes
    """Flags for the other ranks: all parameters may stay gathered; this rank has a callback."""


def check_model(sharded: ShardedModel) -> None:
    """Raise InputError if a model or its layout does not support generation."""
    model = sharded.model
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} has an encoder and a decoder; generate supports only"
            " decoder-only models (...ForCausalLM)"
        )
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and not can_generate():
        raise InputError(
            f"{type(model).__name__} has no language-model head; load its ...ForCausalLM class"
        )
    refuse_split_experts(sharded.parts, "generate")
    _refuse_other_adapters(model)
    if sharded.parts.hooks.transform:
        raise InputError(
            "generate passes its inputs to the model unchanged, but a technique of this layout must"
            " transform every micro-batch (for example to this rank's part of the sequence); use a"
            " layout without this technique"
        )


def _refuse_other_adapters(model: nn.Module) -> None:
    """Raise InputError if an active adapter of PEFT gives wrong results with a KV cache.

    With such an adapter, a token that is decoded alone gets other values than in a full forward
    over the text.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    if not configs:
        return
    active: Any = model.active_adapters
    # In Transformers' own classes it is a method, which does not know all active adapters.
    for name in configs if callable(active) else active:
        config = configs[name]
        kind = adapter_type(config)
        if getattr(config, "is_prompt_learning", False):
            raise InputError(
                f"generate: the adapter {name!r} of the kind {kind} puts"
                f" {config.num_virtual_tokens} virtual tokens before the prompt, which is not"
                " supported; use PEFT's own generate, or an adapter of the kind LORA"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise InputError(
                f"generate: the adapter {name!r} is active from certain tokens on"
                " (alora_invocation_tokens), which is not supported; use PEFT's own generate, or"
                " an adapter without them"
            )


def _requests(
    prompts: list[tuple[int, ...]], settings: GenerationSettings, seed: int | Sequence[int] | None
) -> list[GenerationRequest]:
    seeds = seed if isinstance(seed, Sequence) else [seed]
    for value in seeds:
        if value is not None and not (is_integer(value) and 0 <= value < 1 << 63):
            raise InputError(
                f"seed = {value!r} must be a whole number from 0 to 2**63 - 1, or a list of them"
            )
    if isinstance(seed, Sequence) and len(seed) != len(prompts):
        raise InputError(
            f"seed has {len(seed)} entries for {len(prompts)} prompts; pass one for each, or one"
            " number"
        )

    requests = []
    for index, ids in enumerate(prompts):
        new_tokens = check_room(len(ids), f"prompt {index}", settings)
        request_seed = _request_seed(seed, index) if settings.do_sample else None
        requests.append(GenerationRequest(ids, new_tokens, request_seed))
    return requests


def _request_seed(seed: int | Sequence[int] | None, index: int) -> int:
    if seed is None:
        return secrets.randbits(62)
    if isinstance(seed, Sequence):
        return seed[index]
    return seed + index


def _check_rope(
    sharded: ShardedModel, requests: Sequence[GenerationRequest], *, use_cache: bool
) -> None:
    """Raise InputError if the rotary frequencies of a request would differ from Transformers'."""
    rope = rope_by_length(sharded.model)
    if rope is None:
        return
    longest = max((request.max_tokens_read for request in requests), default=0)
    remedy = "ask for fewer new tokens, or shorten the prompt"
    if not rope.is_uniform:
        what = "generate: layers of several RoPE types are not supported for such requests"
        refuse_above_original(rope, longest, what, remedy)
    if not rope.rereads_tokens and use_cache and not _can_cache(sharded, requests):
        what = "generate: the model keeps no KV cache here, and recomputes keys and values"
        refuse_above_original(rope, longest, what, f"{remedy}; or use_cache=False")


def _check_offloaded_cache(sharded: ShardedModel, *, use_cache: bool) -> None:
    """Raise InputError if the KV cache cannot be kept in host memory."""
    if sharded.mesh.device.type == "cpu":
        raise InputError(
            "offload_cache: this model computes on the CPU, where keys and values are in host"
            " memory already; leave it out"
        )
    if sharded.pipeline is not None:
        raise InputError(
            "offload_cache: a pipeline stage cannot prefetch the keys and values of the layers of"
            " other stages; use tp, or pp = 1"
        )
    if not use_cache or not supports_cache(sharded.model):
        raise InputError(
            "offload_cache: the model keeps no keys and values in this call (use_cache); leave"
            " it out"
        )


def _gathered_model_fits(
    sharded: ShardedModel,
    requests: Sequence[GenerationRequest],
    batch_size: int | None,
    settings: GenerationSettings,
) -> bool:
    """Return True if all parameters of a sharded model fit into memory next to the KV cache.

    Raises:
        InputError: The KV cache does not fit, or a request exceeds the model's positions.
    """
    mesh = sharded.mesh
    longest = max((len(request.token_ids) + request.new_tokens for request in requests), default=0)
    check_positions(getattr(sharded.model, "config", None), longest)
    free = free_bytes(mesh.device, mesh.local_world_size)
    at_once = min(batch_size or len(requests), len(requests))
    compute: torch.dtype | None = None
    if sharded.config.precision.compute:
        compute = dtype_of(sharded.config.precision.compute)

    cache = 0
    if settings.use_cache:
        dtype = compute or next(sharded.model.parameters()).dtype
        max_tokens_read = max((request.max_tokens_read for request in requests), default=0)
        demand = CacheDemand(at_once, max_tokens_read, dtype.itemsize)
        cache = _cache_bytes(sharded, demand, longest, offload_cache=settings.offload_cache)
    check_cache(cache, free, at_once, longest)

    # Offloaded parameters do not stay on the device.
    if not is_sharded(sharded.model) or sharded.config.parameter_offload.device != "none":
        return False
    return free is None or gathered_bytes(sharded.model, compute) + cache <= USABLE_SHARE * free


def _cache_bytes(
    sharded: ShardedModel, demand: CacheDemand, longest: int, *, offload_cache: bool
) -> int:
    """Return the bytes of the KV cache on the device of this rank.

    Raises:
        InputError: The host memory is too small for an offloaded cache.
    """
    mesh = sharded.mesh
    layout = cache_layout_of(sharded.model, plan=sharded.config.tensor_parallel.plan)
    tp = mesh.layout.tp
    if not offload_cache:
        blocks = None if sharded.pipeline is None else sharded.parts.blocks
        cache = cache_bytes(layout, demand, tp=tp, blocks=blocks)
        return cache + growing_bytes(layout, demand, tp=tp)

    offloaded = offloaded_cache(layout, demand, tp=tp)
    free = free_host_bytes()
    if free is not None:
        free //= mesh.local_world_size
    check_cache(offloaded.pinned, free, demand.requests, longest, where="in host memory")
    return offloaded.device


def _can_cache(sharded: ShardedModel, requests: Sequence[GenerationRequest]) -> bool:
    """Return True if the model supports a cache that these requests can share."""
    model = sharded.model
    if not supports_cache(model):
        return False
    if sharded.pipeline is not None and not counts_tokens(model):
        return False
    # Prompts of several lengths are padded, and padding needs a mask.
    lengths = {len(request.token_ids) for request in requests}
    return "attention_mask" in arguments_of(model) or len(lengths) == 1


def requests_of_first_rank(
    sharded: ShardedModel, requests: list[GenerationRequest]
) -> list[GenerationRequest]:
    """Return the requests of the first rank of this model replica.

    Collective over the ranks of the replica (tp, pp).
    """
    mesh = sharded.mesh
    # First over the tensor-parallel ranks of the first stage, then from there to the other stages.
    for axis in ("tp", "pp"):
        group = mesh.group(axis)
        if group is not None and (axis == "pp" or mesh.coordinates["pp"] == 0):
            requests = broadcast_object(requests, group)
    return requests


def _generation(request: GenerationRequest, answer: Answer, tokenizer: Any) -> Generation:
    text = None
    if tokenizer is not None:
        text = text_after(tokenizer, request.token_ids, answer.token_ids, skip_special_tokens=True)
    return Generation(
        list(request.token_ids), answer.token_ids, answer.logprobs, answer.finish_reason, text
    )
