"""The run for a person: a live line on a terminal, plain lines in a pipe or a log file. The same
words in both.

Give it to one rank only. It reads no clock of its own: rates and the time that is left come from
the steps.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from plait.events import (
    CheckpointSaved,
    CommunicationDecided,
    Event,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from plait.model.facts import model_facts
from plait.parallel.pipeline.account import balance, stage_rows
from plait.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from plait.train.session import ValidatedRun

_WINDOW_SECONDS = 20.0


class Window:
    """Rates over the last steps: at least one, and as many as fit in twenty seconds. The first, in
    which caches and buffers come into being, counts only as long as it is the only one.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque()
        self._seen = 0

    @property
    def empty(self) -> bool:
        """Whether there was no step yet."""
        return self._seen == 0

    def add(self, event: StepDone) -> None:
        """Take in a step."""
        self._seen += 1
        if self._seen == 2:
            self._steps.clear()
        self._steps.append((event.tokens, event.seconds))
        while len(self._steps) > 1 and self._seconds() > _WINDOW_SECONDS:
            self._steps.popleft()

    def _seconds(self) -> float:
        return sum(seconds for _, seconds in self._steps)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return sum(tokens for tokens, _ in self._steps) / max(self._seconds(), 1e-9)

    @property
    def seconds_per_step(self) -> float:
        """Mean, without validations and checkpoints."""
        return self._seconds() / max(len(self._steps), 1)


class ProgressLines:
    """A listener that shows a run on `console`: live where that is a terminal.

    The first step, every `every` steps and the last one leave a line, with the mean loss since the
    line before; between them a terminal shows each step in place.
    """

    def __init__(self, console: Console, *, every: int) -> None:
        self._console = console
        self._every = every
        self._last_step = 0
        self._losses: list[float] = []
        self._window = Window()
        self._live: Progress | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._begin(event)
            case StepDone():
                self._step(event)
            case CommunicationDecided():
                self._line(event.communication, event.step)
            case Validated():
                perplexity = math.exp(event.loss) if event.loss < 700 else math.inf
                self._line(
                    f"validation loss {event.loss:.4f}, perplexity {perplexity:,.1f},"
                    f" {event.weight:,.0f} targets",
                    event.step,
                )
            case CheckpointSaved():
                self._line(
                    f"checkpoint {event.folder}, {format_seconds(event.seconds)}", event.step
                )
            case Sampled():
                self._line("the model writes:", event.step)
                for line in event.text.rstrip().splitlines():
                    self._console.print(Text(f"    {line}"), soft_wrap=True)
            case RunEnded():
                self._line(f"{event.reason} after {format_seconds(event.seconds)}", event.step)
                self.close()

    def close(self) -> None:
        """Take the live line away. A RunEnded does it too; this is for a run that failed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, event: RunStarted) -> None:
        self._last_step = event.last_step
        if event.notable_communication:
            self._console.print(f"{'ranks':<8}{event.notable_communication}", soft_wrap=True)
        for note in event.resumed:
            self._console.print(f"{'resume':<8}{note}", soft_wrap=True)
        if self._console.is_terminal:
            # One row however narrow the terminal is: what does not fit is cut off at the end.
            words = TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            self._live = Progress(
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                words,
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.add_task(
                "the first step is the slowest", total=event.last_step, completed=event.first_step
            )
            self._live.start()

    def _step(self, event: StepDone) -> None:
        first = self._window.empty
        self._window.add(event)
        if not event.skipped:
            self._losses.append(event.loss)
        left = format_seconds((self._last_step - event.step) * self._window.seconds_per_step)
        parts = [
            f"{self._window.tokens_per_second:,.0f} tok/s",
            f"{left} left",
            format_bytes(event.memory_bytes),
            f"lr {event.learning_rate:.1e}",
            f"norm {event.grad_norm:.2f}",
        ]
        if event.skipped:
            parts.insert(0, f"skipped, overflow at scale {event.loss_scale:g}")
        if self._live is not None:
            self._live.update(
                self._live.task_ids[0],
                completed=event.step,
                description="  ".join([f"loss {event.loss:.4f}", *parts]),
            )
        if first or event.skipped or event.step % self._every == 0 or event.step == self._last_step:
            mean = sum(self._losses) / len(self._losses) if self._losses else event.loss
            self._losses.clear()
            self._line("  ".join([f"loss {mean:.4f}", *parts]), event.step)

    def _line(self, text: str, step: int) -> None:
        width = len(f"{self._last_step:,}")
        self._console.print(Text(f"step {step:>{width},}  {text}"), soft_wrap=True)


def _stages(checked: ValidatedRun) -> list[tuple[str, str]]:
    """How a pipeline is cut."""
    pipeline = checked.pipeline
    if pipeline is None:
        return []
    rows = stage_rows(
        pipeline.schedule, pipeline.cut, model_facts(checked.built.model, pipeline.cut.blocks)
    )
    sizes = ", ".join(str(len(row.blocks)) for row in rows)
    return [
        (
            "stages",
            (
                f"{len(rows)} of {sizes} blocks, {pipeline.schedule.name}; slowest rank"
                f" {balance(rows):.3f} x the mean"
            ),
        )
    ]


def describe(checked: ValidatedRun, *, processes: int) -> list[tuple[str, str]]:
    """A run in a few lines, before it begins: (name, words)."""
    resolved = checked.resolved
    data = checked.data
    section = checked.section
    batch = resolved.batch
    length = data.train.length
    kind = checked.built.kind
    origin = (
        f"weights of {checked.built.weights}"
        if checked.built.weights
        else f"new weights from seed {resolved.seed}"
    )
    held = (
        f"{len(data.validation):,} for validation ({data.validation_note})"
        if len(data.validation)
        else "none for validation"
    )
    where_it_runs = f"{processes} processes, {resolved.layout}" if processes > 1 else "one process"
    computes_in = resolved.precision.compute or (
        resolved.model.dtype if resolved.model else "float32"
    )
    where = (
        f"from step {checked.position.step:,}" if checked.position.step else "from the beginning"
    )
    return [
        ("model", f"{kind}, {format_count(checked.parameters)} parameters, {origin}"),
        ("text", f"{data.description}: {data.size}; {held}"),
        (
            "layout",
            (
                f"{where_it_runs}, ZeRO stage {resolved.data_parallel.stage}, computes in"
                f" {computes_in}"
            ),
        ),
        *_stages(checked),
        (
            "batch",
            (
                f"{batch.train_batch_size} sequences = micro {batch.micro_batch_size} x"
                f" accumulation {batch.accumulation} x dp {resolved.layout.dp};"
                f" {batch.train_batch_size * length:,} tokens a step"
            ),
        ),
        ("run", f"{section.steps:,} steps, {where}, in {checked.folder.path}"),
    ]
