"""State of a user's data loader in a checkpoint.

A loader is any object with `state_dict` and `load_state_dict`, such as torchdata's
StatefulDataLoader. Each rank has its own, so a state fits the layout that it was saved on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from plait import exact
from plait.cluster.layout import Layout
from plait.errors import CheckpointError, InputError

_NAME = "loader"


class StatefulLoader(Protocol):
    """A data loader that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: numbers, texts, lists, mappings, small tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""


def refuse_stateless(loader: Any, call: str) -> None:
    """Raise InputError for a loader that cannot save its position.

    Args:
        loader: The argument of a call.
        call: Name of the call, for the message.
    """
    missing = [
        name
        for name in ("state_dict", "load_state_dict")
        if not callable(getattr(loader, name, None))
    ]
    if missing:
        rule = f"{type(loader).__name__} has no {missing[0]}, so its position cannot be saved"
        raise InputError(
            f"{call}: loader: {rule}; use torchdata's StatefulDataLoader, or leave `loader` out"
        )


def saved(loader: StatefulLoader | None) -> dict[str, torch.Tensor]:
    """Return the state of this rank's loader as a tensor: uint8, [bytes]. Empty without a loader.

    Raises:
        CheckpointError: The state is not plain data.
    """
    if loader is None:
        return {}
    text = json.dumps(exact.encode(loader.state_dict(), "loader.state_dict()"))
    return {_NAME: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def refuse_misfit(
    loader: StatefulLoader | None,
    metadata: Mapping[str, Any],
    *,
    then: Mapping[str, int],
    now: Layout,
) -> None:
    """Raise CheckpointError if a checkpoint has no state for this rank's loader.

    Args:
        loader: This rank's loader, or None.
        metadata: Metadata of the checkpoint.
        then: Degrees of the layout that the checkpoint was saved on.
        now: The current layout.
    """
    if loader is None:
        return
    if not metadata.get(_NAME):
        raise CheckpointError(
            "load_checkpoint(loader=...): the checkpoint was saved without a loader; leave"
            " `loader` out"
        )
    if dict(then) != now.all_degrees:
        different = ", ".join(
            f"{axis} {then.get(axis, 1)} -> {degree}"
            for axis, degree in now.all_degrees.items()
            if then.get(axis, 1) != degree
        )
        raise CheckpointError(
            "load_checkpoint(loader=...): the checkpoint has the position of one loader per rank,"
            f" and the layout has changed ({different}), so samples would be left out or repeated;"
            " use the same layout, or leave `loader` out and start the epoch again"
        )


def restore(loader: StatefulLoader | None, rank_state: Mapping[str, torch.Tensor]) -> None:
    """Restore this rank's loader.

    Args:
        loader: The loader, or None.
        rank_state: Tensors that the checkpoint stores for this rank.
    """
    if loader is not None:
        text = bytes(rank_state[_NAME].cpu().tolist()).decode()
        loader.load_state_dict(exact.decode(json.loads(text), where="loader"))
