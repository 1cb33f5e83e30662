"""Knows whether a model computes now, so that calls which its ranks cannot answer in the middle of
that are refused before they do harm.
"""

from __future__ import annotations

from torch import nn


class Forwards:
    """Of one model, and those inside of them."""

    def __init__(self, model: nn.Module) -> None:
        self.running = 0

        def begin(*_: object) -> None:
            self.running += 1

        def end(*_: object) -> None:
            self.running = max(0, self.running - 1)

        self._handles = [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
