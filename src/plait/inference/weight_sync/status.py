"""Which version of the weights a model has received, and whether it has all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from plait.errors import InputError

_ATTRIBUTE = "_plait_received_weights"


@dataclass(frozen=True)
class ReceivedWeights:
    """Weights that a model got."""

    version: int
    content: str
    """A hash of all of them, in hexadecimal digits, equal on every layout; empty without verification."""
    bytes: int
    """That this rank got."""
    seconds: float
    is_complete: bool = True


def received_weights(model: nn.Module) -> ReceivedWeights | None:
    """The last weights that a model received; None for none."""
    return getattr(model, _ATTRIBUTE, None)


def note(model: nn.Module, found: ReceivedWeights) -> ReceivedWeights:
    """Remember it with the model."""
    object.__setattr__(model, _ATTRIBUTE, found)
    return found


def check_newer(version: int, before: ReceivedWeights | None) -> None:
    """Raise InputError for a version that is not newer than what the model has, or no version."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 62:
        raise InputError(f"version = {version!r} must be a whole number from 0 to 2**62 - 1")
    if before is not None and before.is_complete and version <= before.version:
        raise InputError(f"version = {version} is stale: the model has version {before.version} already; versions have to grow")


def refuse_incomplete(model: nn.Module) -> None:
    """Raise InputError for a model that did not get all of a version: some of its tensors are of another version."""
    found = received_weights(model)
    if found is not None and not found.is_complete:
        raise InputError(f"the weights of version {found.version} arrived in part, so that this model mixes two versions; send them again")
