"""Names and records in files that `torch.save` writes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._utils import _rebuild_tensor_v2

rebuilt_tensor = _rebuild_tensor_v2
"""Function that pickles of torch name to build a tensor.

Its arguments are storage, offset, size, stride, requires_grad and hooks.
"""


def records_of(path: Path) -> list[str]:
    """Return the names of the records in a file of `torch.save`, as `torch.load` reads them.

    `zipfile` reads archives differently. A crafted file can therefore have one content for
    `zipfile` and another one for `torch.load`.

    Raises:
        RuntimeError: The file was not written by `torch.save`.
    """
    names: list[str] = torch._C.PyTorchFileReader(str(path)).get_all_records()
    return names
