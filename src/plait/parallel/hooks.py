"""Hooks of a training step, besides forward, backward and the optimizer: a technique attaches them,
the step calls them.

A step is: `transform` of every micro-batch; for every micro-batch `before_microbatch`, its forward,
its backward inside of `backward`; then `finish_reduction`, the norm and the decision to update or
to skip, `before_update`, the optimizer, `after_step`. A hook overrides what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from plait.parallel.micro_batches import explicit

Lost = Literal["forward", "step"]
"""What a failure has lost: a forward, which has not changed gradients, or all gradients of the
step.
"""


@dataclass(frozen=True)
class StepEnd:
    """How a step has ended."""

    skipped: bool
    """Gradients were not finite; nothing was updated."""
    rescaled: float = 1.0
    """The factor by which the loss scale, and so the next gradients, have changed."""


class StepHook:
    """A hook that does nothing; subclasses override its methods."""

    said: str = ""
    """A description of what it does on this machine, with the reason, where that was decided at the
    start.
    """

    said_is_default: bool = False
    """Whether `said` describes a default, which the first lines of a run leave out."""

    has_refused: bool = False
    """Whether it has refused a gradient, so that what came before it has to be dropped."""

    def transform(self, batch: Any) -> Any:
        """The micro-batch that model and loss are given in place of `batch`, which is on the
        device: in `train_batch`, `eval_batch` and `predict`. A mapping has `shift_labels` and
        `position_ids` (see `explicit`), so that its sequences can be cut.
        """
        return batch

    def join(self, output: Any, batch: Any) -> Any:
        """What `predict` returns for a micro-batch, from the outputs of what `transform` made of
        it. Collective.
        """
        return output

    def before_microbatch(self, last: bool) -> None:
        """Before the forward of a micro-batch. `last`: of its step."""

    def backward(self) -> AbstractContextManager[Any]:
        """Around every backward that the engine runs."""
        return nullcontext()

    def after_backward(self) -> None:
        """After a backward whose gradients the caller may read before the step ends."""

    def finish_reduction(self) -> None:
        """After the last backward: gradients are the sums over all ranks when all hooks have done
        this. Collective.
        """

    def before_update(self) -> None:
        """Gradients are unscaled and clipped, and the optimizer is next. Not called in a step that
        is skipped.
        """

    def after_step(self, end: StepEnd) -> str:
        """The step has ended, skipped or not. Returns a description of a decision about the next
        steps; empty where there is none.
        """
        return ""

    def drop_gradients(self) -> None:
        """The gradients of the step so far are dropped."""

    def on_error(self, lost: Lost) -> None:
        """A failure of all ranks is cleared, before the model is used again; where the step was
        lost, `drop_gradients` follows. Collective.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's state between steps, by name, for a checkpoint; the tensors themselves."""
        return {}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """A checkpoint was loaded. `saved` holds what `state` of all hooks gave on this rank;
        nothing where that was on another layout.
        """

    def release(self) -> None:
        """The model is passed to another owner: remove all hooks from it."""

    def close(self) -> None:
        """After `release`, where the engine is closed: end threads and files."""


Hook = TypeVar("Hook", bound=StepHook)
_UNDERWAY: list[Hooks] = []
"""Of the engines whose backward runs now."""


def backward_underway() -> bool:
    """Whether a backward of any engine of this process runs now."""
    return bool(_UNDERWAY)


class Hooks:
    """The hooks of a model, in the order in which they are called. Each list has the calls of those
    that override the method, made once.
    """

    def __init__(self, hooks: Iterable[StepHook] = ()) -> None:
        self.all: tuple[StepHook, ...] = tuple(hooks)
        self.transform: list[Callable[[Any], Any]] = self._bound("transform")
        self.join: list[Callable[[Any, Any], Any]] = self._bound("join")
        self.before_microbatch: list[Callable[[bool], None]] = self._bound("before_microbatch")
        self.around_backward: list[Callable[[], AbstractContextManager[Any]]] = self._bound(
            "backward"
        )
        self.after_backward: list[Callable[[], None]] = self._bound("after_backward")
        self.finish_reduction: list[Callable[[], None]] = self._bound("finish_reduction")
        self.before_update: list[Callable[[], None]] = self._bound("before_update")
        self.after_step: list[Callable[[StepEnd], str]] = self._bound("after_step")
        self.drop_gradients: list[Callable[[], None]] = self._bound("drop_gradients")
        self.on_error: list[Callable[[Lost], None]] = self._bound("on_error")
        self.load_state: list[Callable[[Mapping[str, torch.Tensor]], None]] = self._bound(
            "load_state"
        )
        self.release: list[Callable[[], None]] = self._bound("release")
        self.close: list[Callable[[], None]] = self._bound("close")

    def _bound(self, name: str) -> list[Callable[..., Any]]:
        return [
            getattr(hook, name)
            for hook in self.all
            if getattr(type(hook), name) is not getattr(StepHook, name)
        ]

    def of(self, kind: type[Hook]) -> Hook | None:
        """The first hook of a kind."""
        return next((hook for hook in self.all if isinstance(hook, kind)), None)

    @property
    def said(self) -> str:
        """A description of what all of them decided at the start."""
        return ". ".join(hook.said for hook in self.all if hook.said)

    @property
    def notable(self) -> str:
        """The part of `said` that does not describe a default."""
        return ". ".join(hook.said for hook in self.all if hook.said and not hook.said_is_default)

    def prepared(self, batch: Any) -> Any:
        """A micro-batch as all of them transform it; itself where none does."""
        if self.transform:
            batch = explicit(batch)
        for transform in self.transform:
            batch = transform(batch)
        return batch

    def joined(self, output: Any, batch: Any) -> Any:
        """The output for a micro-batch as it was before `prepared`."""
        for join in self.join:
            output = join(output, batch)
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward."""
        with ExitStack() as stack:
            for around in self.around_backward:
                stack.enter_context(around())
            _UNDERWAY.append(self)
            stack.callback(_UNDERWAY.remove, self)
            yield

    def state(self) -> dict[str, torch.Tensor]:
        """Of all of them."""
        return {name: tensor for hook in self.all for name, tensor in hook.state().items()}
