"""Token masks of a forward: which positions of a micro-batch are tokens, and which are padding.

If sequences are split over cp, code that counts tokens cannot read `attention_mask`: the mask of a
sequence shard has another form, and splitting may add padding. The token mask is attached to it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "_plait_tokens"


def mark(mask: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Attach the token mask of a part of sequences to the mask that replaces `attention_mask`.

    Args:
        mask: The replacement.
        tokens: Token mask [batch, seq], 0 for padding, or None if there is no padding.

    Returns:
        `mask` itself.
    """
    # In a tuple, so that None (no padding) differs from a mask without the attribute.
    setattr(mask, _ATTRIBUTE, (tokens,))
    return mask


def tokens_of(mask: Any) -> Any:
    """Return the tokens that `mark` attached to a mask, or the mask itself if none are attached."""
    (tokens,) = getattr(mask, _ATTRIBUTE, (mask,))
    return tokens


class TokensOfForward:
    """Observer of the token mask of a model's forward."""

    def __init__(self, model: nn.Module) -> None:
        self.now: torch.Tensor | None = None
        """Token mask of the running or the last forward (see `mark`), or None."""
        self._signature = inspect.signature(model.forward)
        self._handle = model.register_forward_pre_hook(self._record_mask, with_kwargs=True)

    def _record_mask(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        arguments = self._signature.bind_partial(*args, **kwargs).arguments
        self.now = tokens_of(arguments.get("attention_mask"))

    def release(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()
