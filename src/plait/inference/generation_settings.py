"""Settings of `generate`: how tokens are chosen, and when a request ends.

Note [Precedence of settings]
    Names and precedence are those of Transformers: arguments of the call override
    `generation_config=`, which overrides the model's own `generation_config`, which overrides the
    defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from plait.errors import InputError
from plait.sizes import is_integer

NEW_TOKENS = 128
"""Largest number of new tokens if neither the call nor the model's settings define it."""
TOP_K = 50
"""Default of `top_k`, which is Transformers' default."""
MIN_FACTOR = 1e-30
MAX_FACTOR = 1e30
"""Limits of factors of logits, so that results are finite float32 numbers."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that only sampling uses."""
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "guidance_scale": 1,
    "renormalize_logits": False,
}
"""Values at which settings that are not supported change nothing.

None, False, 0 and empty values change nothing as well, except for those in `EFFECTIVE_AT_ZERO`.
"""
UNRELATED = frozenset(
    {
        *("bos_token_id", "decoder_start_token_id", "transformers_version"),
        *("cache_implementation", "cache_config", "return_legacy_cache"),
        *("early_stopping", "length_penalty", "diversity_penalty"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_early_exit", "max_matching_ngram_size", "prompt_lookup_num_tokens"),
        *("is_assistant", "compile_config", "disable_compile", "prefill_chunk_size"),
        *("remove_invalid_values", "return_dict_in_generate", "output_attentions"),
        *("output_hidden_states", "output_scores", "output_logits"),
    }
)
"""Settings of model files that change no token here.

They concern beams, encoders, other caches, draft models, and what Transformers returns.
"""
EFFECTIVE_AT_ZERO = frozenset(
    {"forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "max_time"}
)
"""Settings that are not supported and change tokens at 0 as well."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one call, for all of its requests."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    """Largest length of prompt and new tokens. It is used if `max_new_tokens` is None."""
    min_length: int = 0
    """Smallest length of prompt and new tokens. It is used if `min_new_tokens` is not set."""
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = TOP_K
    """Number of most likely tokens that are sampled from; 0 for no limit."""
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    """Factor above 1 that makes tokens of the prompt more likely."""
    encoder_no_repeat_ngram_size: int = 0
    """Length of sequences of the prompt that are not repeated."""
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()
    """Tokens, each of which ends a request."""
    pad_token_id: int = 0
    stop_strings: tuple[str, ...] = ()
    """Texts, each of which ends a request. They stay in its text."""
    use_cache: bool = True
    offload_cache: bool = False
    """If True, keys and values are kept in pinned host memory. Transformers has no such setting."""

    def new_tokens(self, prompt: int) -> int:
        """Return how many tokens may be added to a prompt of `prompt` tokens."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return self.max_length - prompt
        return NEW_TOKENS


NAMES = tuple(field.name for field in fields(GenerationSettings))

_INTEGERS = (
    *("max_new_tokens", "max_length", "min_length", "min_new_tokens", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "pad_token_id"),
)
_NUMBERS = (*SAMPLING, "repetition_penalty", "encoder_repetition_penalty")
_FLAGS = ("do_sample", "use_cache", "offload_cache")
_TOKEN_LISTS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")


def settings_of(
    model: nn.Module,
    arguments: Mapping[str, Any],
    generation_config: Any = None,
    *,
    pad: int | None = None,
) -> GenerationSettings:
    """Return the settings of a call. See Note [Precedence of settings].

    A setting that is not supported is accepted only at its neutral value (`num_beams=1`), which
    overrides the model's own value. `temperature=0` means greedy decoding. A sampling argument of
    the call (`temperature`, `top_k`, `top_p`, ...) enables sampling unless `do_sample` is set.

    Args:
        model: The model, with its own `generation_config`.
        arguments: Arguments of the call.
        generation_config: Transformers' GenerationConfig, or a dictionary of its settings.
        pad: The tokenizer's padding token, which is used if no setting defines one.

    Raises:
        InputError: A value is out of range, a name is unknown, or a setting that would change
            tokens is not supported.
    """
    # A neutral argument overrides the model's own setting and has no other effect.
    neutral = {
        name for name, value in arguments.items() if name in NEUTRAL and value == NEUTRAL[name]
    }
    arguments = {name: value for name, value in arguments.items() if name not in neutral}
    _check_names(arguments)
    overrides = {name: value for name, value in arguments.items() if value is not None}

    configs = {
        "the model's generation_config": _set_values(getattr(model, "generation_config", None)),
        "generation_config": _set_values(generation_config),
    }
    values: dict[str, Any] = {}
    for source, config in configs.items():
        _refuse_unsupported(
            {name: value for name, value in config.items() if name not in neutral}, source
        )
        _override(values, {name: value for name, value in config.items() if name in NAMES})
    _override(values, overrides)

    # Transformers rejects a temperature of 0. Here it means greedy decoding.
    if values.get("temperature") == 0:
        values |= {"do_sample": False, "temperature": 1.0}
    elif "do_sample" not in overrides and any(name in overrides for name in SAMPLING):
        values["do_sample"] = True

    for name in ("stop_strings", *_TOKEN_LISTS):
        values[name] = _as_tuple(values.get(name))
    values["bad_words_ids"] = tuple(map(_as_tuple, _as_tuple(values.get("bad_words_ids"))))
    _check_types(values)
    # The limit of new tokens has precedence.
    if "min_new_tokens" in values:
        values.pop("min_length", None)

    vocabulary = tokens_of_model(model)
    _check_tokens(values, overrides, vocabulary)
    # The settings of a model's files may name a padding token that the model does not have.
    candidates = (values.get("pad_token_id"), pad, *values["eos_token_id"])
    values["pad_token_id"] = next(
        (token for token in candidates if token is not None and _is_token(token, vocabulary)), 0
    )
    settings = GenerationSettings(**values)
    _check_ranges(settings)
    return settings


def _check_names(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name in NAMES:
            continue
        if name in NEUTRAL:
            raise InputError(
                f"{name} = {value!r} is not supported by generate; leave it out, or pass"
                f" {NEUTRAL[name]}"
            )
        raise InputError(f"generate has no setting `{name}`; it has {', '.join(NAMES)}")


def _override(values: dict[str, Any], overriding: Mapping[str, Any]) -> None:
    """Update settings in place with overriding settings."""
    # `max_length` of a call must not be hidden by `max_new_tokens` of a model.
    if "max_length" in overriding and "max_new_tokens" not in overriding:
        values.pop("max_new_tokens", None)
    values.update(overriding)


def _check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _INTEGERS and value is not None and not is_integer(value):
            raise InputError(f"{name} = {value!r} must be a whole number")
        if name in _NUMBERS and value is not None and not _is_number(value):
            raise InputError(f"{name} = {value!r} must be a number")
        if name in _FLAGS and not isinstance(value, bool):
            raise InputError(f"{name} = {value!r} must be True or False")
    for value in values["stop_strings"]:
        if not isinstance(value, str) or not value:
            raise InputError(f"stop_strings: {value!r} must be a string that is not empty")
    for name in _TOKEN_LISTS:
        for token in values[name]:
            if type(token) is not int:
                raise InputError(f"{name}: {token!r} is not a token id")
    for word in values["bad_words_ids"]:
        if not word or not all(type(token) is int for token in word):
            raise InputError(
                f"bad_words_ids: {list(word)!r} is not a list of token ids; pass one list per word,"
                " such as [[5, 7], [9]]"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_tokens(
    values: Mapping[str, Any], arguments: Mapping[str, Any], vocabulary: int | None
) -> None:
    """Raise InputError if settings have token ids that are not in the model's vocabulary.

    `eos_token_id` is not checked, because a token outside the vocabulary is never chosen.
    `pad_token_id` is checked only if the call sets it. A wrong value in the model's files is
    replaced.
    """
    remedy = "leave it out, or use tokens of the model"
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        check_ids(values[name], name, vocabulary, remedy=remedy)
    for word in values["bad_words_ids"]:
        check_ids(word, "bad_words_ids", vocabulary, remedy=remedy)
    if "pad_token_id" in arguments:
        check_ids((arguments["pad_token_id"],), "pad_token_id", vocabulary, remedy=remedy)


def check_ids(
    token_ids: Sequence[int],
    name: str,
    size: int | None,
    *,
    owner: str = "model",
    remedy: str = "use the tokenizer of this model",
) -> None:
    """Raise InputError if a token is not in a vocabulary.

    Args:
        token_ids: The tokens.
        name: Name of the prompt or setting that has them, for the message.
        size: Size of the vocabulary, or None if it is unknown.
        owner: Owner of the vocabulary, for the message.
        remedy: Remedy, for the message.
    """
    # The smallest and the largest token represent all others.
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not _is_token(token, size):
            last = " and above" if size is None else f" to {size - 1}"
            raise InputError(
                f"{name} has token {token}, but the {owner}'s tokens are 0{last}; {remedy}"
            )


def _is_token(token: int, vocabulary: int | None) -> bool:
    return token >= 0 and (vocabulary is None or token < vocabulary)


def _set_values(config: Any) -> dict[str, Any]:
    """Return those settings of a GenerationConfig or dictionary that are not None."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise InputError(
            f"generation_config = {config!r} must be Transformers' GenerationConfig, or a"
            " dictionary of its settings"
        )
    values = config if isinstance(config, Mapping) else config.to_dict()
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if value is not None and not str(name).startswith("_"):
            settings[str(name)] = value
    return settings


def _refuse_unsupported(values: Mapping[str, Any], source: str) -> None:
    for name, value in values.items():
        if name in NAMES or name in UNRELATED or value == NEUTRAL.get(name):
            continue
        is_zero = value is not False and value == 0
        if not value and not (name in EFFECTIVE_AT_ZERO and is_zero):
            continue
        remedy = "leave it out"
        if name in NEUTRAL:
            neutral = NEUTRAL[name]
            remedy = f"set it to {neutral} there, or pass {name}={neutral} to generate"
        raise InputError(
            f"{source}: {name} = {value!r} is not supported by generate and would change tokens;"
            f" {remedy}"
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(value)
    return (value,)


def _check_ranges(s: GenerationSettings) -> None:
    factor = f"from {MIN_FACTOR} to {MAX_FACTOR} (1 is none)"
    valid_and_rule = {
        "max_new_tokens": (s.max_new_tokens is None or s.max_new_tokens >= 1, "at least 1"),
        "max_length": (s.max_length is None or s.max_length >= 1, "at least 1"),
        "min_length": (s.min_length >= 0, "0 or more"),
        "min_new_tokens": (s.min_new_tokens >= 0, "0 or more"),
        "temperature": (s.temperature >= MIN_FACTOR, f"0 (greedy), or at least {MIN_FACTOR}"),
        "top_k": (s.top_k >= 0, "0 (no limit) or more"),
        "top_p": (0 < s.top_p <= 1, "above 0, at most 1"),
        "min_p": (s.min_p is None or 0 <= s.min_p <= 1, "between 0 and 1"),
        "typical_p": (0 < s.typical_p <= 1, "above 0, at most 1"),
        "repetition_penalty": (MIN_FACTOR <= s.repetition_penalty <= MAX_FACTOR, factor),
        "encoder_repetition_penalty": (
            MIN_FACTOR <= s.encoder_repetition_penalty <= MAX_FACTOR,
            factor,
        ),
        "no_repeat_ngram_size": (s.no_repeat_ngram_size >= 0, "0 (none) or more"),
        "encoder_no_repeat_ngram_size": (s.encoder_no_repeat_ngram_size >= 0, "0 (none) or more"),
    }
    for name, (is_valid, rule) in valid_and_rule.items():
        if not is_valid:
            raise InputError(f"{name} = {getattr(s, name)!r} must be {rule}")


def tokens_of_model(model: nn.Module) -> int | None:
    """Return the number of rows of a model's embedding, or None if it is unknown.

    The last rows may be padding.
    """
    get_input_embeddings: Any = getattr(model, "get_input_embeddings", None)
    if not callable(get_input_embeddings):
        return None
    rows = getattr(get_input_embeddings(), "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def tokens_of_tokenizer(tokenizer: Any) -> int | None:
    """Return the highest token id of a tokenizer plus one, or None without a tokenizer.

    A vocabulary may skip token ids, so its length can be smaller.
    """
    if tokenizer is None:
        return None
    get_vocab: Any = getattr(tokenizer, "get_vocab", None)
    vocabulary = get_vocab() if callable(get_vocab) else {}
    if not vocabulary:
        return len(tokenizer)
    return max(len(tokenizer), max(vocabulary.values()) + 1)
