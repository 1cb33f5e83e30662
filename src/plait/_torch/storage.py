"""Memory of tensors: identity and size of storages, versions, and resizes.

Patched behaviour: `on_resize` replaces `torch.UntypedStorage.resize_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from plait._torch.dtensor import local_tensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it exists.

    Fake storages have no address, so the number is that of torch's storage object.
    """
    return int(storage._cdata)


def memory_key(tensor: torch.Tensor) -> int:
    """Return the `storage_id` of a plain tensor, without an operator that a mode would see."""
    return storage_id(tensor.untyped_storage())


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory, fake tensors included.

    Args:
        tensor: A DTensor stands for its local tensor.
    """
    return storage_id(_local_storage(tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of the local tensors of `tensors`."""
    sizes = {storage_key(tensor): _local_storage(tensor).nbytes() for tensor in tensors}
    return sum(sizes.values())


def _local_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor.detach()).untyped_storage()


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which every in-place operation increments."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return True if autograd treats the tensor as a view of another one."""
    return tensor._is_view()


@contextmanager
def on_resize(notify: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `notify` with every storage that is resized inside the block.

    Resizing a storage is not an operator, so dispatch modes do not see it.
    """
    resize: Any = torch.UntypedStorage.resize_

    def resize_and_notify(storage: torch.UntypedStorage, size: int) -> Any:
        resized = resize(storage, size)
        notify(storage)
        return resized

    torch.UntypedStorage.resize_ = resize_and_notify  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
