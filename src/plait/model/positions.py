"""Calls of Transformers models that compute position ids themselves.

Note [Packed rows]
    A packed row consists of several sequences, one after the other. A Transformers model that is
    called without an attention mask looks for packed rows in every forward: it compares
    neighbouring position ids, and masks attention between the sequences that it finds. On a GPU
    this check makes the program wait for the device.

    A model that is called without position ids counts them from 0 in every row. No row is then
    packed, so the check is skipped. This is done for the model types below only, which are known to
    count positions this way.
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
"""Model types (`config.model_type`) of Transformers that count positions from 0 in every row.

They do so if they are called without position ids, for any tokens.
"""
_MASKING_MODULE = "transformers.masking_utils"
_SEARCH = "find_packed_sequence_indices"
_STATE = threading.local()


def call_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model, and skip Transformers' check for packed rows if no row can be packed.

    The check is skipped if the caller passes no position ids (second argument, or keyword) and
    `counts_positions(model)` is True. See Note [Packed rows].
    """
    if len(args) > 1 or kwargs.get("position_ids") is not None or not counts_positions(model):
        return model(*args, **kwargs)
    with skip_packed_row_search():
        return model(*args, **kwargs)


def counts_positions(model: nn.Module) -> bool:
    """Return True if a model is known to count position ids from 0 in every row by default."""
    if getattr(getattr(model, "config", None), "model_type", None) not in COUNTING_MODEL_TYPES:
        return False
    # The inner model counts the positions. A user's subclass of either may do something else.
    inner = getattr(model, "base_model", model)
    return all(
        _defining_module(module).startswith("transformers.models.") for module in (model, inner)
    )


def _defining_module(module: nn.Module) -> str:
    """Return the name of the Python module that defines a module's class."""
    # `fully_shard` replaces the class with a subclass that is defined in torch.
    return next(
        base.__module__ for base in type(module).__mro__ if not base.__module__.startswith("torch.")
    )


@contextmanager
def skip_packed_row_search() -> Iterator[None]:
    """Skip Transformers' check for packed rows in this thread, inside the context.

    See Note [Packed rows].
    """
    _wrap_search()
    outer = getattr(_STATE, "rows_are_sequences", False)
    _STATE.rows_are_sequences = True
    try:
        yield
    finally:
        _STATE.rows_are_sequences = outer


def _wrap_search() -> None:
    """Patch Transformers' check for packed rows to obey `skip_packed_row_search`.

    Nothing changes if the check is patched already, or if Transformers is not imported.
    """
    masks = sys.modules.get(_MASKING_MODULE)
    search = getattr(masks, _SEARCH, None)
    if masks is None or search is None or getattr(search, "respects_rows", False):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        # A compiled model does not read the result, and its graph cannot contain thread state.
        if not torch.compiler.is_compiling() and getattr(_STATE, "rows_are_sequences", False):
            return None
        return search(position_ids)

    find_packed_sequence_indices.__dict__["respects_rows"] = True
    setattr(masks, _SEARCH, find_packed_sequence_indices)
