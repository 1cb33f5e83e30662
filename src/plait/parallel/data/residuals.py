"""What compressed collectives carry from step to step: kept in a checkpoint, and unchanged by a
step that is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plait.comm.compress import Carried, PowerSGDBuckets, QuantisedBuckets, QuantisedReduceScatter
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepEnd, StepHook


class CompressedUnits(dict[str, QuantisedReduceScatter]):
    """Sharded units' compressed collectives that may carry something, by name; others after
    autotuning took another scheme.
    """


class Residuals(StepHook):
    """Of the reducer's buckets, and of sharded units by their names. Which those are may change
    between two steps.
    """

    def __init__(
        self, reducer: Reducer | None, units: CompressedUnits, *, device: torch.device
    ) -> None:
        self._reducer = reducer
        self.units = units
        self._device = device

    def state(self) -> dict[str, torch.Tensor]:
        """All of it."""
        found = dict(self._reducer.reduction.state) if self._reducer is not None else {}
        return found | {
            f"{name}.{key}": tensor
            for name, scatter in self.units.items()
            for key, tensor in scatter.carried.state.items()
        }

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put it back where it has the same form; the rest starts anew, which costs what one step
        loses.
        """
        if self._reducer is not None:
            for name, tensor in self._reducer.reduction.state.items():
                if name in saved and saved[name].shape == tensor.shape:
                    tensor.copy_(saved[name])
        for name, scatter in self.units.items() if saved else ():
            mine = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in saved.items()
                if key.startswith(f"{name}.")
            }
            scatter.carried.state = {key: tensor.to(self._device) for key, tensor in mine.items()}

    def held(self) -> list[torch.Tensor]:
        """All that is in memory for it: `state`, and what stands beside it."""
        return [
            *self.state().values(),
            *(tensor for carried in self._carriers() for tensor in carried.aside),
        ]

    def after_step(self, end: StepEnd) -> str:
        """A step that was skipped leaves everything as it was. Residuals are in the units of the
        loss scale.
        """
        self._update_residuals(skipped=end.skipped)
        if end.rescaled != 1.0:
            for name, tensor in self.state().items():
                if not name.endswith((".right", "steps")):
                    tensor.mul_(end.rescaled)
        return ""

    def drop_gradients(self) -> None:
        """As a step that was skipped."""
        self._update_residuals(skipped=True)

    def _update_residuals(self, *, skipped: bool) -> None:
        for carried in self._carriers():
            carried.end_step(skipped=skipped)

    def _carriers(self) -> list[Carried]:
        found = [scatter.carried for scatter in self.units.values()]
        if self._reducer is not None and isinstance(
            self._reducer.reduction, QuantisedBuckets | PowerSGDBuckets
        ):
            found.append(self._reducer.reduction.carried)
        return found
