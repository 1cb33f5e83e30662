"""The state of a compressed collective between steps (residuals, factors), which a skipped step does not change.

Whether a step is skipped is known only after all of its gradients were sent. Where that may happen, the new value of a tensor is written to
a second tensor, which replaces the first when the step is applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Carried:
    """Tensors by name."""

    revocable: bool
    """Whether a step may be skipped; otherwise what it makes overwrites what was."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """As of the last step that counted; for a checkpoint."""
    _made: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the step that runs."""
    _spare: dict[str, torch.Tensor] = field(default_factory=dict)

    def now(self, name: str) -> torch.Tensor:
        """Its value, with what the step that runs has made of it so far."""
        return self._made.get(name, self.state[name])

    def change(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(`now`, where its next value is to be written in full). They are one tensor where nothing has to be kept."""
        now = self.now(name)
        if self.revocable and name not in self._made:
            spare = self._spare.pop(name, None)
            self._made[name] = torch.empty_like(now) if spare is None or spare.shape != now.shape else spare
        return now, self._made.get(name, now)

    @property
    def aside(self) -> list[torch.Tensor]:
        """What is held besides `state`."""
        return [*self._made.values(), *self._spare.values()]

    def end_step(self, *, skipped: bool) -> None:
        """The step has ended."""
        for name, made in self._made.items():
            if skipped:
                self._spare[name] = made
            else:
                self._spare[name], self.state[name] = self.state[name], made
        self._made = {}
