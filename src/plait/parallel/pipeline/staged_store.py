"""Activation offload in a pipeline: when the prefetch of what a stage has stored starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from plait.parallel.activations.saved_tensors import Store
from plait.parallel.pipeline.stage import Stage
from plait.parallel.schedules.actions import Action, Kind


class StagedStore:
    """An observer of a pipeline's `Runtime`: the prefetch of tensors that a stage's last blocks
    have stored starts when their backward is next, so while the rank waits for the gradient.
    Micro-batches are stored separately, and so are the stages of a rank.
    """

    def __init__(
        self, store: Store, stages: Mapping[int, Stage], offloaded: Collection[str]
    ) -> None:
        self._store = store
        self._ends = {index for index, stage in stages.items() if stage.blocks[-1] in offloaded}
        """Stages whose last block's saved tensors are prefetched first. Others start their prefetch
        when that block's backward begins (`recompute`).
        """
        self._returning: dict[tuple[int, int], Callable[[], None]] = {}

    def __call__(self, action: Action, done: bool) -> None:
        """Before (`done` False) and after every computation."""
        if action.kind is Kind.FORWARD:
            if not done:
                self._store.begin()
            elif torch.is_grad_enabled() and action.stage in self._ends:
                self._returning[action.stage, action.microbatch] = self._store.prefetcher()
        elif not done and action.kind is not Kind.WEIGHT:
            self._returning.pop((action.stage, action.microbatch), lambda: None)()
