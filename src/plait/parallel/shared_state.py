"""Comparison of the state that a forward changes, between ranks that share a micro-batch.

Ranks of tp and cp compute one micro-batch together. With context parallelism, and in the parts of a
model where tensor parallelism splits tokens or features, a module receives a part of its input. A
running mean is then the mean of a part, and a forward that reads it has another result than in one
process. A counter, in contrast, is the same on all ranks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait._torch.modules import direct_attributes, direct_buffers, is_unversioned
from plait._torch.tensors import local_tensor, version_of
from plait.cluster.mesh import Mesh
from plait.cluster.small_messages import all_gather_objects
from plait.errors import warn
from plait.names import listed_names
from plait.parallel.hooks import StepEnd, StepHook, UncopiedHook

_TOLERANCE = 1e-3
"""Relative difference between ranks that rounding may explain."""


class SharedState(StepHook):
    """Hook that warns after the first step about state that differs between ranks of tp and cp."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, own_loop: bool, sequence_parallel: bool
    ) -> None:
        """Watch the state that the first step changes.

        Args:
            model: The model on this rank.
            mesh: The mesh of all ranks.
            own_loop: Whether the user's own training loop calls the model. If so, the comparison
                takes place in the second forward.
            sequence_parallel: Whether tensor parallelism splits sequences.
        """
        self._model = weakref.ref(model)
        self._mesh = mesh
        self._own_loop = own_loop
        self._sequence_parallel = sequence_parallel
        self._before: dict[str, _Entry] | None = None
        self._handle = model.register_forward_pre_hook(UncopiedHook(self._before_forward))

    # A compiled root runs its hooks in the traced code.
    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._before is None:
            self._before = _state_of(module)
        elif self._own_loop:
            self._compare(module)

    def after_step(self, end: StepEnd) -> str:
        """Compare the state between ranks after the first step. Collective."""
        model = self._model()
        if self._before is not None and model is not None:
            self._compare(model)
        return ""

    def release(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()
        self._before = None

    def _compare(self, model: nn.Module) -> None:
        before = self._before
        assert before is not None
        self.release()
        changed = {
            name: _summary(entry.value)
            for name, entry in _state_of(model).items()
            if name not in before or entry.has_changed(before[name])
        }
        for axis in ("cp", "tp"):
            group = self._mesh.group(axis)
            if group is None:
                continue
            summaries = all_gather_objects(changed, group)
            differing = _differing_names(summaries)
            # Other replicas see the same.
            if differing and group.rank() == 0 and self._mesh.dp_index == 0:
                setting = f"parallel.{axis} = 1"
                if axis == "tp" and self._sequence_parallel:
                    setting = "parallel.sequence_parallel = false"
                warn(
                    f"parallel.{axis}: the forward sets {listed_names(differing, 2)} to another"
                    " value on each rank, because each has a part of the tokens or features. If the"
                    " model computes with it, results are not those of one process: change it in"
                    f" the training loop, between two steps, or use {setting}"
                )


@dataclass(frozen=True)
class _Entry:
    """Buffer or attribute of a module."""

    value: Any
    version: int
    is_unversioned: bool

    def has_changed(self, before: _Entry) -> bool:
        if self.value is not before.value or self.version != before.version:
            return True
        return self.is_unversioned


def _state_of(model: nn.Module) -> dict[str, _Entry]:
    """Return the numbers and tensors among the buffers and attributes of all modules, by name."""
    state = {}
    for owner, module in model.named_modules():
        for name, value in {**direct_attributes(module), **direct_buffers(module)}.items():
            version = 0
            if isinstance(value, torch.Tensor):
                if value.is_inference():
                    continue
                version = version_of(value)
            elif not isinstance(value, bool | int | float):
                continue
            entry = _Entry(value, version, is_unversioned(module, name))
            state[f"{owner}.{name}".removeprefix(".")] = entry
    return state


def _summary(value: Any) -> tuple[float, float]:
    """Return (sum of the elements of a value, sum of their magnitudes)."""
    if not isinstance(value, torch.Tensor):
        return float(value), abs(float(value))
    values = local_tensor(value.detach()).double()
    return values.sum().item(), values.abs().sum().item()


def _differing_names(summaries: list[dict[str, tuple[float, float]]]) -> list[str]:
    first = summaries[0]
    names = sorted(set().union(*summaries))
    return [
        name
        for name in names
        if not all(_is_close(first.get(name), other.get(name)) for other in summaries)
    ]


def _is_close(first: tuple[float, float] | None, second: tuple[float, float] | None) -> bool:
    if first is None or second is None:
        return first == second
    limit = _TOLERANCE * max(first[1], second[1])
    return abs(first[0] - second[0]) <= limit and abs(first[1] - second[1]) <= limit
