"""Answers of `plait generate` to a file of prompts, in batches.

Finished answers are saved, so that a command which is repeated after an interruption continues
after them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.terminal import progress_bar

if TYPE_CHECKING:
    from plait.inference.answer_file import AnswerFile
    from plait.inference.prompt_file import PromptLine
    from plait.inference.requests import Generation
    from plait.sharded.model import ShardedModel

Answer = Callable[["ShardedModel", list[Any], int | None], "list[Generation]"]
"""Function from the model, prompts and the seed of the first prompt to the generated answers."""


@dataclass(frozen=True)
class AnswerJob:
    """File of prompts that the processes of a command answer together."""

    lines: list[PromptLine]
    out: Path
    batch_size: int
    seed: int | None
    """Seed of the first line. Each following line has the next number."""
    command: dict[str, Any]
    """Everything besides the lines that the tokens of an answer depend on.

    The layout and the batches are not part of it, so that a command can continue on others.
    """
    writes: bool
    """True if this process writes the answers."""
    several: bool
    """True if other processes take part."""


def answer_lines(job: AnswerJob, load: Callable[[], ShardedModel], answer: Answer) -> None:
    """Answer all lines that have no answer yet. Collective over the processes of the command.

    Args:
        job: The lines and the output.
        load: Loads the model.
        answer: Generates the answers of a batch.
    """
    new_tokens = 0
    lines = job.lines
    with (
        _open_answers(job) if job.writes else nullcontext() as answers,
        closing(load()) as sharded,
        progress_bar("generate") as progress,
    ):
        for start in range(_finished_lines(answers, job), len(lines), job.batch_size):
            prompts = [line.prompt for line in lines[start : start + job.batch_size]]
            seed = job.seed
            if seed is not None:
                seed += start
            generations = answer(sharded, prompts, seed)
            new_tokens += sum(len(generation.token_ids) for generation in generations)
            if answers is not None:
                answers.add(generations)
            progress(start + len(prompts), len(lines))
    if job.writes:
        print(f"wrote {job.out}: {len(lines)} answers, {new_tokens:,} new tokens", file=sys.stderr)


@contextmanager
def _open_answers(job: AnswerJob) -> Iterator[AnswerFile]:
    from plait.inference.answer_file import answer_file

    count = len(job.lines)
    with answer_file(job.out, job.lines, job.command) as answers:
        if answers.done:
            print(
                f"{answers.done} of {count} answers are in {answers.partial} already; continuing"
                " after them",
                file=sys.stderr,
            )
        try:
            yield answers
        except BaseException:
            if answers.done:
                print(
                    f"{answers.done} of {count} answers are finished and kept in {answers.partial};"
                    " the same command continues after them",
                    file=sys.stderr,
                )
            raise


def _finished_lines(answers: AnswerFile | None, job: AnswerJob) -> int:
    """Return the number of finished lines, which only the writing process knows. Collective."""
    count = answers.done if answers is not None else 0
    if job.several:
        from plait.cluster.small_messages import broadcast_object

        return broadcast_object(count)
    return count
