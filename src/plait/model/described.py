"""A Transformers configuration from the fields that a user wrote, as in `"model": {"config": {"model_type": "llama", ...}}`.

Transformers takes any keyword and ignores what it does not know, so a misspelt field would train another model. Here it is refused, with
the nearest one that exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from plait.errors import ConfigError, InputError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OLDER_NAMES = {"rope_theta", "rope_scaling", "partial_rotary_factor", "attn_implementation"}
"""Fields that Transformers reads though no configuration class declares them."""
_DTYPES = ("dtype", "torch_dtype")


def require_transformers(what: str) -> None:
    """Raise InputError where the optional extra is not installed; `what` is the field or option that needs it."""
    if find_spec("transformers") is None:
        raise InputError(f"{what}: this needs Hugging Face Transformers, which is not installed; run pip install 'plait[hf]'")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError with every field that the architecture `fields["model_type"]` does not have, or for one that Transformers does not
    have; InputError without Transformers."""
    require_transformers("model.config")
    from transformers import CONFIG_MAPPING

    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        near = get_close_matches(kind, CONFIG_MAPPING.keys(), n=1)
        remedy = f"use {near[0]!r}" if near else "use one that Transformers has, such as 'llama'"
        raise ConfigError(Problem("model.config.model_type", kind, "Transformers has no such architecture", remedy))
    known = known_fields(CONFIG_MAPPING[kind])
    problems = []
    for name, value in fields.items():
        if name in _DTYPES:
            problems.append(Problem(f"model.config.{name}", value, "the type of the parameters has one place", "set model.dtype"))
        elif name not in known and name != "model_type":
            near = get_close_matches(name, known, n=1)
            remedy = f"use {near[0]!r}" if near else "leave it out"
            problems.append(Problem(f"model.config.{name}", value, f"a {kind!r} configuration has no such field", remedy))
    if problems:
        raise ConfigError(*problems)


def described_config(fields: Mapping[str, Any], *, follow: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that `fields` describe. `follow` are values of fields that are not written, where the architecture has them.
    Raises ConfigError where Transformers refuses a value."""
    check_fields(fields)
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = fields["model_type"]
    known = known_fields(CONFIG_MAPPING[kind])
    written = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(kind, **({name: value for name, value in follow.items() if name in known} | written))
    except Exception as error:  # each configuration class validates in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        rule = lines[-1] if lines else type(error).__name__
        raise ConfigError(Problem("model.config", None, f"Transformers refuses it: {rule}", "correct the field it names")) from error


def known_fields(config_class: type[PreTrainedConfig]) -> set[str]:
    """Names that a configuration class reads."""
    from transformers import PreTrainedConfig

    found = set(config_class.attribute_map) | _OLDER_NAMES
    for known in (config_class, PreTrainedConfig):
        parameters = inspect.signature(known.__init__).parameters.values()
        found |= {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    return found - {"self"}
