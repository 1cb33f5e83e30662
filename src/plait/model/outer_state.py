"""Plain attributes and buffers outside of a model's blocks, which a script or a forward may change.

The stages of a pipeline are found by running a copy of the model. Everything that the model's code
reads besides its inputs must therefore be the same in the copy, and on every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from plait._torch.modules import own_buffers

Setting = bool | int | float | str | None
SettingName = tuple[str, str]
"""Name of a module and of its attribute: `("", "skip_blocks")` or `("", "config.layerdrop")`."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that `nn.Module` itself sets."""


def outer_modules(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model that are not inside its blocks."""
    prefixes = tuple(f"{block}." for block in blocks)
    return [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(prefixes)
    ]


def outer_settings(modules: Sequence[tuple[str, nn.Module]]) -> dict[SettingName, Setting]:
    """Return numbers, flags and strings that are attributes of modules, or of their `config`."""
    settings: dict[SettingName, Setting] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if attribute in _MODULE_ATTRIBUTES:
                continue
            if _is_setting(value):
                settings[name, attribute] = value
            elif attribute == "config":
                for key, entry in getattr(value, "__dict__", {}).items():
                    if _is_setting(entry):
                        settings[name, f"config.{key}"] = entry
    return settings


def _is_setting(value: object) -> TypeGuard[Setting]:
    return value is None or isinstance(value, bool | int | float | str)


def changed_settings(
    before: Mapping[SettingName, Setting], after: Mapping[SettingName, Setting]
) -> dict[SettingName, Setting]:
    """Return the settings of `after` that are new or differ from `before`."""
    return {
        name: value
        for name, value in after.items()
        if name not in before or not _equal(before[name], value)
    }


def set_settings(model: nn.Module, settings: Mapping[SettingName, Setting]) -> None:
    """Assign settings to a model that has modules of the same names."""
    for (name, attribute), value in settings.items():
        owner: Any = model.get_submodule(name)
        *path, leaf = attribute.split(".")
        for key in path:
            owner = getattr(owner, key)
        setattr(owner, leaf, value)


def setting_text(name: SettingName) -> str:
    """Return a setting's name as a user writes it, e.g. `model.encoder.skip_blocks`."""
    return ".".join(part for part in ("model", *name) if part)


def outer_buffers(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Return the buffers of modules by their full names."""
    buffers = {}
    for name, module in modules:
        for leaf, buffer in own_buffers(module).items():
            if buffer is not None:
                buffers[f"{name}.{leaf}".removeprefix(".")] = buffer
    return buffers


def _equal(first: Setting, second: Setting) -> bool:
    # NaN is the same setting, although it differs from itself.
    if first != first and second != second:
        return True
    return first == second and type(first) is type(second)
