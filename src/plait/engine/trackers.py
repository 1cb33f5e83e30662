"""Experiment trackers of a run, through Accelerate's tracking module."""

from __future__ import annotations

import atexit
import csv
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from plait.cluster.accelerator import HostCopy
from plait.config.resolving.resolve import Resolved
from plait.config.schema.sections import TrackerSpec
from plait.errors import Problem, raise_problems, warn
from plait.events import Event, RunEnded, StepDone, Validated
from plait.files import user_path

_PACKAGES = {
    "tensorboard": {"accelerate": "accelerate", "tensorboard": "tensorboard"},
    "wandb": {"accelerate": "accelerate", "wandb": "wandb"},
    "comet": {"accelerate": "accelerate", "comet_ml": "comet_ml"},
    "csv_monitor": {},
}
"""Modules that each tracker imports, and the packages that pip installs them from."""


def check_trackers(resolved: Resolved) -> None:
    """Raise ConfigError if a library that a tracker needs is not installed."""
    problems = []
    for spec in resolved.trackers:
        packages = _PACKAGES[spec.name]
        missing = [package for module, package in packages.items() if find_spec(module) is None]
        if missing:
            rule = f"{' and '.join(missing)} must be installed, and are missing here"
            if len(missing) == 1:
                rule = f"{missing[0]} must be installed, and is missing here"
            remedy = f"run `pip install {' '.join(missing)}`, or leave the tracker out"
            problems.append(Problem(f"{spec.name}.enabled", True, rule, remedy))
    raise_problems(problems)


class CsvTracker:
    """Tracker that writes one CSV file per metric, as DeepSpeed's `csv_monitor` does.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a row to the file of every metric."""
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with open(path, "a", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                if is_new:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])

    def finish(self) -> None:
        """Do nothing: every row is in its file."""


class Trackers:
    """Listener that passes the metrics of a run to its trackers. It exists on one rank only.

    Args:
        resolved: Configuration of the run. Its settings are recorded with the run.
    """

    def __init__(self, resolved: Resolved) -> None:
        settings = _recorded_settings(resolved)
        self._trackers = [_start_tracker(spec, settings) for spec in resolved.trackers]

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.log(_step_values(event), event.step)
        elif isinstance(event, Validated):
            self.log({"validation/loss": event.loss}, event.step)
        elif isinstance(event, RunEnded):
            self.close()

    def log(self, values: dict[str, float], step: int) -> None:
        """Record metrics of a step."""
        for tracker in list(self._trackers):
            try:
                tracker.log(values, step=step)
            except Exception as error:
                # Only this rank has trackers. An error here would leave the other ranks waiting.
                self._trackers.remove(tracker)
                warn(f"a tracker failed at step {step}, and the run continues without it: {error}")

    def close(self) -> None:
        """End the run in every tracker."""
        trackers = self._trackers
        self._trackers = []
        for tracker in trackers:
            try:
                tracker.finish()
            except Exception as error:
                # The run has its checkpoints, and other trackers have yet to end.
                warn(f"a tracker failed at the end of the run: {error}")


def _start_tracker(spec: TrackerSpec, recorded: dict[str, Any]) -> Any:
    settings = {name: value for name, value in spec.settings.items() if value is not None}
    if spec.name == "csv_monitor":
        return CsvTracker(user_path(settings["output_path"], "output_path") / settings["job_name"])

    from accelerate import PartialState
    from accelerate.tracking import CometMLTracker, TensorBoardTracker, WandBTracker

    # Accelerate's trackers ask its state whether this process is the first one. The state adopts
    # the process group, but it may set the number of threads, on which the rounding of sums
    # depends.
    threads = torch.get_num_threads()
    PartialState()
    torch.set_num_threads(threads)

    tracker: Any
    if spec.name == "tensorboard":
        folder = user_path(settings["output_path"], "output_path")
        tracker = TensorBoardTracker(settings["job_name"], logging_dir=str(folder))
    elif spec.name == "wandb":
        tracker = WandBTracker(
            settings["project"], group=settings.get("group"), entity=settings.get("team")
        )
    else:
        names = ("workspace", "experiment_key", "mode", "online")
        arguments = {name: settings[name] for name in names if name in settings}
        tracker = CometMLTracker(settings.get("project"), **arguments)

    tracker.start()
    if spec.name == "comet" and "experiment_name" in settings:
        tracker.tracker.set_name(settings["experiment_name"])
    tracker.store_init_configuration(recorded)
    return tracker


def _recorded_settings(resolved: Resolved) -> dict[str, Any]:
    return {
        "layout": str(resolved.layout),
        "zero_stage": resolved.data_parallel.stage,
        "train_batch_size": resolved.batch.train_batch_size,
        "micro_batch_size": resolved.batch.micro_batch_size,
        "gradient_accumulation_steps": resolved.batch.accumulation,
        "gradient_clipping": resolved.gradient_clipping,
        "compute_dtype": resolved.precision.compute or "float32",
        "optimizer": resolved.optimizer.type,
        "learning_rate": resolved.optimizer.params.get("lr"),
        "seed": resolved.seed,
    }


def _step_values(event: StepDone) -> dict[str, float]:
    values = {
        "train/loss": event.loss,
        "train/grad_norm": event.grad_norm,
        "train/learning_rate": event.learning_rate,
        "train/loss_scale": event.loss_scale,
    }
    if event.seconds:
        values["train/tokens_per_second"] = event.tokens / event.seconds
        values["train/step_seconds"] = event.seconds
    return values


@dataclass(frozen=True)
class _TrackedStep:
    """A step that the device may still be computing."""

    step: int
    numbers: HostCopy
    """Loss and gradient norm."""
    learning_rate: float
    loss_scale: float


class EngineTrackers:
    """Trackers of an engine whose training loop is the caller's.

    The metrics of a step are copied asynchronously, and a later call records them once the device
    has computed them. No call waits for the device, except for `close`.
    """

    def __init__(self, resolved: Resolved) -> None:
        self._trackers = Trackers(resolved)
        self._queued: deque[_TrackedStep] = deque()
        self._losses: list[torch.Tensor] = []
        # A script may end without closing its engine.
        atexit.register(self.close)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Record the mean loss of one micro-batch of this rank."""
        self._losses.append(loss.detach())

    def end_step(
        self,
        step: int,
        *,
        grad_norm: torch.Tensor,
        learning_rate: float,
        loss_scale: float,
        loss: torch.Tensor | None = None,
    ) -> None:
        """Queue the metrics of a step, and record the available metrics of earlier steps.

        Args:
            step: Number of the step, from 1.
            grad_norm: Norm of the gradients, 0-dimensional.
            learning_rate: Learning rate of the step.
            loss_scale: Loss scale of the step.
            loss: Loss of the step. None: the mean of the losses passed to `add_loss`.
        """
        losses = self._losses
        self._losses = []
        if loss is None and not losses:
            return
        if loss is None:
            loss = torch.stack([entry.double().reshape(()) for entry in losses]).mean()
        numbers = torch.stack(
            [loss.double().reshape(()), grad_norm.to(loss.device).double().reshape(())]
        )
        self._queued.append(_TrackedStep(step, HostCopy(numbers), learning_rate, loss_scale))
        while self._queued and self._queued[0].numbers.is_ready():
            self._record(self._queued.popleft())

    def drop_losses(self) -> None:
        """Drop the losses of an abandoned step."""
        self._losses = []

    def close(self) -> None:
        """Record the queued steps, and end the run in every tracker."""
        atexit.unregister(self.close)
        while self._queued:
            self._record(self._queued.popleft())
        self._trackers.close()

    def _record(self, queued: _TrackedStep) -> None:
        loss, grad_norm = queued.numbers.values().tolist()
        values = {
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/learning_rate": queued.learning_rate,
            "train/loss_scale": queued.loss_scale,
        }
        self._trackers.log(values, queued.step)
