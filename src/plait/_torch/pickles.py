"""What torch's own files name to make a tensor of a storage."""

from __future__ import annotations

from torch._utils import _rebuild_tensor_v2

rebuilt_tensor = _rebuild_tensor_v2
"""(storage, offset, size, stride, requires_grad, hooks) to a tensor."""
