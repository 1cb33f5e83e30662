"""The most that one rank really holds during a step, on real or on fake tensors: the measured side of `parallel.peak`.

Counts storages as `live` does, and with them what existed before, and storages that are resized in place, as `fully_shard` does with
gathered parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from plait._torch import local_tensor, tree_leaves
from plait.engine.live import LiveStorages
from plait.parallel.reducer import Reducer


class StepPeak(LiveStorages):
    """`with StepPeak(existing) as step: ...; step.peak`: bytes of `existing` tensors and of all storages that appear inside."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        for tensor in existing:
            self._appeared(local_tensor(tensor.detach()).untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage has another size now."""
        key = storage._cdata
        if key not in self._units:
            return
        before, unit = self._units[key]
        size = storage.nbytes()
        self._units[key] = (size, unit)
        self.bytes[unit] += size - before
        self.total += size - before
        self.peak = max(self.peak, self.total)

    def __enter__(self) -> StepPeak:
        self._watch = _resizes(self)
        self._watch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watch.__exit__(*error)


def step_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: Reducer | None, batch: Any) -> list[torch.Tensor]:
    """What exists before a step: parameters and their gradients, buffers, optimizer states, buckets, the batch."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    buckets = [tensor for bucket in reducer.buckets for tensor in (bucket.flat, bucket.wire)] if reducer is not None else []
    found = [*parameters, *(p.grad for p in parameters), *model.buffers(), *states, *buckets, *tree_leaves(batch)]
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Take a step on gradients without values, so that the states exist; for fake tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def _resizes(step: StepPeak) -> Iterator[None]:
    """`UntypedStorage.resize_` goes past the dispatcher, so it is replaced meanwhile, as torch's own `MemTracker` does."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        step.resized(storage)

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
