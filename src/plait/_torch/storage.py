"""The memory behind tensors: which share it, how much there is, and how often it was written to.
`on_resize` patches torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from plait._torch.dtensor import local_tensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for storages that are one, also for fake ones, which have no address."""
    return int(storage._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory (a DTensor: this rank's part), also for fake ones."""
    return storage_id(local_tensor(tensor.detach()).untyped_storage())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind this rank's parts of `tensors`."""
    return sum(
        {
            storage_key(t): local_tensor(t.detach()).untyped_storage().nbytes() for t in tensors
        }.values()
    )


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether it is a view of another one for autograd."""
    return tensor._is_view()


@contextmanager
def on_resize(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `tell` with every storage whose size was changed inside: that passes no dispatcher."""
    before: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = before(storage, size)
        tell(storage)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
