"""Settings of the optimizer and the LR schedule after a resume.

Note [Values on resume]
    If the configured value of a setting (such as `betas`) of an optimizer's parameter group has
    changed since the checkpoint was written, the new configured value applies. All other values
    continue from the checkpoint, bit for bit.

    The schedule of a configuration is replayed if it has changed, or if the learning rate has: a
    new schedule is built and stepped to the position of the checkpoint, as if the run had used it
    from the start. A schedule that the caller passed to `plait.initialize` keeps its own state. If
    the learning rate that it starts from has changed, its rates are scaled in proportion.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plait import exact
from plait._torch.modules import scale_rates
from plait.errors import CheckpointError, InputError
from plait.optim.lr_schedules import Scheduler, ScheduleSource, build_scheduler

_KERNEL_KEYS = ("fused", "foreach", "capturable", "differentiable")
"""Keys that select a kernel for this device. They are never taken from a checkpoint."""
_SCHEDULED_KEYS = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "betas",
    "momentum",
    "base_momentum",
    "max_momentum",
)
"""Keys that schedules set in parameter groups."""
_PARAMETER_KEYS = ("params", "param_names")

Group = dict[str, Any]
"""Values of one parameter group, without its parameters."""


def configured_groups(optimizer: Optimizer) -> list[Group]:
    """Return the values of the parameter groups as they were configured.

    Args:
        optimizer: An optimizer before its first step. A schedule on it may have changed `lr`.
    """
    groups = []
    for group in optimizer.param_groups:
        values = {
            key: copy.deepcopy(value) for key, value in group.items() if key not in _PARAMETER_KEYS
        }
        # torch's schedules keep the configured rate under this name.
        if "initial_lr" in values:
            values["lr"] = values.pop("initial_lr")
        groups.append(values)
    return groups


def refuse_unfit_scheduler(scheduler: Scheduler) -> None:
    """Refuse a caller's schedule that needs a metric, or whose state cannot be saved.

    Raises:
        InputError: The schedule is not supported. The error names the reason and a remedy.
    """
    candidate: object = scheduler
    if isinstance(candidate, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "lr_scheduler: ReduceLROnPlateau follows a metric, but Plait steps a schedule without"
            " one; do not pass it, but build it over engine.optimizer, call its step(metric) after"
            " each validation, and keep its state_dict() in client_state"
        )
    try:
        exact.encode(scheduler.state_dict(), f"the state of {type(scheduler).__name__}")
    except CheckpointError as error:
        raise InputError(
            f"lr_scheduler: {error}, or leave the value out of the schedule's state_dict()"
        ) from error


def schedule_facts(scheduler: Scheduler | None, source: ScheduleSource | None) -> Any:
    """Return the description and state of a schedule for a checkpoint, as JSON.

    Args:
        scheduler: The schedule, or None.
        source: Specification from which the schedule was built. None for a caller's schedule.
    """
    if scheduler is None:
        return None
    return {
        "type": type(scheduler).__qualname__,
        "source": source.facts if source is not None else None,
        "state": exact.encode(scheduler.state_dict(), f"the state of {type(scheduler).__name__}"),
    }


@dataclass
class Resume:
    """Merge of the values of a checkpoint with those of the configuration.

    See Note [Values on resume]. Call `groups` first, put its result into the optimizer, and then
    call `restore_schedule`.

    Attributes:
        optimizer: The optimizer of this run.
        configured: Configured values of its parameter groups (`configured_groups`).
        names: Names of the parameters of each group.
        saved_groups: Parameter groups of the checkpoint, with "params", "configured" and "now".
        scheduler: Schedule of this run, or None.
        source: Specification from which the schedule was built. None for a caller's schedule.
        saved_schedule: Schedule of the checkpoint (`schedule_facts`).
        steps: Number of updates that were applied when the checkpoint was written.
        notes: Descriptions of all differences to the checkpoint, filled by `groups`.
    """

    optimizer: Optimizer
    configured: Sequence[Group]
    names: Sequence[Sequence[str]]
    saved_groups: Sequence[Mapping[str, Any]]
    scheduler: Scheduler | None
    source: ScheduleSource | None
    saved_schedule: Mapping[str, Any] | None
    steps: int
    notes: list[str] = field(default_factory=list)
    _changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Configured values that have changed: key -> (value before, value now)."""
    _replayed: LRScheduler | None = None
    _ratios: list[float] | None = None
    """Factor of each group's rates, for a schedule that the caller passed."""

    def groups(self) -> list[Group]:
        """Return the values of every parameter group, for the optimizer."""
        by_name = {name: entry for entry in self.saved_groups for name in entry["params"]}
        groups = []
        saved_rates = []
        configured_rates = []
        is_replayed = self._schedule_changed()
        for index, names in enumerate(self.names):
            # The groups may have been divided differently, so several entries may apply.
            entries = {id(by_name[name]): by_name[name] for name in names if name in by_name}
            saved = list(entries.values())
            first = saved[0] if saved else {"now": {}, "configured": {}}
            saved_rates.append(exact.decode(first["now"].get("lr")))
            configured_rates.append(exact.decode(first["configured"].get("lr")))
            groups.append(self._group(index, saved, is_replayed=is_replayed))

        if self.source is not None:
            if is_replayed or any(key in _SCHEDULED_KEYS for key in self._changed):
                groups = self._replay(groups)
        elif self.scheduler is not None and "lr" in self._changed:
            groups = self._scale_rates(groups, saved_rates, configured_rates)
        self._note_changes(groups, saved_rates)
        self._note_new_rate(groups, saved_rates, is_replayed=is_replayed)
        return groups

    def _group(self, index: int, saved: Sequence[Mapping[str, Any]], *, is_replayed: bool) -> Group:
        """Return the hyperparameters of one parameter group, before a schedule is replayed.

        Args:
            index: Index of the group.
            saved: Groups of the checkpoint that have some of its parameters.
            is_replayed: Whether the schedule is replayed.
        """
        configured = self.configured[index]
        current = self.optimizer.param_groups[index]
        keys = [key for key in current if key not in _PARAMETER_KEYS]
        keys += [key for entry in saved for key in entry["now"] if key not in keys]

        values: Group = {}
        for key in dict.fromkeys(keys):
            fallback = configured.get(key, current.get(key))
            were = [entry["configured"][key] for entry in saved if key in entry["configured"]]
            are = [entry["now"][key] for entry in saved if key in entry["now"]]
            # In order of priority: the kernels of this device; a value that the configuration has
            # changed since; before a replay the configured value, which the schedule starts from;
            # the saved value if all groups with these parameters agree; the current one.
            if key in _KERNEL_KEYS:
                values[key] = current.get(key)
            elif key in configured and any(
                not are_equal(exact.decode(was, fallback), configured[key]) for was in were
            ):
                self._changed.setdefault(key, (exact.decode(were[0], fallback), configured[key]))
                values[key] = configured[key]
            elif is_replayed and key in _SCHEDULED_KEYS:
                if key in configured:
                    values[key] = configured[key]
            elif are and all(value == are[0] for value in are):
                values[key] = _in_form_of(fallback, exact.decode(are[0], fallback))
            elif fallback is not None:
                values[key] = fallback
        return {
            key: value for key, value in values.items() if key not in _KERNEL_KEYS or key in current
        }

    def _schedule_changed(self) -> bool:
        """Return True if the configuration's schedule differs from the checkpoint's."""
        saved = self.saved_schedule
        if self.source is not None:
            return saved is None or saved["source"] != self.source.facts
        if self.scheduler is None:
            return saved is not None

        # The caller passed the schedule.
        if saved is None or saved["source"] is not None:
            self.notes.append(
                f"the checkpoint holds no state of the {type(self.scheduler).__name__} that was"
                " passed; the schedule begins at its start"
            )
        elif saved["type"] != type(self.scheduler).__qualname__:
            raise CheckpointError(
                f"the checkpoint was written with lr_scheduler = {saved['type']}, but a"
                f" {type(self.scheduler).__qualname__} was passed, which cannot take over its"
                f" position; pass a {saved['type']}, or describe the schedule in the configuration,"
                " where it may change"
            )
        return False

    def _replay(self, groups: Sequence[Group]) -> list[Group]:
        """Step a new schedule up to the saved position, on groups without parameters."""
        assert self.source is not None
        state = self.saved_schedule["state"] if self.saved_schedule is not None else {}
        position = self.steps
        if isinstance(state, dict):
            position = state.get("last_epoch", self.steps)

        stand_in = _GroupsOnly(self.configured, self.optimizer.defaults)
        with warnings.catch_warnings():
            # torch warns because no optimizer step comes between the steps of the schedule.
            warnings.simplefilter("ignore", UserWarning)
            self._replayed = build_scheduler(
                self.source.spec, stand_in, total_steps=self.source.total_steps
            )
            for _ in range(position):
                self._replayed.step()

        merged = []
        for group, replayed in zip(groups, stand_in.param_groups, strict=True):
            scheduled = {key: replayed[key] for key in _SCHEDULED_KEYS if key in replayed}
            merged.append({**group, **scheduled})
        return merged

    def _scale_rates(
        self, groups: Sequence[Group], saved_rates: Sequence[Any], configured_rates: Sequence[Any]
    ) -> list[Group]:
        """Scale the rates of a caller's schedule by the change of the configured learning rate.

        Args:
            groups: Values of every group.
            saved_rates: Learning rate of each group when the checkpoint was written, or None.
            configured_rates: Configured learning rate of each group at that time, or None.
        """
        if not hasattr(self.scheduler, "base_lrs"):
            # Not a schedule of torch's form: its rates continue as they were saved.
            return [
                group if rate is None else {**group, "lr": rate}
                for group, rate in zip(groups, saved_rates, strict=True)
            ]

        self._ratios = []
        scaled = []
        for group, rate, was, configured in zip(
            groups, saved_rates, configured_rates, self.configured, strict=True
        ):
            now = configured.get("lr")
            ratio = 1.0
            if was and now is not None:
                ratio = float(now) / float(was)
            self._ratios.append(ratio)

            values = dict(group)
            if rate is not None:
                values["lr"] = _in_form_of(group["lr"], float(rate) * ratio)
            if "initial_lr" in group:
                values["initial_lr"] = now
            scaled.append(values)
        return scaled

    def restore_schedule(self) -> None:
        """Restore the state of the schedule. The optimizer must have the result of `groups`."""
        if self.scheduler is None:
            return
        if self._replayed is not None:
            self.scheduler.load_state_dict(self._replayed.state_dict())
            return
        state = self._saved_state()
        if state is None:
            return
        self.scheduler.load_state_dict(state)
        if self._ratios is not None:
            scale_rates(self.scheduler, self._ratios)

    def refuse_other_kinds(self, groups: Sequence[Group], where: str) -> None:
        """Refuse group values and a schedule state of other kinds than this run's own.

        They would fail in a later step, after the load has changed the run.

        Args:
            groups: Result of `groups`.
            where: Folder of the checkpoint, for messages.

        Raises:
            CheckpointError: A value is of another kind. The message names it.
        """
        for index, values in enumerate(groups):
            current = self.optimizer.param_groups[index]
            current_values = {key: current[key] for key in values if key in current}
            exact.refuse_other_kind(
                values, current_values, f"{where}: optimizer.groups[{index}]", is_strict=True
            )
        state = self._saved_state()
        if self.scheduler is not None and state is not None:
            # A caller's class may keep lists that grow, and values that are None at first.
            is_known = type(self.scheduler).__module__.startswith(("torch.optim.", "plait."))
            exact.refuse_other_kind(
                state, self.scheduler.state_dict(), f"{where}: scheduler.state", is_strict=is_known
            )

    def _saved_state(self) -> Any:
        """Return the saved state that `restore_schedule` loads, or None if it loads none."""
        saved = self.saved_schedule
        if self.scheduler is None or self._replayed is not None or saved is None:
            return None
        if self.source is None and saved["source"] is not None:
            return None
        return exact.decode(saved["state"], self.scheduler.state_dict(), "the schedule's state")

    def _note_changes(self, groups: Sequence[Group], saved_rates: Sequence[Any]) -> None:
        for key, (before, now) in self._changed.items():
            if key == "lr" and self.scheduler is not None:
                has_effect = not all(
                    are_equal(group.get("lr"), rate)
                    for group, rate in zip(groups, saved_rates, strict=True)
                )
            else:
                has_effect = any(key in group and are_equal(group[key], now) for group in groups)
            effect = "" if has_effect else ", which changes nothing: the schedule sets it"
            self.notes.append(
                f"{key} is {_shown(now)} in the configuration, {_shown(before)} when the checkpoint"
                f" was written{effect}"
            )

    def _note_new_rate(
        self, groups: Sequence[Group], saved_rates: Sequence[Any], *, is_replayed: bool
    ) -> None:
        scheduled = self.scheduler is not None
        if not is_replayed and not (scheduled and "lr" in self._changed):
            return
        for group, rate in zip(groups, saved_rates, strict=True):
            if rate is None or are_equal(group.get("lr"), rate):
                continue
            reason = "without the schedule of the checkpoint"
            if scheduled:
                reason = "with the current schedule"
            self.notes.append(
                f"the learning rate continues at {_shown(group.get('lr'))}, {reason}; it was"
                f" {_shown(rate)}"
            )
            return  # One group is enough to report.


class _GroupsOnly(Optimizer):
    """Optimizer without parameters, whose groups a schedule changes."""

    def __init__(self, groups: Sequence[Group], defaults: Mapping[str, Any]) -> None:
        # torch refuses a group without parameters.
        copies = [
            {**copy.deepcopy(group), "params": [torch.zeros(1, requires_grad=True)]}
            for group in groups
        ]
        for group in copies:
            group.pop("initial_lr", None)
        # A schedule reads the defaults to know whether there is a momentum.
        super().__init__(copies, dict(defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def are_equal(left: Any, right: Any) -> bool:
    """Return True if two settings are equal as numbers, tensors, lists or tuples."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        if left is None or right is None:
            return False
        left = torch.as_tensor(left, dtype=torch.float64).cpu()
        return torch.equal(left, torch.as_tensor(right, dtype=torch.float64).cpu())
    # A file has lists where code has tuples.
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(are_equal, left, right))
    return bool(left == right)


def _in_form_of(example: Any, value: Any) -> Any:
    """Return a number in the form of `example`: a tensor on its device, or a number."""
    if isinstance(example, torch.Tensor) and not isinstance(value, torch.Tensor):
        return torch.full_like(example, value)
    if isinstance(value, torch.Tensor) and isinstance(example, float | int):
        return value.item()
    return value


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
