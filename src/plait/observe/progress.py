"""Console output of a run: a live line on a terminal, and plain lines in a pipe or log file.

Both have the same text. The listener reads no clock: rates and the remaining time are computed from
the durations in the events.
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
    CommunicationSelected,
    Event,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)
from plait.model.facts import model_facts
from plait.parallel.pipeline.estimates import rank_imbalance, stage_rows
from plait.sizes import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from plait.train.session import ValidatedRun

_WINDOW_SECONDS = 20.0


class RateWindow:
    """Rates over the steps of the last twenty seconds, or over the last step if it was longer.

    The first step, which allocates caches and buffers, counts only until the second step is added.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque()
        self._count = 0

    @property
    def empty(self) -> bool:
        """True before the first step."""
        return self._count == 0

    def add(self, event: StepDone) -> None:
        """Add a step, and drop steps that are older than the window."""
        self._count += 1
        # The first step is much slower than the others, but until the second it is all there is.
        if self._count == 2:
            self._steps.clear()
        self._steps.append((event.tokens, event.seconds))
        while len(self._steps) > 1 and self._seconds() > _WINDOW_SECONDS:
            self._steps.popleft()

    def _seconds(self) -> float:
        return sum(seconds for _, seconds in self._steps)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks together."""
        return sum(tokens for tokens, _ in self._steps) / max(self._seconds(), 1e-9)

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of a step, without validations and checkpoints."""
        return self._seconds() / max(len(self._steps), 1)


class ProgressLines:
    """Listener that shows a run on a console. Only one rank may create it.

    The first step, every `every` steps and the last step print a line, with the mean loss since the
    previous line. A terminal also shows each step in a live line.
    """

    def __init__(self, console: Console, *, every: int) -> None:
        """Set up the display of a run.

        Args:
            console: The console. A live line is shown if it is a terminal.
            every: Number of steps per printed line.
        """
        self._console = console
        self._every = every
        self._last_step = 0
        self._losses: list[float] = []
        self._window = RateWindow()
        self._live: Progress | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._begin(event)
            case StepDone():
                self._show_step(event)
            case CommunicationSelected():
                self._print(event.communication, event.step)
            case Validated():
                # math.exp overflows above 709.
                perplexity = math.exp(event.loss) if event.loss < 700 else math.inf
                self._print(
                    f"validation loss {event.loss:.4f}, perplexity {perplexity:,.1f},"
                    f" {event.weight:,.0f} targets",
                    event.step,
                )
            case CheckpointSaved():
                self._print(
                    f"checkpoint {event.folder}, {format_seconds(event.seconds)}", event.step
                )
            case RunEnded():
                self._print(f"{event.reason} after {format_seconds(event.seconds)}", event.step)
                self.close()

    def close(self) -> None:
        """Remove the live line if the run failed. The event RunEnded removes it otherwise."""
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
            # A narrow terminal gets one row with a truncated end instead of several rows.
            description = TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            self._live = Progress(
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                description,
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.add_task(
                "the first step is the slowest", total=event.last_step, completed=event.first_step
            )
            self._live.start()

    def _show_step(self, event: StepDone) -> None:
        is_first = self._window.empty
        self._window.add(event)
        if not event.skipped:
            self._losses.append(event.loss)

        remaining_steps = self._last_step - event.step
        fields = [
            f"{self._window.tokens_per_second:,.0f} tok/s",
            f"{format_seconds(remaining_steps * self._window.seconds_per_step)} left",
            format_bytes(event.memory_bytes),
            f"lr {event.learning_rate:.1e}",
            f"norm {event.grad_norm:.2f}",
        ]
        if event.skipped:
            fields.insert(0, f"skipped, overflow at scale {event.loss_scale:g}")
        if self._live is not None:
            self._live.update(
                self._live.task_ids[0],
                completed=event.step,
                description="  ".join([f"loss {event.loss:.4f}", *fields]),
            )

        is_due = event.step % self._every == 0 or event.step == self._last_step
        if is_first or event.skipped or is_due:
            losses = self._losses or [event.loss]
            mean_loss = sum(losses) / len(losses)
            self._losses.clear()
            self._print("  ".join([f"loss {mean_loss:.4f}", *fields]), event.step)

    def _print(self, text: str, step: int) -> None:
        width = len(f"{self._last_step:,}")
        self._console.print(Text(f"step {step:>{width},}  {text}"), soft_wrap=True)


def describe_run(checked: ValidatedRun, *, processes: int) -> list[tuple[str, str]]:
    """Describe a run in a few lines before it starts.

    Args:
        checked: The run.
        processes: Number of processes of the run.

    Returns:
        Pairs of a name and a text.
    """
    resolved = checked.resolved
    data = checked.data
    batch = resolved.batch
    stage = resolved.data_parallel.stage

    weights = f"new weights from seed {resolved.seed}"
    if checked.built.weights:
        weights = f"weights of {checked.built.weights}"

    validation = "none for validation"
    if len(data.validation):
        validation = f"{len(data.validation):,} for validation ({data.validation_note})"

    layout = f"{processes} processes, {resolved.layout}" if processes > 1 else "one process"
    model_dtype = resolved.model.dtype if resolved.model else "float32"
    compute_dtype = resolved.precision.compute or model_dtype

    start = "from the beginning"
    if checked.position.step:
        start = f"from step {checked.position.step:,}"

    sequences = (
        f"{batch.train_batch_size} sequences = micro {batch.micro_batch_size} x accumulation"
        f" {batch.accumulation} x dp {resolved.layout.dp}"
    )
    tokens_per_step = batch.train_batch_size * data.train.length
    return [
        (
            "model",
            f"{checked.built.kind}, {format_count(checked.parameters)} parameters, {weights}",
        ),
        ("text", f"{data.description}: {data.size}; {validation}"),
        ("layout", f"{layout}, ZeRO stage {stage}, computes in {compute_dtype}"),
        *_describe_stages(checked),
        ("batch", f"{sequences}; {tokens_per_step:,} tokens per step"),
        ("run", f"{checked.section.steps:,} steps, {start}, in {checked.folder.path}"),
    ]


def _describe_stages(checked: ValidatedRun) -> list[tuple[str, str]]:
    """Return a line about the pipeline stages, or an empty list without a pipeline."""
    pipeline = checked.pipeline
    if pipeline is None:
        return []
    facts = model_facts(checked.built.model, pipeline.cut.blocks)
    rows = stage_rows(pipeline.schedule, pipeline.cut, facts)
    sizes = ", ".join(str(len(row.blocks)) for row in rows)
    text = (
        f"{len(rows)} of {sizes} blocks, {pipeline.schedule.name}; slowest rank"
        f" {rank_imbalance(rows):.3f} x the mean"
    )
    return [("stages", text)]
