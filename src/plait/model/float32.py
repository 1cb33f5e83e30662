"""Tensors that stay in float32, and modules that compute in float32, in a 16-bit model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from plait.errors import ModelError


def keep_in_float32(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert the tensors that a model's class keeps in float32 to float32, as Transformers does.

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


def float32_modules(
    model: nn.Module, patterns: Sequence[str], *, is_float16: bool
) -> tuple[str, ...]:
    """Return the names of the modules that have parameters and compute in float32.

    These are BatchNorm layers, whose float32 running statistics torch does not combine with inputs
    of another dtype; modules that a Transformers model lists in `_keep_in_fp32_modules` (for
    float16) or `_keep_in_fp32_modules_strict`; and modules whose names match one of `patterns`.

    Args:
        model: The model before it is sharded.
        patterns: Names of modules, or the last parts of names, with `*` and `?` as in file names.
        is_float16: Whether the rest of the model computes in float16, not in bfloat16.

    Raises:
        ModelError: A pattern matches no module.
    """
    listed = _listed_by_transformers(model, is_float16=is_float16)

    unmatched = set(patterns)
    names: list[str] = []
    for name, module in model.named_modules():
        # A chosen module includes the modules inside it.
        if not name or any(name.startswith(f"{outer}.") for outer in names):
            continue
        matches = {
            pattern
            for pattern in patterns
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
        }
        unmatched -= matches
        is_listed = name.rpartition(".")[2] in listed
        if not matches and not is_listed and not isinstance(module, _BatchNorm):
            continue
        if next(module.parameters(), None) is not None:
            names.append(name)

    if unmatched:
        raise ModelError(
            f"data_types.keep_in_fp32_modules: no module of {type(model).__name__} matches "
            f"{min(unmatched)!r}; use names from model.named_modules(), or their last parts"
        )
    return tuple(names)


def _listed_by_transformers(model: nn.Module, *, is_float16: bool) -> set[str]:
    attributes = ["_keep_in_fp32_modules_strict"]
    if is_float16:
        attributes.append("_keep_in_fp32_modules")

    listed: set[str] = set()
    for module in model.modules():
        for attribute in attributes:
            value: Any = getattr(type(module), attribute, None)
            if isinstance(value, str):
                listed.add(value)
            else:
                listed.update(value or ())
    return listed
