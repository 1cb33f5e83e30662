"""Choice of the modules that compute in float32 in a model of float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from plait.errors import ModelError


def float32_modules(
    model: nn.Module, patterns: Sequence[str], *, is_float16: bool
) -> tuple[str, ...]:
    """Return the names of the modules with parameters that compute in float32.

    These are BatchNorm layers, whose float32 running statistics torch does not combine with inputs
    of another dtype; modules that a Transformers model lists in `_keep_in_fp32_modules` (for
    float16) or `_keep_in_fp32_modules_strict`; and modules whose names match one of `patterns`.

    Args:
        model: The model before it is sharded.
        patterns: Names of modules, or the last parts of names, with `*` and `?` as in file names.
        is_float16: Whether the rest of the model computes in float16, and not in bfloat16.

    Raises:
        ModelError: A pattern matches no module.
    """
    listed = _listed_by_transformers(model, is_float16=is_float16)

    unmatched = set(patterns)
    names: list[str] = []
    for name, module in model.named_modules():
        # A chosen module includes the modules inside of it.
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
