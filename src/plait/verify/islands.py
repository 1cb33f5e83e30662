"""Float32 islands: places where a model casts to float32 whatever its dtype (Transformers' norms and softmax).

In a float64 comparison they round differently on every layout and hide errors below 1e-7. For the length of a comparison, casts from
float64 to float32 are left out. Only verification does this; a run never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


@contextmanager
def lifted_islands() -> Iterator[None]:
    """Inside, float64 tensors stay float64 through `.to(torch.float32)`, `.float()` and `softmax(dtype=torch.float32)`."""
    to, as_float, softmax = torch.Tensor.to, torch.Tensor.float, F.softmax

    def keep_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dtype == torch.float64 and (torch.float32 in args or kwargs.get("dtype") == torch.float32):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return to(self, *args, **kwargs)

    def keep_float(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else as_float(self, *args, **kwargs)

    def keep_softmax(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return softmax(x, *args, dtype=torch.float64 if x.dtype == torch.float64 else dtype, **kwargs)

    torch.Tensor.to, torch.Tensor.float = keep_to, keep_float  # type: ignore[method-assign, assignment]
    F.softmax = keep_softmax
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float = to, as_float  # type: ignore[method-assign]
        F.softmax = softmax
