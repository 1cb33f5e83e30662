"""Language model inside a Hugging Face configuration, and sizes that Transformers adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from plait.errors import Problem, raise_problems

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "vocab": ("vocab_size",),
}
"""Names of required sizes in configurations of different families."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Keys of the language model in configurations of multimodal models."""


def text_part(config: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the nested configuration of the language model, or None if `config` is one itself.

    Transformers writes only what differs from the defaults of the family, so these are added.
    """
    inner = next(
        (config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)), None
    )
    if inner is None or any(config.get(name) is not None for name in NAMES["layers"]):
        return None
    inner_kind = inner.get("model_type") or kind
    text = {
        "model_type": inner_kind,
        **{
            name: value
            for name, value in inner.items()
            if value is not None or name == "q_lora_rank"
        },
    }
    if config.get("vocab_size") is not None:
        text.setdefault("vocab_size", config["vocab_size"])

    for keys in NAMES.values():
        if any(text.get(key) is not None for key in keys):
            continue
        size = size_of_transformers(inner_kind, keys[0])
        if size is not None:
            text[keys[0]] = size

    return text


def size_of_transformers(kind: str, name: str) -> int | None:
    """Return Transformers' default for a size of a family, or None."""
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
    """Return the name and configuration of the language model inside a multimodal model.

    As Transformers builds it from `config`. None for language models, and without Transformers.
    """
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    try:
        outer = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception:  # `plait train` reports the error when it builds the model
        return None

    for name in _TEXT_PARTS:
        inner = getattr(outer, name, None)
        if hasattr(inner, "to_diff_dict"):
            return name, inner
    return None


def check_places(config: Mapping[str, Any], kind: str, source: str) -> None:
    """Raise ConfigError for sizes that contradict a nested configuration.

    Transformers reads them from there and ignores them here.
    """
    nested = _inner_config(config, kind)
    if nested is None:
        return
    part, inner = nested
    written = {
        name: config[name]
        for keys in NAMES.values()
        for name in keys
        if config.get(name) is not None
    }
    raise_problems(
        Problem(
            f"{source}: {name}",
            value,
            f"Transformers takes it from {part}, where it is {there}",
            f"write it there: {part}.{name}",
        )
        for name, value in written.items()
        if (there := getattr(inner, name, None)) is not None and there != value
    )
