"""Tensors of a Transformers model that stay in float32 if the others have 16 bits."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn


def keep_in_float32(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert the tensors of a model that its class keeps in float32, as Transformers does.

    An example is the bias of DeepSeek's routers.

    Args:
        model: The model, on the meta device.
        dtype: Dtype of the other tensors.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return
    patterns: set[str] = set()
    always: Any = getattr(model, "_keep_in_fp32_modules_strict", None)
    patterns.update(always or ())
    if dtype == torch.float16:
        only_float16: Any = getattr(model, "_keep_in_fp32_modules", None)
        patterns.update(only_float16 or ())
    if not patterns:
        return

    expression = re.compile("|".join(name.replace("*", ".*") for name in sorted(patterns)))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if expression.search(name) and tensor.is_floating_point():
            # The tensor stays the same object, so tied names remain tied.
            tensor.data = tensor.data.float()
