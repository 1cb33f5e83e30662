"""Search for tied parameters, which a model registers under several names."""

from __future__ import annotations

from torch import nn


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return a group of names for every tied parameter, in the order of registration."""
    # Tensors compare elementwise, so parameters are compared by identity.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
