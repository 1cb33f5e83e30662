"""What is alive at every moment of a dry step, recorded as units are entered and left: what `forecast` prices a real one by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from plait._torch import tree_leaves
from plait.engine.dryrun import DryRun
from plait.parallel.moments import BESIDE, HEAD, Alive, Direction, Moment

BACKWARD = -4
"""Unit of what is made during backward."""


class Recorder(DryRun):
    """Cuts what is alive into moments."""

    def __init__(self, *, known: Any, drops_gradients: bool) -> None:
        super().__init__(known=known)
        self.gradients: Counter[int] = Counter()
        """Bytes of gradients that are accumulated, by block."""
        self.drops_gradients = drops_gradients
        """Whether a block's gradients are gone when its backward ends."""
        self._done: list[Moment] = []
        self._now: tuple[Direction, int] | None = None
        self._peak = self._peak_with = Alive()

    def mark(self, direction: Direction, unit: int) -> None:
        """A moment begins."""
        if self._now == (direction, unit):
            return
        self._close()
        self._now = (direction, unit)
        self._peak, self._peak_with = self._alive(with_gradients=False), self._alive()

    def take(self) -> tuple[Moment, ...]:
        """The moments so far; they are forgotten."""
        self._close()
        done, self._done, self._now = tuple(self._done), [], None
        return done

    def accumulated(self, parameter: nn.Parameter, unit: int) -> None:
        """The gradient of a parameter has been made."""
        assert parameter.grad is not None
        before = self.total
        self.forget([parameter.grad])
        self.gradients[unit] += before - self.total
        self._compare()

    def _close(self) -> None:
        if self._now is None:
            return
        direction, unit = self._now
        self._done.append(Moment(direction, unit, self._peak, self._peak_with, self._alive()))
        if direction == "backward" and unit >= 0 and self.drops_gradients:
            self.gradients[unit] = 0

    def _appeared(self, storage: torch.UntypedStorage) -> None:
        super()._appeared(storage)
        self._compare()

    def _compare(self) -> None:
        if self.total > self._peak.total:
            self._peak = self._alive(with_gradients=False)
        if self.total + self.gradients.total() > self._peak_with.total:
            self._peak_with = self._alive()

    def _alive(self, *, with_gradients: bool = True) -> Alive:
        logits, temporaries = self.bytes[HEAD], self.bytes[BACKWARD]
        root = self.gradients[BESIDE]
        return Alive(
            activations=self.total - logits - temporaries,
            logits=logits,
            temporaries=temporaries,
            gradients=self.gradients.total() - root if with_gradients else 0,
            root_gradients=root if with_gradients else 0,
        )


def watch(
    model: nn.Module, units: dict[str, int], recorder: Recorder, *, last: bool, unit_of: dict[nn.Parameter, int]
) -> Callable[[], None]:
    """Tell the recorder which block runs, forward and backward, and which gradients are made. Returns what removes the watch."""
    handles = []
    first_block, last_block = min(units.values()), max(units.values())

    def entering(index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        recorder.mark("forward", index)
        recorder.unit = index
        if isinstance(hidden, torch.Tensor):
            recorder.claim(hidden, index)
            if index == first_block and hidden.requires_grad:
                hidden.register_hook(lambda grad: recorder.mark("backward", BESIDE))

    def leaving(index: int, _module: nn.Module, _args: object, output: Any) -> None:
        ends = last and index == last_block
        recorder.mark("forward", HEAD if ends else BESIDE)
        recorder.unit = HEAD if ends else BESIDE
        if ends:
            for leaf in tree_leaves(output)[:1]:
                recorder.claim(leaf, HEAD)
        when_gradient_comes(output, lambda: recorder.mark("backward", index))

    for name, index in units.items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(entering, index), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leaving, index)))
    for parameter, unit in unit_of.items():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(lambda p, unit=unit: recorder.accumulated(p, unit)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def when_gradient_comes(output: Any, call: Callable[[], None]) -> None:
    """Call when the first gradient of a tensor of `output` has been computed."""
    if not isinstance(output, torch.Tensor | tuple | list | dict):
        output = vars(output)
    called = False

    def first(_: torch.Tensor) -> None:
        nonlocal called
        if not called:
            called = True
            call()

    for leaf in tree_leaves(output):
        leaf = getattr(leaf, "hidden", leaf)  # logits that are not made yet
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(first)
