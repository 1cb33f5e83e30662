"""Hooks of a training step, which techniques attach and the step calls.

Note [Hooks of a step]
    A hook overrides the methods that it needs. A step calls them in this order:

    1. `transform` for every micro-batch.
    2. For every micro-batch: `before_microbatch`, the forward, and the backward inside the
       context `backward`.
    3. `finish_reduction`. Gradients are the sums over all ranks afterwards.
    4. `before_update`, and then the optimizer step, unless the update is skipped because of the
       global gradient norm.
    5. `after_step`.

    `order.HOOKS` is the order in which the hooks of all techniques are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from plait.parallel.micro_batches import with_explicit_entries

FailureScope = Literal["forward", "step"]
"""Work that a failure has lost: only a forward, or all gradients of the step."""


@dataclass(frozen=True)
class StepEnd:
    """Outcome of a training step, which `StepHook.after_step` receives."""

    skipped: bool
    """True if the update was skipped, because gradients were not finite."""
    rescaled: float = 1.0
    """Factor by which the loss scale, and with it the gradients of the next step, changed."""


class StepHook:
    """Base class of the hooks of a training step. By default its methods do nothing.

    See Note [Hooks of a step]."""

    description: str = ""
    """Description of the hook's choice at the start, with the reason. Empty without a choice."""

    is_default_choice: bool = False
    """True if `description` describes a default. The first lines of a run leave it out."""

    has_refused: bool = False
    """True if the hook has refused a gradient. Earlier gradients of the step must be dropped."""

    def transform(self, batch: Any) -> Any:
        """Return the micro-batch that replaces `batch` for the model and the loss.

        It is called in `train_batch`, `eval_batch` and `predict`. Tensors are on the device. If
        the batch is a mapping, it has `shift_labels` and `position_ids` (see
        `with_explicit_entries`), so that its sequences can be split.
        """
        return batch

    def join(self, output: Any, batch: Any) -> Any:
        """Return the output for `batch`, given the output for the transformed batch. Collective.

        It is called in `predict`.
        """
        return output

    def before_microbatch(self, last: bool) -> None:
        """Run before the forward of a micro-batch. `last` marks the last one of a step."""

    def backward(self) -> AbstractContextManager[Any]:
        """Return a context that wraps every backward of the engine."""
        return nullcontext()

    def after_backward(self) -> None:
        """Handle the end of a backward whose gradients the caller may read before the step ends."""

    def finish_reduction(self) -> None:
        """Finish the sums of gradients after the last backward. Collective.

        Gradients are the sums over all ranks after all hooks have run.
        """

    def before_update(self) -> None:
        """Run just before the optimizer, when gradients are unscaled and clipped.

        It is not called in a step that is skipped.
        """

    def after_step(self, end: StepEnd) -> str:
        """Handle the end of a step, skipped or not.

        Returns:
            A description of a decision about the next steps, or an empty string.
        """
        return ""

    def drop_gradients(self) -> None:
        """Drop the state that belongs to the gradients accumulated so far in this step."""

    def zero_gradients(self, parameters: set[torch.Tensor], set_to_none: bool) -> None:
        """Handle a call of `zero_grad` by the user within a step.

        The attribute `grad` of the parameters has already changed.

        Args:
            parameters: Parameters whose gradients were zeroed, including the shards of gathered
                parameters.
            set_to_none: Whether their gradients were dropped instead of filled with zeros.
        """

    def backward_failed(self) -> bool:
        """Return True if a backward of the user's training loop ended with an exception."""
        return False

    def on_error(self, lost: FailureScope) -> None:
        """Clean up after a failure that all ranks know of, before the next use. Collective.

        If the step was lost, `drop_gradients` follows.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank for a checkpoint, by name. They are not copied."""
        return {}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint.

        Args:
            saved: States of all hooks on this rank. Empty if another layout wrote the checkpoint.
        """

    def release(self) -> None:
        """Remove all that this hook registered on the model, before another owner takes it."""

    def close(self) -> None:
        """End threads and close files. Called after `release` when the engine is closed."""


class UncopiedHook:
    """Forward hook of a module that calls a function, and does nothing in a copy of the module.

    The function refers to the original module, so it must not run for a copy. A module with such a
    hook can be copied and pickled.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type[UncopiedHook], tuple[()]]:
        return UncopiedHook, ()


Hook = TypeVar("Hook", bound=StepHook)


class Hooks:
    """Hooks of a model, in the order in which they are called.

    For each method, a list holds the bound methods of the hooks that override it. The lists are
    built once, so that a step does not call empty methods.
    """

    def __init__(self, hooks: Iterable[StepHook] = ()) -> None:
        self.all: tuple[StepHook, ...] = tuple(hooks)
        self.transform: list[Callable[[Any], Any]] = self._overrides("transform")
        self.join: list[Callable[[Any, Any], Any]] = self._overrides("join")
        self.before_microbatch: list[Callable[[bool], None]] = self._overrides("before_microbatch")
        self.around_backward: list[Callable[[], AbstractContextManager[Any]]] = self._overrides(
            "backward"
        )
        self.after_backward: list[Callable[[], None]] = self._overrides("after_backward")
        self.finish_reduction: list[Callable[[], None]] = self._overrides("finish_reduction")
        self.before_update: list[Callable[[], None]] = self._overrides("before_update")
        self.after_step: list[Callable[[StepEnd], str]] = self._overrides("after_step")
        self.drop_gradients: list[Callable[[], None]] = self._overrides("drop_gradients")
        self.zero_gradients: list[Callable[[set[torch.Tensor], bool], None]] = self._overrides(
            "zero_gradients"
        )
        self.backward_failed: list[Callable[[], bool]] = self._overrides("backward_failed")
        self.on_error: list[Callable[[FailureScope], None]] = self._overrides("on_error")
        self.load_state: list[Callable[[Mapping[str, torch.Tensor]], None]] = self._overrides(
            "load_state"
        )
        self.release: list[Callable[[], None]] = self._overrides("release")
        self.close: list[Callable[[], None]] = self._overrides("close")

    def _overrides(self, name: str) -> list[Callable[..., Any]]:
        overrides: list[Callable[..., Any]] = []
        for hook in self.all:
            if getattr(type(hook), name) is not getattr(StepHook, name):
                overrides.append(getattr(hook, name))
        return overrides

    def find(self, kind: type[Hook]) -> Hook | None:
        """Return the first hook of a class, or None."""
        return next((hook for hook in self.all if isinstance(hook, kind)), None)

    @property
    def description(self) -> str:
        """Description of the choices that the hooks made at the start of the run."""
        return ". ".join(hook.description for hook in self.all if hook.description)

    @property
    def non_default_description(self) -> str:
        """Description of those choices that are not defaults."""
        hooks = [hook for hook in self.all if not hook.is_default_choice]
        return ". ".join(hook.description for hook in hooks if hook.description)

    def prepare(self, batch: Any) -> Any:
        """Apply the `transform` of all hooks to a micro-batch."""
        # A transform may split sequences. Targets and positions that follow from the place of a
        # token in its sequence must be entries before that.
        if self.transform:
            batch = with_explicit_entries(batch)
        for transform in self.transform:
            batch = transform(batch)
        return batch

    def join_output(self, output: Any, batch: Any) -> Any:
        """Return the output for the original micro-batch. Collective.

        It reverses `prepare`, for example by gathering the sequence.

        Args:
            output: The model's output for the prepared micro-batch.
            batch: The original micro-batch.
        """
        for join in self.join:
            output = join(output, batch)
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context that wraps a backward."""
        with ExitStack() as stack:
            for enter in self.around_backward:
                stack.enter_context(enter())
            # A model of another engine that receives a gradient now can name the cause.
            _RUNNING_BACKWARDS.append(self)
            stack.callback(_RUNNING_BACKWARDS.remove, self)
            yield

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of all hooks, by name."""
        return {name: tensor for hook in self.all for name, tensor in hook.state().items()}


_RUNNING_BACKWARDS: list[Hooks] = []
"""Hooks of the engines whose backward is running."""


def backward_underway() -> bool:
    """Return True if any engine of this process runs a backward now."""
    return bool(_RUNNING_BACKWARDS)
