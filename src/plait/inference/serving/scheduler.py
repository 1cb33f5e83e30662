"""A thread that decodes all requests together: between two forwards those that ended or were cancelled leave, and waiting ones join."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import Any

import torch

from plait.errors import InputError
from plait.inference.choose import Chooser
from plait.inference.predictor import Predictor
from plait.inference.rope_by_length import refuse_served, rope_by_length
from plait.inference.serving.job import Job, Told
from plait.inference.serving.rows import Rows, started
from plait.inference.vocabulary import tokens_of_tokenizer
from plait.sharded.cache import reads_prompts_whole, takes_cache
from plait.sharded.model import ShardedModel

PREFILL = 512
"""Tokens of a prompt that are read by one forward."""


class Full(InputError):
    """As many requests wait as may."""


class Scheduler:
    """Of a model in one process. `start`, `submit` from any thread, `stop`."""

    def __init__(self, sharded: ShardedModel, tokenizer: Any, *, at_once: int, waiting: int, offload_cache: bool = False) -> None:
        """`at_once` requests are decoded together, and `waiting` may wait. `offload_cache` keeps keys and values in pinned host memory, for
        a GPU. Raises InputError for a model that keeps none."""
        if not takes_cache(sharded.model):
            raise InputError(f"{type(sharded.model).__name__}: its forward takes no KV cache, which serving needs")
        self._sharded, self._tokenizer, self._offload_cache = sharded, tokenizer, offload_cache
        self._prefill = None if reads_prompts_whole(sharded.model) else PREFILL
        rope = self._rope = rope_by_length(sharded.model)
        self._original = rope.original if rope is not None and rope.reads_anew else None
        self._tokens = tokens_of_tokenizer(tokenizer)
        self._at_once, self._most_waiting = at_once, waiting
        self._predict = partial(_predicted, Predictor(sharded))
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._batches: list[Rows] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="plait-scheduler", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def check_count(self, jobs: int) -> None:
        """Raise Full for more jobs of one request than may wait, before anything is computed for them."""
        if jobs > self._most_waiting:
            raise Full(f"{jobs:,} prompts in one request, and {self._most_waiting:,} may wait; send fewer at once")

    def submit(self, *jobs: Job) -> None:
        """All or none of them. Raises Full where too many wait, InputError where the server is stopping, or one is too long to be
        decoded with others."""
        self.check_count(len(jobs))
        for job in jobs:
            refuse_served(self._rope, job.request.most_seen)
        with self._changed:
            if self._stopping:
                raise InputError("the server is stopping")
            if len(self._waiting) + len(jobs) > self._most_waiting:
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            if len(self._waiting) + len(jobs) > self._most_waiting:
                raise Full(f"{len(self._waiting)} requests wait, and {self._most_waiting} may; try again later")
            self._waiting.extend(jobs)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; jobs that have not ended fail."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def running(self) -> int:
        """Requests that are decoded now."""
        return sum(len(rows.jobs) for rows in self._batches)

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                with torch.no_grad(), self._sharded.evaluating():
                    while not self._stopping and (self._waiting or self._batches):
                        self._pass()
            except Exception as error:  # whatever fails is these requests' error, and the server goes on
                self._fail(f"{type(error).__name__}: {error}")
        self._fail("the server was stopped")

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._batches)
            return not self._stopping

    def _pass(self) -> None:
        """Join as many as may, then a token for all."""
        for rows in self._batches:
            rows.drop_cancelled()
        while self.running < self._at_once and (job := self._next()) is not None:
            self._read(job)
        if self._original is not None:
            for rows in list(self._batches):
                while (found := rows.without(self._original)) is not None:  # keys of both kinds of frequencies do not go together
                    self._read(*found)
        for rows in self._batches:
            rows.step(self._predict)
        self._batches = [rows for rows in self._batches if rows.jobs]

    def _read(self, job: Job, chooser: Chooser | None = None) -> None:
        """A job's tokens, and choose the next. `chooser`: that of a job that has some already."""
        try:
            chooser = chooser or Chooser([job.request], job.settings, self._tokenizer, tokens=self._tokens)
            cache = self._sharded.new_cache(on_host=self._offload_cache)
            new = started(job, chooser, self._predict, cache, prefill=self._prefill, original=self._original)
        except Exception as error:
            job.tell(Told(error=str(error)))
            if not isinstance(error, InputError):  # logits that are not finite are of this request alone
                raise
            return
        if new is not None:
            self._join(new)

    def _join(self, new: Rows) -> None:
        for rows in self._batches:
            if rows.jobs and rows.can_take(new):
                rows.take(new)
                return
        self._batches.append(new)

    def _next(self) -> Job | None:
        with self._changed:
            while self._waiting:
                if not (job := self._waiting.popleft()).is_cancelled:
                    return job
        return None

    def _fail(self, why: str) -> None:
        with self._changed:
            jobs = [job for rows in self._batches for job in rows.jobs]
            if self._stopping:
                jobs += self._waiting
                self._waiting.clear()
            self._batches = []
        for job in jobs:
            job.tell(Told(error=why))


def _predicted(predictor: Predictor, inputs: dict[str, torch.Tensor], cache: Any) -> torch.Tensor:
    return predictor.last(inputs, cache)()
