"""What tokens of a generation were chosen from."""

from __future__ import annotations

import pytest
import torch

from plait.inference.decode import TokenSampler


class SeenLogits:
    """Keeps the logits that tokens are chosen from; on the rank that chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[torch.Tensor] = []
        choose = TokenSampler.__call__

        def keep(chooser: TokenSampler, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
            self.logits.append(logits.clone())
            return choose(chooser, logits, rows)

        monkeypatch.setattr(TokenSampler, "__call__", keep)

    def take(self) -> torch.Tensor | None:
        """[requests, new tokens, vocabulary]; None on a rank that has none."""
        found, self.logits = self.logits, []
        return torch.stack(found, dim=1) if found else None
