"""Transformers configurations that a user describes by their fields.

An example is `"model": {"config": {"model_type": "llama", ...}}`. Transformers accepts any keyword
and ignores unknown ones, so a misspelt field would train another model. Here an unknown field is an
error that suggests the closest existing name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeGuard

from packaging.version import Version

from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.importing import require_extra
from plait.names import similar_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OLDEST_TRANSFORMERS = "5.17.0"
"""Oldest supported release of Transformers.

In 5.0 tied weights are not shared in models that are built on the meta device. With 5.10.1 models
whose rotary frequencies depend on the length generated wrong tokens.
"""

_LEGACY_FIELDS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "attn_implementation"}
"""Fields that Transformers reads although no configuration class declares them."""
_DTYPES = ("dtype", "torch_dtype")

_LARGEST_SIZE = 2**31 - 1
_SIZE_FIELDS = (
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
"""Fields whose value is at least 1 in every model, under the names that architectures use."""
_PROBABILITY_ENDINGS = ("dropout", "_pdrop", "dropout_prob", "layerdrop")
_FINITE_ENDINGS = ("_eps", "epsilon", "_theta", "_range")


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
    # Compared without suffixes, so that a development version counts as its release.
    if Version(installed).release < Version(OLDEST_TRANSFORMERS).release:
        raise InputError(
            f"{what}: Transformers {installed} is installed, and Plait needs {OLDEST_TRANSFORMERS}"
            f" or newer; run pip install 'transformers>={OLDEST_TRANSFORMERS}'"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise an error for fields that the architecture `fields["model_type"]` does not have.

    Args:
        fields: Fields of a configuration, with `model_type`.

    Raises:
        ConfigError: Transformers has no such architecture, or the architecture does not have some
            of the fields. The error lists all of them.
        InputError: No supported release of Transformers is installed.
    """
    require_transformers("model.config")
    from transformers import CONFIG_MAPPING

    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        closest = similar_names(kind, CONFIG_MAPPING)
        remedy = "use one that Transformers has, such as 'llama'"
        if closest:
            remedy = f"use {closest[0]!r}"
        rule = "Transformers has no such architecture"
        raise ConfigError(Problem("model.config.model_type", kind, rule, remedy))

    known = known_fields(CONFIG_MAPPING[kind])
    problems = []
    for name, value in fields.items():
        if name in _DTYPES:
            rule = "the dtype of the parameters is set in one place"
            problems.append(Problem(f"model.config.{name}", value, rule, "set model.dtype"))
        elif name not in known and name != "model_type":
            closest = similar_names(name, known)
            remedy = f"use {closest[0]!r}" if closest else "leave it out"
            rule = f"a {kind!r} configuration has no such field"
            problems.append(Problem(f"model.config.{name}", value, rule, remedy))
    raise_problems(problems)


def described_config(fields: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> PreTrainedConfig:
    """Create the configuration that a user describes.

    Args:
        fields: Fields of the configuration, with `model_type`.
        defaults: Values of fields that the user did not set, e.g. from a tokenizer. Those that the
            architecture does not have are ignored.

    Raises:
        ConfigError: Transformers does not accept the values, or no model can have them.
        InputError: No supported release of Transformers is installed.
    """
    check_fields(fields)
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = fields["model_type"]
    known = known_fields(CONFIG_MAPPING[kind])
    values = {name: value for name, value in defaults.items() if name in known}
    values |= {name: value for name, value in fields.items() if name != "model_type"}
    check_sizes(values, "model.config.")
    _check_padding(values)
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:  # each configuration class validates in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        rule = f"Transformers refuses it: {reason}"
        raise ConfigError(
            Problem("model.config", None, rule, "correct the field it names")
        ) from error

    # Once more, because the configuration class computes fields that were not set.
    check_sizes(config.to_dict(), "model.config.")
    return config


def check_sizes(fields: Mapping[str, Any], where: str) -> None:
    """Raise an error for sizes that are not valid in any model.

    Examples are a size below 1, a dropout of 7 and 4 heads in 3 groups. Transformers builds such
    models, which fail later or train without their layers.

    Args:
        fields: Fields of a configuration.
        where: Prefix of the field names in the message.

    Raises:
        ConfigError: A size is not valid. The error lists all such sizes.
    """
    raise_problems(_size_problems(fields, where))


def _size_problems(fields: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for name, value in fields.items():
        if not isinstance(value, bool) and isinstance(value, int | float):
            yield from _number_problems(name, value, where)

    heads = fields.get("num_attention_heads")
    groups = fields.get("num_key_value_heads")
    if _is_count(heads) and _is_count(groups) and heads % groups:
        rule = f"num_attention_heads is {heads} and {heads} % {groups} = {heads % groups}"
        divisors = ", ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
        remedy = f"use {divisors}" if len(divisors) < 100 else "use a number that divides it"
        yield Problem(f"{where}num_key_value_heads", groups, rule, remedy)


def _number_problems(name: str, value: int | float, where: str) -> Iterator[Problem]:
    field = f"{where}{name}"
    if name in _SIZE_FIELDS and not 1 <= value <= _LARGEST_SIZE:
        rule = f"must be 1 to {_LARGEST_SIZE}"
        yield Problem(field, value, rule, "use a size that a model can have")
    elif name.endswith(_PROBABILITY_ENDINGS) and not 0 <= value <= 1:
        yield Problem(field, value, "is a probability, from 0 to 1", "use for example 0.1")
    elif isinstance(value, float) and not math.isfinite(value) and name.endswith(_FINITE_ENDINGS):
        yield Problem(field, value, "must be a finite number", "write one")
    elif name == "rope_theta" and value <= 0:
        rule = "is the base of rotary positions, which is above 0"
        yield Problem(field, value, rule, "use for example 10000")


def _check_padding(fields: Mapping[str, Any]) -> None:
    rows = fields.get("vocab_size")
    padding = fields.get("pad_token_id")
    if _is_count(rows) and isinstance(padding, int) and padding >= rows:
        rule = f"the vocabulary has {rows} tokens, from 0 to {rows - 1}"
        raise ConfigError(Problem("model.config.pad_token_id", padding, rule, "use one of them"))


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _LARGEST_SIZE


def known_fields(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the names of the fields that a configuration class reads."""
    from transformers import PreTrainedConfig

    names = set(config_class.attribute_map) | _LEGACY_FIELDS
    for declaring_class in (config_class, PreTrainedConfig):
        for parameter in inspect.signature(declaring_class.__init__).parameters.values():
            if parameter.kind != parameter.VAR_KEYWORD:
                names.add(parameter.name)
    return names - {"self"}
