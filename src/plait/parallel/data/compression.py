"""Hooks for compressed gradients: state between steps, and selection by measured step time.

`Residuals` is the state of compressed collectives between steps. A checkpoint stores it, and a
skipped step does not change it.

`CompressionAutotuner` selects among several candidates that the user allows. The costs of the links
do not predict the best one, because only communication that does not overlap with computation makes
a step longer. The run's own steps are timed instead: first uncompressed ones, then a few of every
candidate.
A lossier candidate is chosen if its steps are 5 % shorter than those of the best candidate before
it. Before the decision a few more uncompressed steps are timed, in case the first ones were slow by
chance. The decision is taken once, the same on every rank of the groups, and saved in checkpoints.
The residual of a candidate is dropped when another one is activated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.small_messages import max_over_ranks
from plait.comm.compress import (
    PersistentTensors,
    PowerSGDBuckets,
    QuantisedBuckets,
    QuantisedReduceScatter,
    is_residual,
)
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepEnd, StepHook


class CompressedUnits(dict[str, QuantisedReduceScatter]):
    """Compressed reduce-scatters of sharded units, by name.

    The autotuner replaces the entries when it switches to another scheme.
    """

    def have_errors(self) -> bool:
        """True if the next reduction adds compression errors of earlier reductions."""
        return any(scatter.carried.state for scatter in self.values())


class Residuals(StepHook):
    """State of the compressed collectives of a reducer's buckets and of sharded units.

    The collectives may be replaced between two steps. If an engine takes the steps, dropping
    gradients also drops their compression errors. In the user's own training loop, `zero_grad`
    usually follows an update, which may have happened without an optimizer of torch. In such a loop
    errors are therefore kept, except after failures and steps that `ParallelModel.step` skips.

    Args:
        reducer: Reducer of the model's gradients, if there is one.
        units: Compressed collectives of sharded units.
        device: Device of the tensors.
        own_loop: Whether the user's own training loop takes the steps.
    """

    def __init__(
        self,
        reducer: Reducer | None,
        units: CompressedUnits,
        *,
        device: torch.device,
        own_loop: bool,
    ) -> None:
        self._reducer = reducer
        self.units = units
        self._device = device
        self._own_loop = own_loop

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors that persist until the next step, by name."""
        state: dict[str, torch.Tensor] = {}
        if self._reducer is not None:
            state.update(self._reducer.reduction.state)
        for name, scatter in self.units.items():
            for key, tensor in scatter.carried.state.items():
                state[f"{name}.{key}"] = tensor
        return state

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors that have the same shape in this run.

        Other residuals are reset, which loses the compression error of one step. Those of this
        engine's own last step belong to gradients that the checkpoint does not have. PowerSGD's
        other tensors become those of a new engine.
        """
        if self._reducer is not None:
            if isinstance(self._reducer.reduction, PowerSGDBuckets):
                self._reducer.reduction.reset()
            for name, tensor in self._reducer.reduction.state.items():
                # Shapes differ if this run has other buckets.
                if name in saved and saved[name].shape == tensor.shape:
                    tensor.copy_(saved[name])
                elif is_residual(name):
                    tensor.zero_()
        for name, scatter in self.units.items():
            scatter.carried.replace(
                {
                    key.removeprefix(f"{name}."): tensor.to(self._device)
                    for key, tensor in saved.items()
                    if key.startswith(f"{name}.")
                }
            )

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors in memory: `state`, and the copies that a skipped step needs."""
        copies = [tensor for carried in self._carriers() for tensor in carried.spare_tensors]
        return [*self.state().values(), *copies]

    def after_step(self, end: StepEnd) -> str:
        """Keep the step's new state, or drop it if the step was skipped. Rescale residuals."""
        self.end_step(skipped=end.skipped)
        # Residuals are in the units of the loss scale. PowerSGD's factors and step count are not.
        if end.rescaled != 1.0:
            for name, tensor in self.state().items():
                if is_residual(name):
                    tensor.mul_(end.rescaled)
        return ""

    def drop_gradients(self) -> None:
        """Drop the new state of this step, as after a skipped step."""
        self.end_step(skipped=True)

    def zero_gradients(self, parameters: set[torch.Tensor], set_to_none: bool) -> None:
        """Zero all compression errors. This loses the error of one step.

        The errors from before this step are not restored, because they may already be part of
        gradients of other parameters, and these gradients are not dropped.
        """
        if self._own_loop:
            return
        self.end_step(skipped=True)
        for name, tensor in self.state().items():
            if is_residual(name):
                tensor.zero_()

    def end_step(self, *, skipped: bool) -> None:
        """Keep the new state of this step, or drop it if the gradients were not applied."""
        for carried in self._carriers():
            carried.end_step(skipped=skipped)

    def _carriers(self) -> list[PersistentTensors]:
        carriers = [scatter.carried for scatter in self.units.values()]
        if self._reducer is not None:
            reduction = self._reducer.reduction
            if isinstance(reduction, QuantisedBuckets | PowerSGDBuckets):
                carriers.append(reduction.carried)
        return carriers


_LEAST_SAVING = 0.05
"""Smallest fraction of the time of a step that a candidate must save."""
_WARMUP_STEPS = 2
"""Steps per candidate that do not count, because they fill caches and buffers."""
_TIMED_STEPS = 3
_UNCOMPRESSED = "uncompressed"
_DECISION = "autotune.decision"


@dataclass
class CompressionAutotuner(StepHook):
    """Hook that times steps and selects the gradient compression.

    Attributes:
        groups: One group for each axis whose ranks must take the same decision (see
            `deciding_groups`).
        device: The device of this rank. A step ends when the queue of this device is empty.
        deactivate: Returns to uncompressed gradients.
        candidates: Schemes to choose from, the least lossy first.
        decision: int64 scalar for a checkpoint. -1: undecided, 0: uncompressed, otherwise the code
            of a candidate.
    """

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device
    deactivate: Callable[[], object]
    candidates: tuple[CompressionCandidate, ...]
    decision: torch.Tensor = field(default_factory=lambda: torch.full((), -1, dtype=torch.int64))
    _active: CompressionCandidate | None = None
    _untested: list[CompressionCandidate] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _seconds_again: float | None = None
    """Seconds per step of uncompressed gradients, timed again after the candidates."""
    _steps: list[float] = field(default_factory=list)
    _last_end: float | None = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the decision for a checkpoint."""
        return {_DECISION: self.decision}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore a decision, if its candidate is available in this run."""
        decided = int(saved.get(_DECISION, torch.tensor(-1)))
        if decided in (0, *(candidate.code for candidate in self.candidates)):
            self.commit(decided)

    def after_step(self, end: StepEnd) -> str:
        """Time a step. Collective over the groups at the end of every candidate's steps.

        Until the decision the host waits for the device after each step: kernels are queued, so
        without the wait the clock would measure how quickly the host launches them.

        Returns:
            A description of the decision after the step that takes it, otherwise an empty string.
        """
        if int(self.decision) >= 0:
            return ""
        accelerator.synchronize(self.device)
        now = time.perf_counter()
        if self._last_end is not None:
            self._steps.append(now - self._last_end)
        self._last_end = now
        if len(self._steps) < _WARMUP_STEPS + _TIMED_STEPS:
            return ""

        # The phases are: uncompressed, each candidate, and uncompressed again if a candidate won,
        # because the first steps may have been slow by chance.
        # One axis after the other gives the maximum over all of them.
        median_seconds = median(self._steps[_WARMUP_STEPS:])
        (seconds,) = max_over_ranks([median_seconds], *self.groups, device=self.device)
        self._steps = []
        if not self._seconds:
            self._seconds[_UNCOMPRESSED] = seconds
            self._untested = list(self.candidates)
        elif self._untested:
            self._seconds[self._untested.pop(0).name] = seconds
        else:
            self._seconds_again = seconds
            self._seconds[_UNCOMPRESSED] = min(seconds, self._seconds[_UNCOMPRESSED])

        if self._untested:
            self._activate(self._untested[0])
            return ""
        if self._seconds_again is None and best_candidate(self._seconds) != _UNCOMPRESSED:
            self._activate(None)
            return ""
        return self._decide()

    def _decide(self) -> str:
        best = best_candidate(self._seconds)
        code = next((candidate.code for candidate in self.candidates if candidate.name == best), 0)
        self.commit(code)

        times = {name: seconds for name, seconds in self._seconds.items() if name != _UNCOMPRESSED}
        if self._seconds_again is not None:
            times["uncompressed again"] = self._seconds_again
        measured = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times.items())
        verdict = "gradients stay uncompressed"
        if code:
            verdict = f"gradients are sent as {best} from now on"
        return (
            f"{verdict}: a step takes {self._seconds[_UNCOMPRESSED] * 1e3:.3g} ms uncompressed;"
            f" candidates: {measured}"
        )

    def commit(self, code: int) -> None:
        """Store a decision and activate its candidate.

        Args:
            code: Code of a candidate, or 0 for uncompressed gradients.
        """
        self.decision.fill_(code)
        matching = (candidate for candidate in self.candidates if candidate.code == code)
        self._activate(next(matching, None))

    def _activate(self, candidate: CompressionCandidate | None) -> None:
        if candidate is self._active:
            return
        self._active = candidate
        if candidate is None:
            self.deactivate()
        else:
            candidate.activate()


@dataclass(frozen=True)
class CompressionCandidate:
    """Compression scheme that may be selected.

    Attributes:
        name: Name for the user.
        code: Number of the scheme in a checkpoint, positive.
        activate: Switches to the scheme at the next step. Called between two steps, on every rank
            of the groups.
    """

    name: str
    code: int
    activate: Callable[[], object]


def best_candidate(seconds: Mapping[str, float]) -> str:
    """Return the last candidate whose steps are 5 % shorter than those of the previous best.

    Args:
        seconds: Seconds per step of each candidate, the least lossy first.
    """
    best, *others = seconds
    for name in others:
        if seconds[name] < (1 - _LEAST_SAVING) * seconds[best]:
            best = name
    return best
