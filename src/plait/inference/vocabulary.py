"""Sizes of the vocabularies of a model and a tokenizer."""

from __future__ import annotations

from typing import Any

from torch import nn


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
    """Return the highest token of a tokenizer plus one, or None without a tokenizer.

    A vocabulary may leave numbers out, so its length can be smaller.
    """
    if tokenizer is None:
        return None
    get_vocab: Any = getattr(tokenizer, "get_vocab", None)
    vocabulary = get_vocab() if callable(get_vocab) else {}
    if not vocabulary:
        return len(tokenizer)
    return max(len(tokenizer), max(vocabulary.values()) + 1)
