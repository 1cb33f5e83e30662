"""Which values apply when a run resumes from a checkpoint: the saved ones, or those of the
configuration.

A value of the optimizer's groups that the configuration has otherwise than when the checkpoint was
written is the configuration's; every other one goes on as it was, bit for bit. A schedule from a
configuration that changed, or whose learning rate did, is taken as if the run had had it from the
start: a second one is built and stepped to the position. A schedule that was passed to
`plait.initialize` keeps its own state, scaled where the learning rate that it starts from has
changed.
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
from plait._torch.learning_rates import scale_rates
from plait.errors import CheckpointError, InputError
from plait.optim.lr_schedules import Scheduler, ScheduleSource, build_scheduler

_KERNEL = ("fused", "foreach", "capturable", "differentiable")
"""How a step is computed here; never a checkpoint's."""
_SCHEDULED = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "betas",
    "momentum",
    "base_momentum",
    "max_momentum",
)
"""What schedules set in groups."""

Group = dict[str, Any]


def configured_groups(optimizer: Optimizer) -> list[Group]:
    """The groups' values as they were configured. A schedule that was built before has changed `lr`
    and kept it in `initial_lr`.
    """
    found = []
    for group in optimizer.param_groups:
        values = {
            key: copy.deepcopy(value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        if "initial_lr" in values:
            values["lr"] = values.pop("initial_lr")
        found.append(values)
    return found


def check_scheduler(scheduler: Scheduler | None) -> Scheduler | None:
    """The same. Raises InputError for a schedule that is passed to `plait.initialize` and cannot be
    stepped or saved here.
    """
    given: object = scheduler
    if scheduler is None:
        return None
    if isinstance(given, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "lr_scheduler: ReduceLROnPlateau follows a metric, and a schedule here is stepped by"
            " the step alone; leave it out, build it over engine.optimizer, call its step(metric)"
            " after each validation, and keep its state_dict() in client_state"
        )
    try:
        exact.encode(scheduler.state_dict(), f"the state of {type(scheduler).__name__}")
    except CheckpointError as error:
        raise InputError(f"lr_scheduler: {error}, or leave it out of its state_dict()") from error
    return scheduler


def schedule_facts(scheduler: Scheduler | None, source: ScheduleSource | None) -> Any:
    """What a checkpoint keeps of a schedule: JSON."""
    if scheduler is None:
        return None
    return {
        "type": type(scheduler).__qualname__,
        "source": source.facts if source is not None else None,
        "state": exact.encode(scheduler.state_dict(), f"the state of {type(scheduler).__name__}"),
    }


@dataclass
class Resume:
    """Decides, and reports where it differs from the checkpoint."""

    optimizer: Optimizer
    configured: Sequence[Group]
    """Of the optimizer's groups, now."""
    names: Sequence[Sequence[str]]
    """The groups' parameters."""
    saved_groups: Sequence[Mapping[str, Any]]
    scheduler: Scheduler | None
    source: ScheduleSource | None
    saved_schedule: Mapping[str, Any] | None
    steps: int
    """Updates that were applied."""
    notes: list[str] = field(default_factory=list)
    _changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Key to (before, now), of the configured values."""
    _replayed: LRScheduler | None = None
    _ratios: list[float] | None = None

    def groups(self) -> list[Group]:
        """The values of every group, to be put into the optimizer."""
        by_name = {name: entry for entry in self.saved_groups for name in entry["params"]}
        found = []
        saved_rates = []
        anew = self._schedule_changed()
        for index, names in enumerate(self.names):
            entries = list(
                {id(by_name[name]): by_name[name] for name in names if name in by_name}.values()
            )
            saved_rates.append(exact.decode(entries[0]["now"].get("lr")) if entries else None)
            found.append(self._group(index, entries, anew=anew))
        if self.source is not None and (anew or any(key in _SCHEDULED for key in self._changed)):
            found = self._replay(found)
        elif self.source is None and self.scheduler is not None and "lr" in self._changed:
            found = self._scaled(found, saved_rates)
        self._say(found, saved_rates, anew=anew)
        return found

    def _group(self, index: int, entries: Sequence[Mapping[str, Any]], *, anew: bool) -> Group:
        configured = self.configured[index]
        current = self.optimizer.param_groups[index]
        keys = [key for key in current if key not in ("params", "param_names")]
        keys += [key for entry in entries for key in entry["now"] if key not in keys]
        values: Group = {}
        for key in dict.fromkeys(keys):
            own = configured.get(key, current.get(key))
            were = [entry["configured"][key] for entry in entries if key in entry["configured"]]
            are = [entry["now"][key] for entry in entries if key in entry["now"]]
            if key in _KERNEL:
                values[key] = current.get(key)
            elif key in configured and any(
                not _same(exact.decode(was, own), configured[key]) for was in were
            ):
                self._changed.setdefault(key, (exact.decode(were[0], own), configured[key]))
                values[key] = configured[key]
            elif anew and key in _SCHEDULED:
                if key in configured:
                    values[key] = configured[key]
            elif are and all(one == are[0] for one in are):
                values[key] = _like(exact.decode(are[0], own), own)
            elif own is not None:
                values[key] = own
        return {key: value for key, value in values.items() if key not in _KERNEL or key in current}

    def _schedule_changed(self) -> bool:
        saved = self.saved_schedule
        if self.source is not None:
            return saved is None or saved["source"] != self.source.facts
        if self.scheduler is None:
            return saved is not None
        if saved is None or saved["source"] is not None:
            self.notes.append(
                f"the checkpoint holds no state of the {type(self.scheduler).__name__} that was"
                " passed; it begins at its start"
            )
        elif saved["type"] != type(self.scheduler).__qualname__:
            raise CheckpointError(
                f"the checkpoint was written with lr_scheduler = {saved['type']}, and a"
                f" {type(self.scheduler).__qualname__} was passed, which cannot take over its"
                " position; pass the same, or describe the schedule in the configuration, where it"
                " may change"
            )
        return False

    def _replay(self, groups: Sequence[Group]) -> list[Group]:
        """The schedule from the start to the position, on groups without parameters."""
        assert self.source is not None
        state = self.saved_schedule["state"] if self.saved_schedule is not None else {}
        position = state.get("last_epoch", self.steps) if isinstance(state, dict) else self.steps
        bare = _Bare(self.configured, self.optimizer.defaults)
        with warnings.catch_warnings():
            # no optimizer step comes between, and none is meant to
            warnings.simplefilter("ignore", UserWarning)
            self._replayed = build_scheduler(
                self.source.spec, bare, total_steps=self.source.total_steps
            )
            for _ in range(position):
                self._replayed.step()
        values = [
            {key: group[key] for key in _SCHEDULED if key in group} for group in bare.param_groups
        ]
        return [{**group, **scheduled} for group, scheduled in zip(groups, values, strict=True)]

    def _scaled(self, groups: Sequence[Group], saved_rates: Sequence[Any]) -> list[Group]:
        """A schedule that was passed goes on with its rates in proportion to the learning rate that
        it starts from.
        """
        if not hasattr(self.scheduler, "base_lrs"):
            return [
                {**group, "lr": rate} if rate is not None else group
                for group, rate in zip(groups, saved_rates, strict=True)
            ]
        by_name = {name: entry for entry in self.saved_groups for name in entry["params"]}
        self._ratios = []
        found = []
        for group, rate, names, configured in zip(
            groups, saved_rates, self.names, self.configured, strict=True
        ):
            entry = next((by_name[name] for name in names if name in by_name), None)
            was = exact.decode(entry["configured"].get("lr")) if entry is not None else None
            now = configured.get("lr")
            ratio = float(now) / float(was) if was and now is not None else 1.0
            self._ratios.append(ratio)
            values = {"lr": _like(float(rate) * ratio, group["lr"])} if rate is not None else {}
            found.append(
                {**group, **values, **({"initial_lr": now} if "initial_lr" in group else {})}
            )
        return found

    def restore_schedule(self) -> None:
        """Put the schedule's own state back, after the optimizer has its values."""
        if self.scheduler is None:
            return
        if self._replayed is not None:
            self.scheduler.load_state_dict(self._replayed.state_dict())
            return
        saved = self.saved_schedule
        if saved is None or (self.source is None and saved["source"] is not None):
            return
        self.scheduler.load_state_dict(
            exact.decode(saved["state"], self.scheduler.state_dict(), "the schedule's state")
        )
        if self._ratios is not None:
            scale_rates(self.scheduler, self._ratios)

    def _say(self, groups: Sequence[Group], saved_rates: Sequence[Any], *, anew: bool) -> None:
        scheduled = self.scheduler is not None
        for key, (before, now) in self._changed.items():
            takes = any(key in group and _same(group[key], now) for group in groups)
            if key == "lr" and scheduled:
                takes = not all(
                    _same(group.get("lr"), rate)
                    for group, rate in zip(groups, saved_rates, strict=True)
                )
            effect = "" if takes else ", which changes nothing: the schedule sets it"
            self.notes.append(
                f"{key} is {_shown(now)} in the configuration, {_shown(before)} when the checkpoint"
                f" was written{effect}"
            )
        for group, rate in zip(groups, saved_rates, strict=True):
            if (
                rate is not None
                and (anew or (scheduled and "lr" in self._changed))
                and not _same(group.get("lr"), rate)
            ):
                why = (
                    "with the schedule as it is now"
                    if scheduled
                    else "without the schedule that it had"
                )
                self.notes.append(
                    f"the learning rate goes on at {_shown(group.get('lr'))}, {why}; it was"
                    f" {_shown(rate)}"
                )
                break


class _Bare(Optimizer):
    """Groups for a schedule to work on."""

    def __init__(self, groups: Sequence[Group], defaults: Mapping[str, Any]) -> None:
        # A schedule looks at defaults to know whether there is a momentum.
        own = [
            {**copy.deepcopy(group), "params": [torch.zeros(1, requires_grad=True)]}
            for group in groups
        ]
        for group in own:
            group.pop("initial_lr", None)
        super().__init__(own, dict(defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing to update."""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if one is None or other is None:
            return False
        return bool(
            torch.equal(
                torch.as_tensor(one, dtype=torch.float64).cpu(),
                torch.as_tensor(other, dtype=torch.float64).cpu(),
            )
        )
    # a file has lists where code has tuples
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _like(value: Any, own: Any) -> Any:
    """A number in the form that this run keeps it in: a tensor on its device, or a number."""
    if isinstance(own, torch.Tensor) and not isinstance(value, torch.Tensor):
        return torch.full_like(own, value)
    if isinstance(value, torch.Tensor) and isinstance(own, float | int):
        return value.item()
    return value


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
