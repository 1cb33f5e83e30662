"""How tokens are chosen and when a request ends: Transformers' names, with Transformers'
precedence.

Arguments of the call come before `generation_config=`, that before the model's own
`generation_config`, that before the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from plait.errors import InputError
from plait.inference.vocabulary import tokens_of_model

NEW_TOKENS = 128
"""Where neither the call nor the model's generation_config says how many."""
TOP_K = 50
"""Of sampling where nothing says another: Transformers' default."""
LEAST = 1e-30
MOST = 1e30
"""Of what logits are divided and multiplied by: they stay numbers of float32."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""What only a draw uses."""
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "guidance_scale": 1,
    "renormalize_logits": False,
}
"""Values of settings that are not supported, at which they change nothing; besides None, False, 0
and empty ones.
"""
UNRELATED = frozenset(
    {
        *(
            "bos_token_id",
            "decoder_start_token_id",
            "transformers_version",
            "cache_implementation",
            "cache_config",
            "return_legacy_cache",
        ),
        *("early_stopping", "length_penalty", "diversity_penalty"),
        *(
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_lookbehind",
        ),
        *(
            "target_lookbehind",
            "assistant_early_exit",
            "max_matching_ngram_size",
            "prompt_lookup_num_tokens",
            "is_assistant",
        ),
        *("compile_config", "disable_compile", "prefill_chunk_size", "remove_invalid_values"),
        *(
            "return_dict_in_generate",
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "output_logits",
        ),
    }
)
"""Settings in files of models that change no token here: of beams, encoders, other caches and
drafts, and of what Transformers returns.
"""
AT_ZERO = frozenset({"forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "max_time"})
"""Settings that are not supported, and change tokens at 0 as well."""


@dataclass(frozen=True)
class Settings:
    """Of one call, for all of its requests."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    """Prompt and new tokens together; used where `max_new_tokens` is None."""
    min_length: int = 0
    """The same of the least; used where `min_new_tokens` is not given."""
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = TOP_K
    """0 for no limit."""
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    """Above 1: tokens of the prompt are likelier."""
    encoder_no_repeat_ngram_size: int = 0
    """Sequences of the prompt of that length are not repeated."""
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()
    """Each of them ends a request."""
    pad_token_id: int = 0
    stop_strings: tuple[str, ...] = ()
    """Each of them ends a request, and stays in its text."""
    use_cache: bool = True

    def new_tokens(self, prompt: int) -> int:
        """How many tokens a request with a prompt of that length may get."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return NEW_TOKENS if self.max_length is None else self.max_length - prompt


NAMES = tuple(field.name for field in fields(Settings))


def settings_of(
    model: nn.Module,
    arguments: Mapping[str, Any],
    generation_config: Any = None,
    *,
    pad: int | None = None,
) -> Settings:
    """The settings of a call. `arguments` are its own; `pad` is the tokenizer's token for padding,
    where nothing else says one.

    An argument of a setting that is not supported, at the value at which it changes nothing
    (`num_beams=1`), overrides the model's own. `temperature=0` is greedy, and a sampling argument
    of the call (`temperature`, `top_k`, `top_p` ...) samples unless it says `do_sample`. Raises
    InputError for a value out of range, an unknown name, or a setting that is not supported and
    would change tokens.
    """
    switched_off = {
        name for name, value in arguments.items() if name in NEUTRAL and value == NEUTRAL[name]
    }
    arguments = {name: value for name, value in arguments.items() if name not in switched_off}
    if unknown := [name for name in arguments if name not in NAMES]:
        if unknown[0] in NEUTRAL:
            name = unknown[0]
            raise InputError(
                f"{name} = {arguments[name]!r} is not supported by generate; leave it out, or give"
                f" {NEUTRAL[name]}"
            )
        raise InputError(f"generate has no setting `{unknown[0]}`; it has {', '.join(NAMES)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    found: dict[str, Any] = {}
    for whose, values in (
        ("the model's generation_config", _plain(getattr(model, "generation_config", None))),
        ("generation_config", _plain(generation_config)),
    ):
        _refuse_unsupported(
            {name: value for name, value in values.items() if name not in switched_off}, whose
        )
        found |= {name: value for name, value in values.items() if name in NAMES}
        if "max_length" in values and "max_new_tokens" not in values:
            found.pop("max_new_tokens", None)
    if "max_length" in given and "max_new_tokens" not in given:
        found.pop("max_new_tokens", None)
    found |= given
    if found.get("temperature") == 0:
        found |= {"do_sample": False, "temperature": 1.0}
    elif "do_sample" not in given and any(name in given for name in SAMPLING):
        found["do_sample"] = True
    for name in ("stop_strings", *_TOKENS):
        found[name] = _several(found.get(name))
    found["bad_words_ids"] = tuple(map(_several, _several(found.get("bad_words_ids"))))
    _check_types(found)
    if "min_new_tokens" in found:
        found.pop("min_length", None)
    tokens = tokens_of_model(model)
    _check_tokens(found, given, tokens)
    padding = (found.get("pad_token_id"), pad, *found["eos_token_id"])
    found["pad_token_id"] = next(
        (token for token in padding if token is not None and _is_token(token, tokens)), 0
    )
    settings = Settings(**found)
    _check(settings)
    return settings


_WHOLE = (
    *("max_new_tokens", "max_length", "min_length", "min_new_tokens", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "pad_token_id"),
)
_TOKENS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")


def _check_types(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if (
            name in _WHOLE
            and value is not None
            and (isinstance(value, bool) or not isinstance(value, int))
        ):
            raise InputError(f"{name} = {value!r} must be a whole number")
        numeric = value is None or (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
        if name in (*SAMPLING, "repetition_penalty", "encoder_repetition_penalty") and not numeric:
            raise InputError(f"{name} = {value!r} must be a number")
        if name in ("do_sample", "use_cache") and not isinstance(value, bool):
            raise InputError(f"{name} = {value!r} must be True or False")
    for value in found["stop_strings"]:
        if not isinstance(value, str) or not value:
            raise InputError(f"stop_strings: {value!r} is no text")
    for name, tokens in ((name, found[name]) for name in _TOKENS):
        for token in tokens:
            if type(token) is not int:
                raise InputError(f"{name}: {token!r} is no token id")
    for word in found["bad_words_ids"]:
        if not word or not all(type(token) is int for token in word):
            raise InputError(
                f"bad_words_ids: {list(word)!r} is no word; give a list of token ids for each, such"
                " as [[5, 7], [9]]"
            )


def _check_tokens(found: Mapping[str, Any], given: Mapping[str, Any], tokens: int | None) -> None:
    """Raise InputError for one that a model of so many tokens lacks. Of `eos_token_id` it is one
    that never comes, and padding of a model's files is left to others.
    """
    named = [
        (name, token)
        for name in ("suppress_tokens", "begin_suppress_tokens")
        for token in found[name]
    ]
    named += [("bad_words_ids", token) for word in found["bad_words_ids"] for token in word]
    named += [("pad_token_id", token) for name, token in given.items() if name == "pad_token_id"]
    for name, token in named:
        if not _is_token(token, tokens):
            last = "" if tokens is None else f" to {tokens - 1}"
            raise InputError(
                f"{name} has token {token}, and the model's tokens are 0{last}; leave it out, or"
                " give one of these"
            )


def _is_token(token: int, tokens: int | None) -> bool:
    return token >= 0 and (tokens is None or token < tokens)


def _plain(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise InputError(
            f"generation_config = {config!r} must be Transformers' GenerationConfig, or a"
            " dictionary of its settings"
        )
    values = config if isinstance(config, Mapping) else config.to_dict()
    return {
        str(name): value
        for name, value in values.items()
        if value is not None and not str(name).startswith("_")
    }


def _refuse_unsupported(values: Mapping[str, Any], whose: str) -> None:
    for name, value in values.items():
        changes = bool(value) or (name in AT_ZERO and value is not False and value == 0)
        if name in NAMES or name in UNRELATED or not changes or value == NEUTRAL.get(name):
            continue
        remedy = (
            f"pass {name}={NEUTRAL[name]} to do without, or leave it out"
            if name in NEUTRAL
            else "leave it out"
        )
        raise InputError(
            f"{whose}: {name} = {value!r} is not supported by generate and would change tokens;"
            f" {remedy}"
        )


def _several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


def _check(s: Settings) -> None:
    penalties = (
        ("repetition_penalty", s.repetition_penalty),
        ("encoder_repetition_penalty", s.encoder_repetition_penalty),
    )
    rules = (
        (
            "max_new_tokens",
            s.max_new_tokens,
            s.max_new_tokens is None or s.max_new_tokens >= 1,
            "at least 1",
        ),
        ("max_length", s.max_length, s.max_length is None or s.max_length >= 1, "at least 1"),
        ("min_length", s.min_length, s.min_length >= 0, "0 or more"),
        ("min_new_tokens", s.min_new_tokens, s.min_new_tokens >= 0, "0 or more"),
        ("temperature", s.temperature, s.temperature >= LEAST, f"0 (greedy), or at least {LEAST}"),
        ("top_k", s.top_k, s.top_k >= 0, "0 (no limit) or more"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "above 0, at most 1"),
        ("min_p", s.min_p, s.min_p is None or 0 <= s.min_p <= 1, "between 0 and 1"),
        ("typical_p", s.typical_p, 0 < s.typical_p <= 1, "above 0, at most 1"),
        *(
            (name, value, LEAST <= value <= MOST, f"from {LEAST} to {MOST} (1 is none)")
            for name, value in penalties
        ),
        (
            "no_repeat_ngram_size",
            s.no_repeat_ngram_size,
            s.no_repeat_ngram_size >= 0,
            "0 (none) or more",
        ),
        (
            "encoder_no_repeat_ngram_size",
            s.encoder_no_repeat_ngram_size,
            s.encoder_no_repeat_ngram_size >= 0,
            "0 (none) or more",
        ),
    )
    for name, value, right, rule in rules:
        if not right:
            raise InputError(f"{name} = {value!r} must be {rule}")
