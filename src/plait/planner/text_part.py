"""The language model inside a Hugging Face configuration, and the sizes that a configuration leaves
to Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from plait.errors import Problem, refuse

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "vocab": ("vocab_size",),
}
"""Sizes that a configuration must have, by the names that families give them."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where configurations of models of text and pictures have the language model's."""


def text_part(config: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The language model's own configuration where `config` holds one, with the sizes that it
    leaves to Transformers, which writes there only what differs from the family's own; None where
    `config` is one itself.
    """
    inner = next(
        (config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)), None
    )
    if inner is None or any(config.get(name) is not None for name in NAMES["layers"]):
        return None
    inner_kind = inner.get("model_type") or kind
    found = {
        "model_type": inner_kind,
        **{
            name: value
            for name, value in inner.items()
            if value is not None or name == "q_lora_rank"
        },
    }
    if config.get("vocab_size") is not None:
        found.setdefault("vocab_size", config["vocab_size"])
    for keys in NAMES.values():
        if (
            not any(found.get(key) is not None for key in keys)
            and (size := size_of_transformers(inner_kind, keys[0])) is not None
        ):
            found[keys[0]] = size
    return found


def size_of_transformers(kind: str, name: str) -> int | None:
    """A size of the family `kind` that Transformers takes where none is written; None without one,
    or without Transformers.
    """
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    try:
        size = getattr(CONFIG_MAPPING[kind]().get_text_config(decoder=True), name, None)
    except Exception:  # a configuration that has no defaults
        return None
    return size if isinstance(size, int) else None


def _inner_config(config: Mapping[str, Any], kind: str) -> tuple[str, Any] | None:
    """(name, Transformers' configuration) of the language model inside a model of the family
    `kind`, as training builds it from `config`; None for a family that is one itself, and without
    Transformers.
    """
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    try:
        whole = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception:  # what Transformers refuses it tells where the model is built
        return None
    return next(
        (
            (name, part)
            for name in _TEXT_PARTS
            if hasattr(part := getattr(whole, name, None), "to_diff_dict")
        ),
        None,
    )


def check_places(config: Mapping[str, Any], kind: str, source: str) -> None:
    """Raise ConfigError for sizes that Transformers takes from a configuration inside this one, and
    that say something else here.
    """
    found = _inner_config(config, kind)
    if found is None:
        return
    part, inner = found
    written = {
        name: config[name]
        for keys in NAMES.values()
        for name in keys
        if config.get(name) is not None
    }
    refuse(
        Problem(
            f"{source}: {name}",
            value,
            f"Transformers takes it from {part}, where it is {there}",
            f"write it there: {part}.{name}",
        )
        for name, value in written.items()
        if (there := getattr(inner, name, None)) is not None and there != value
    )
