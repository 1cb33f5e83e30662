"""Parameters that a model holds under several names. Every other part of Plait that asks which
these are asks here.
"""

from __future__ import annotations

from torch import nn


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that share one parameter, first name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
