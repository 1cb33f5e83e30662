"""What `plait generate` does with a file of prompts: batch after batch, from where a command before
has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.progress import progress_bar

if TYPE_CHECKING:
    from plait.inference.answer_file import AnswerFile
    from plait.inference.prompt_file import Line
    from plait.inference.requests import Generation
    from plait.sharded.model import ShardedModel

Answer = Callable[["ShardedModel", list[Any], int | None], "list[Generation]"]
"""Prompts and the seed of the first, to what the model adds."""


@dataclass(frozen=True)
class Work:
    """What a process is to do."""

    lines: list[Line]
    out: Path
    batch_size: int
    seed: int | None
    """Of the first line; the next has one more."""
    command: dict[str, Any]
    """What the tokens of an answer follow from, besides the lines; neither the layout nor the
    batches.
    """
    first: bool
    """Whether this process writes."""
    several: bool
    """Whether there are others."""


def answer_lines(work: Work, load: Callable[[], ShardedModel], answer: Answer) -> None:
    """On each process."""
    count = 0
    lines = work.lines
    with (
        _answers(work) if work.first else nullcontext() as answers,
        closing(load()) as sharded,
        progress_bar("generate") as progress,
    ):
        for start in range(_done(answers, several=work.several), len(lines), work.batch_size):
            some = [line.prompt for line in lines[start : start + work.batch_size]]
            made = answer(sharded, some, None if work.seed is None else work.seed + start)
            count += sum(len(one.token_ids) for one in made)
            if answers is not None:
                answers.add(made)
            progress(start + len(some), len(lines))
    if work.first:
        print(f"wrote {work.out}: {len(lines)} answers, {count:,} new tokens", file=sys.stderr)


@contextmanager
def _answers(work: Work) -> Iterator[AnswerFile]:
    from plait.inference.answer_file import answer_file

    count = len(work.lines)
    with answer_file(work.out, work.lines, work.command) as answers:
        if answers.done:
            print(
                f"{answers.done} of {count} answers are in {answers.partial} already; going on"
                " after them",
                file=sys.stderr,
            )
        try:
            yield answers
        except BaseException:
            if answers.done:
                finished = (
                    f"{answers.done} of {count} answers are finished, and kept in {answers.partial}"
                )
                print(f"{finished}; the same command goes on after them", file=sys.stderr)
            raise


def _done(answers: AnswerFile | None, *, several: bool) -> int:
    """Lines that are finished, as the first process knows it. Collective."""
    box = [answers.done if answers is not None else 0]
    if several:
        import torch.distributed as dist

        dist.broadcast_object_list(box, src=0)
    return box[0]
