"""Tensors of a model that stay in float32 where the others are of 16 bits, as Transformers loads
and saves them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn


def keep_in_float32(model: nn.Module, dtype: torch.dtype | None) -> None:
    """The parameters and buffers that a family's class keeps in it where all others are of 16 bits,
    as biases of DeepSeek's router. The model is on meta.
    """
    always: Any = getattr(model, "_keep_in_fp32_modules_strict", None)
    in_float16: Any = getattr(model, "_keep_in_fp32_modules", None)
    names = {*(always or ()), *((in_float16 if dtype == torch.float16 else None) or ())}
    if not names or dtype not in (torch.float16, torch.bfloat16):
        return
    kept = re.compile("|".join(name.replace("*", ".*") for name in sorted(names)))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
