"""Which places of a micro-batch are tokens, for what counts them in a forward. A part of a sequence
has an attention mask of another form, and places that the cut has added.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "_plait_tokens"


def mark(mask: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """A mask that takes the place of `attention_mask`, and knows the `tokens` [batch, seq], 0 for
    padding; None: there is none.
    """
    setattr(mask, _ATTRIBUTE, (tokens,))
    return mask


def tokens_of(mask: Any) -> Any:
    """Return the tokens that `mark` attached to a mask, or the mask itself if none are attached."""
    (tokens,) = getattr(mask, _ATTRIBUTE, (mask,))
    return tokens


class TokensOfForward:
    """`now`: those of the forward that runs, or ran last, as in `mark`."""

    def __init__(self, model: nn.Module) -> None:
        self.now: torch.Tensor | None = None
        self._signature = inspect.signature(model.forward)
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.now = tokens_of(
            self._signature.bind_partial(*args, **kwargs).arguments.get("attention_mask")
        )

    def release(self) -> None:
        """Look no more."""
        self._handle.remove()
