"""What torch's own files name to make a tensor of a storage."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._utils import _rebuild_tensor_v2

rebuilt_tensor = _rebuild_tensor_v2
"""(storage, offset, size, stride, requires_grad, hooks) to a tensor."""


def records_of(path: Path) -> list[str]:
    """Return the names of the records in a file of torch.save, as `torch.load` will see them.

    `zipfile` reads archives in another way, and a file can be made that means something else to
    each of the two.

    Raises:
        RuntimeError: It is not such a file.
    """
    names: list[str] = torch._C.PyTorchFileReader(str(path)).get_all_records()
    return names
