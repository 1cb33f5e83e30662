"""State of compressed collectives between steps.

A checkpoint stores it, and a skipped step does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plait.comm.compress import (
    PersistentTensors,
    PowerSGDBuckets,
    QuantisedBuckets,
    QuantisedReduceScatter,
)
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepEnd, StepHook


class CompressedUnits(dict[str, QuantisedReduceScatter]):
    """Compressed reduce-scatters of sharded units, by name.

    The autotuner replaces the entries when it switches to another scheme.
    """


class Residuals(StepHook):
    """State of the compressed collectives of a reducer's buckets and of sharded units.

    The collectives may be replaced between two steps.
    """

    def __init__(
        self, reducer: Reducer | None, units: CompressedUnits, *, device: torch.device
    ) -> None:
        self._reducer = reducer
        self.units = units
        self._device = device

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors that are carried to the next step, by name."""
        state: dict[str, torch.Tensor] = {}
        if self._reducer is not None:
            state.update(self._reducer.reduction.state)
        for name, scatter in self.units.items():
            for key, tensor in scatter.carried.state.items():
                state[f"{name}.{key}"] = tensor
        return state

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors that have the same shape here.

        The others start anew, which loses what compression has left over from one step.
        """
        if self._reducer is not None:
            for name, tensor in self._reducer.reduction.state.items():
                # Shapes differ if this run has other buckets.
                if name in saved and saved[name].shape == tensor.shape:
                    tensor.copy_(saved[name])
        if not saved:
            return
        for name, scatter in self.units.items():
            scatter.carried.state = {
                key.removeprefix(f"{name}."): tensor.to(self._device)
                for key, tensor in saved.items()
                if key.startswith(f"{name}.")
            }

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors in memory: `state`, and the copies that a skipped step needs."""
        return [
            *self.state().values(),
            *(tensor for carried in self._carriers() for tensor in carried.aside),
        ]

    def after_step(self, end: StepEnd) -> str:
        """Keep the new values, or drop them after a skipped step, and follow the loss scale."""
        self._update_residuals(skipped=end.skipped)
        # Residuals are in the units of the loss scale. PowerSGD's factors and step count are not.
        if end.rescaled != 1.0:
            for name, tensor in self.state().items():
                if not name.endswith((".right", "steps")):
                    tensor.mul_(end.rescaled)
        return ""

    def drop_gradients(self) -> None:
        """Restore the values from before the step, as for a skipped one."""
        self._update_residuals(skipped=True)

    def _update_residuals(self, *, skipped: bool) -> None:
        for carried in self._carriers():
            carried.end_step(skipped=skipped)

    def _carriers(self) -> list[PersistentTensors]:
        carriers = [scatter.carried for scatter in self.units.values()]
        if self._reducer is not None:
            reduction = self._reducer.reduction
            if isinstance(reduction, QuantisedBuckets | PowerSGDBuckets):
                carriers.append(reduction.carried)
        return carriers
