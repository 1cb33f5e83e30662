"""How many tokens a model and a tokenizer have."""

from __future__ import annotations

from typing import Any

from torch import nn


def tokens_of_model(model: nn.Module) -> int | None:
    """Rows of its embedding, of which the last may be padding; None where it does not say."""
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    found = getattr(embedding, "num_embeddings", None)
    return found if isinstance(found, int) else None


def tokens_of_tokenizer(tokenizer: Any) -> int | None:
    """One more than its highest token, since a vocabulary may leave numbers out. None without a
    tokenizer.
    """
    if tokenizer is None:
        return None
    vocabulary: Any = getattr(tokenizer, "get_vocab", None)
    found = vocabulary() if callable(vocabulary) else {}
    return (
        max(len(tokenizer), *(token + 1 for token in found.values())) if found else len(tokenizer)
    )
