"""A Transformers configuration from the fields that a user wrote, as in `"model": {"config":
{"model_type": "llama", ...}}`.

Transformers takes any keyword and ignores what it does not know, so a misspelt field would train
another model. Here it is refused, with the nearest one that exists.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeGuard

from packaging.version import Version

from plait.errors import ConfigError, InputError, Problem, refuse
from plait.importing import require_extra

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OLDER_NAMES = {"rope_theta", "rope_scaling", "partial_rotary_factor", "attn_implementation"}
"""Fields that Transformers reads though no configuration class declares them."""
_DTYPES = ("dtype", "torch_dtype")


OLDEST_TRANSFORMERS = "5.17.0"
"""Oldest supported release of Transformers. In 5.0 tied weights are not shared in models that are
built on the meta device. With 5.10.1 models whose rotary frequencies depend on the length generated
other tokens.
"""


def require_transformers(what: str) -> None:
    """Raise an error if no supported release of Transformers is installed.

    Args:
        what: The field or option that needs Transformers, for the message.

    Raises:
        MissingExtraError: Transformers is not installed.
        InputError: Transformers is older than `OLDEST_TRANSFORMERS`.
    """
    require_extra(what, "hf", transformers="Hugging Face Transformers")
    installed = version("transformers")
    if Version(installed).release < Version(OLDEST_TRANSFORMERS).release:
        raise InputError(
            f"{what}: Transformers {installed} is installed, and Plait needs {OLDEST_TRANSFORMERS}"
            f" or newer; run pip install 'transformers>={OLDEST_TRANSFORMERS}'"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError with every field that the architecture `fields["model_type"]` does not
    have, or for one that Transformers does not have; InputError without Transformers.
    """
    require_transformers("model.config")
    from transformers import CONFIG_MAPPING

    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        near = get_close_matches(kind, CONFIG_MAPPING.keys(), n=1)
        remedy = f"use {near[0]!r}" if near else "use one that Transformers has, such as 'llama'"
        raise ConfigError(
            Problem(
                "model.config.model_type", kind, "Transformers has no such architecture", remedy
            )
        )
    known = known_fields(CONFIG_MAPPING[kind])
    problems = []
    for name, value in fields.items():
        if name in _DTYPES:
            problems.append(
                Problem(
                    f"model.config.{name}",
                    value,
                    "the type of the parameters has one place",
                    "set model.dtype",
                )
            )
        elif name not in known and name != "model_type":
            near = get_close_matches(name, known, n=1)
            remedy = f"use {near[0]!r}" if near else "leave it out"
            problems.append(
                Problem(
                    f"model.config.{name}",
                    value,
                    f"a {kind!r} configuration has no such field",
                    remedy,
                )
            )
    refuse(problems)


def described_config(fields: Mapping[str, Any], *, follow: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that `fields` describe. `follow` are values of fields that are not written,
    where the architecture has them. Raises ConfigError where Transformers refuses a value.
    """
    check_fields(fields)
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = fields["model_type"]
    known = known_fields(CONFIG_MAPPING[kind])
    written = {name: value for name, value in fields.items() if name != "model_type"}
    values = {name: value for name, value in follow.items() if name in known} | written
    check_sizes(values, "model.config.")
    _check_padding(values)
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:  # each configuration class validates in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        rule = lines[-1] if lines else type(error).__name__
        raise ConfigError(
            Problem(
                "model.config",
                None,
                f"Transformers refuses it: {rule}",
                "correct the field it names",
            )
        ) from error
    check_sizes(config.to_dict(), "model.config.")
    return config


_LARGEST = 2**31 - 1
_SIZES = (
    "hidden_size",
    "n_embd",
    "d_model",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
)
"""Fields that count something a model has at least one of, as architectures name them."""
_SHARES = ("dropout", "_pdrop", "dropout_prob", "layerdrop")
"""Endings of the names of fields that are a probability."""


def check_sizes(fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for every number that no model can have: a size below 1, a dropout of 7, 4
    heads over 3 groups. Transformers builds such models, which fail later or train without their
    layers. `where` stands before the name of a field in the message.
    """
    refuse(_wrong_sizes(fields, where))


def _wrong_sizes(fields: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        shown = f"{where}{name}"
        if name in _SIZES and not 1 <= value <= _LARGEST:
            yield Problem(
                shown, value, f"must be 1 to {_LARGEST}", "use a size that a model can have"
            )
        elif name.endswith(_SHARES) and not 0 <= value <= 1:
            yield Problem(shown, value, "is a probability, from 0 to 1", "use for example 0.1")
        elif (
            isinstance(value, float)
            and not math.isfinite(value)
            and name.endswith(("_eps", "epsilon", "_theta", "_range"))
        ):
            yield Problem(shown, value, "must be a finite number", "write one")
        elif name == "rope_theta" and value <= 0:
            yield Problem(
                shown,
                value,
                "is the base of rotary positions, which is above 0",
                "use for example 10000",
            )
    heads = fields.get("num_attention_heads")
    groups = fields.get("num_key_value_heads")
    if _count(heads) and _count(groups) and heads % groups:
        rule = f"num_attention_heads is {heads} and {heads} % {groups} = {heads % groups}"
        works = ", ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
        yield Problem(
            f"{where}num_key_value_heads",
            groups,
            rule,
            f"use {works}" if len(works) < 100 else "use a number that divides it",
        )


def _check_padding(written: Mapping[str, Any]) -> None:
    rows = written.get("vocab_size")
    padding = written.get("pad_token_id")
    if _count(rows) and isinstance(padding, int) and padding >= rows:
        rule = f"the vocabulary has {rows} tokens, from 0 to {rows - 1}"
        raise ConfigError(Problem("model.config.pad_token_id", padding, rule, "use one of them"))


def _count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _LARGEST


def known_fields(config_class: type[PreTrainedConfig]) -> set[str]:
    """Names that a configuration class reads."""
    from transformers import PreTrainedConfig

    found = set(config_class.attribute_map) | _OLDER_NAMES
    for known in (config_class, PreTrainedConfig):
        parameters = inspect.signature(known.__init__).parameters.values()
        found |= {
            parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD
        }
    return found - {"self"}
