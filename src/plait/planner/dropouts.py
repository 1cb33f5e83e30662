"""Where a model drops in training, by the fields of its Hugging Face configuration."""

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
"""Field of an Architecture to the names of what families drop there."""
_DROPS_UNLESS_TOLD = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
    "opt": ("dropout",),
    "biogpt": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "seed_oss": ("residual_dropout", "attention_dropout"),
}
"""Families of which Transformers drops by default, and what."""


def dropouts_of(config: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Where a model drops, as fields of an Architecture: what the configuration leaves out is the
    family's own.
    """
    shares = dict.fromkeys(_DROPS_UNLESS_TOLD.get(kind, ()), 0.1) | {
        name: value for name, value in config.items() if value is not None
    }
    return {
        field: int(
            any(isinstance(shares.get(name), int | float) and shares[name] > 0 for name in names)
        )
        for field, names in DROPOUTS.items()
    }
