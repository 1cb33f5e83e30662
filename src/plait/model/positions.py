"""Positions of tokens that a model counts itself.

Note [Packed rows]
    Where a model of Transformers is called without a mask, it looks in its position ids for rows
    that hold several sequences, and builds a mask for those. On a GPU it reads the answer, so the
    program waits for the device in every forward. A model that is given no position ids counts them
    from 0 in every row, and a row with consecutive positions is one sequence: nothing needs to be
    read. That is known of the model types below, and assumed of no other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

COUNTING_MODEL_TYPES = frozenset(
    (
        *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama", "mistral"),
        *("mixtral", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "stablelm"),
    )
)
"""`config.model_type` of the models of Transformers that count positions from 0 where they are
given none, whatever the tokens are.
"""
_MASKS = "transformers.masking_utils"
_SEARCH = "find_packed_sequence_indices"
_STATE = threading.local()


def call_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model. Without position ids, Transformers does not search the rows for packed
    sequences.
    """
    if len(args) > 1 or kwargs.get("position_ids") is not None or not counts_positions(model):
        return model(*args, **kwargs)
    with rows_are_sequences():
        return model(*args, **kwargs)


def counts_positions(model: nn.Module) -> bool:
    """Return whether a model that is given no position ids counts them from 0 in every row."""
    if getattr(getattr(model, "config", None), "model_type", None) not in COUNTING_MODEL_TYPES:
        return False
    # The code that counts is that of the inner model. A subclass of a user may do something else.
    inner = getattr(model, "base_model", model)
    return all(_code_of(each).startswith("transformers.models.") for each in (model, inner))


def _code_of(module: nn.Module) -> str:
    """Return the name of the Python module that defines a module's class. `fully_shard` derives a
    class of its own from it.
    """
    return next(
        kind.__module__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")
    )


@contextmanager
def rows_are_sequences() -> Iterator[None]:
    """Let models of Transformers that this thread calls take every row for one sequence. See Note
    [Packed rows].
    """
    _wrap_search()
    before = getattr(_STATE, "rows_are_sequences", False)
    _STATE.rows_are_sequences = True
    try:
        yield
    finally:
        _STATE.rows_are_sequences = before


def _wrap_search() -> None:
    """Put a function that respects `rows_are_sequences` in place of the search, once."""
    masks = sys.modules.get(_MASKS)
    search = getattr(masks, _SEARCH, None)
    if masks is None or search is None or getattr(search, "respects_rows", False):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        # A compiled model does not read the answer, and a thread's state is no part of its graph.
        if not torch.compiler.is_compiling() and getattr(_STATE, "rows_are_sequences", False):
            return None
        return search(position_ids)

    find_packed_sequence_indices.__dict__["respects_rows"] = True
    setattr(masks, _SEARCH, find_packed_sequence_indices)
