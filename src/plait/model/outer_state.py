"""Plain attributes and buffers outside of a model's blocks, which a script or a forward may change.

A pipeline is cut by a forward of a copy of the model. What the model's code reads besides its
inputs must therefore be the same in the copy, and on every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plait._torch.modules import own_buffers

Setting = bool | int | float | str | None
SettingName = tuple[str, str]
"""Name of a module and of an attribute, e.g. `("", "skip_blocks")` or `("", "config.layerdrop")`.
"""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that `nn.Module` itself sets."""


def outer_modules(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model that are not inside its blocks."""
    inside = tuple(f"{block}." for block in blocks)
    return [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
    ]


def outer_settings(modules: Sequence[tuple[str, nn.Module]]) -> dict[SettingName, Setting]:
    """Return numbers, flags and strings that are attributes of modules, or of their `config`."""
    settings: dict[SettingName, Setting] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if attribute in _OF_EVERY_MODULE:
                continue
            if value is None or isinstance(value, bool | int | float | str):
                settings[name, attribute] = value
            elif attribute == "config":
                settings.update(
                    {
                        (name, f"config.{key}"): entry
                        for key, entry in getattr(value, "__dict__", {}).items()
                        if entry is None or isinstance(entry, bool | int | float | str)
                    }
                )
    return settings


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
    """Assign settings to a model with modules of the same names."""
    for (name, attribute), value in settings.items():
        owner: Any = model.get_submodule(name)
        *path, leaf = attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, leaf, value)


def setting_text(name: SettingName) -> str:
    """Return a setting's name as a user writes it, e.g. `model.encoder.skip_blocks`."""
    return ".".join(part for part in ("model", *name) if part)


def outer_buffers(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Return the buffers of modules by their full names."""
    return {
        f"{name}.{leaf}" if name else leaf: buffer
        for name, module in modules
        for leaf, buffer in own_buffers(module).items()
        if buffer is not None
    }


def _equal(first: Setting, second: Setting) -> bool:
    # NaN is the same setting, although it differs from itself.
    return (first == second and type(first) is type(second)) or (
        first != first and second != second
    )
