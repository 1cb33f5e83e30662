"""Dropout of a model in training, from the fields of its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DROPOUTS = {
    "dropout": (
        "resid_pdrop",
        "resid_dropout",
        "residual_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "dropout",
    ),
    "attention_dropout": ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"),
    "embedding_dropout": ("embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout"),
}
"""Names in configurations per field of `Architecture`."""
_DROPOUT_BY_DEFAULT = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
    "opt": ("dropout",),
    "biogpt": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "seed_oss": ("residual_dropout", "attention_dropout"),
}
"""Fields with dropout by default in Transformers, per family."""


def dropouts_of(config: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Return the dropout fields of `Architecture` for a configuration.

    Fields that the configuration leaves out have the family's default.
    """
    rates: dict[str, Any] = dict.fromkeys(_DROPOUT_BY_DEFAULT.get(kind, ()), 0.1)
    rates |= {name: value for name, value in config.items() if value is not None}

    def is_positive(name: str) -> bool:
        rate = rates.get(name)
        return isinstance(rate, int | float) and rate > 0

    return {field: int(any(map(is_positive, names))) for field, names in DROPOUTS.items()}
