"""Buffers that a recomputed block changes in its forward (running means, power iterations): the
recomputation begins with what the forward began with, and leaves what the forward left. Else a mean
would move twice, and gradients would be those of another loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from plait._torch.modules import own_buffers
from plait._torch.storage import version_of
from plait.errors import InputError

Values = dict[tuple[nn.Module, str], torch.Tensor]
"""By module and leaf."""
_UNCOUNTED = ("running_mean", "running_var")
"""torch's batch_norm writes these without counting it."""


class ChangedBuffers:
    """Of one block. Call `before` and `note` around every forward with gradients, and compute again
    inside `as_before`.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._places = [
            (module, leaf) for module in block.modules() for leaf in own_buffers(module)
        ]
        self._changing: dict[bool, set[tuple[nn.Module, str]]] = {}
        """Seen to change so far, in training and in evaluation mode; the first forward of each
        keeps all to see it.
        """
        self._seen: dict[tuple[nn.Module, str], tuple[torch.Tensor | None, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def before(self) -> Values:
        """What a forward is about to change."""
        values: Values = {}
        changing = self._changing.get(self._block.training)
        for place in self._places:
            module, leaf = place
            tensor = own_buffers(module).get(leaf)
            self._seen[place] = (tensor, 0 if tensor is None else version_of(tensor))
            if tensor is not None and (
                changing is None or place in changing or self._uncounted(place)
            ):
                values[place] = tensor.detach().clone()
        return values

    def note(self, values: Values) -> None:
        """After the forward that `values` were taken for: keep those that it changed."""
        changed = {
            place for place in self._places if self._uncounted(place) or self._changed(place)
        }
        for module, leaf in changed:
            if (module, leaf) not in values and self._seen[module, leaf][0] is not None:
                raise InputError(
                    f"the buffer {leaf} of a {type(module).__name__} in a recomputed block began to"
                    " change after the first forward, and recomputing would change it twice; use"
                    " parallel.recompute.mode = none"
                )
        changed |= self._changing.get(self._block.training, set())
        self._changing[self._block.training] = changed
        for place in [place for place in values if place not in changed]:
            del values[place]

    @contextmanager
    def as_before(self, values: Values) -> Iterator[None]:
        """The block with copies of `values` in its buffers' places."""
        now = {place: own_buffers(place[0]).get(place[1]) for place in values}
        for (module, leaf), value in values.items():
            own_buffers(module)[leaf] = value.clone()
        try:
            yield
        finally:
            for (module, leaf), tensor in now.items():
                own_buffers(module)[leaf] = tensor

    def _changed(self, place: tuple[nn.Module, str]) -> bool:
        tensor, version = self._seen[place]
        now = own_buffers(place[0]).get(place[1])
        return now is not tensor or (now is not None and version_of(now) != version)

    @staticmethod
    def _uncounted(place: tuple[nn.Module, str]) -> bool:
        return place[1] in _UNCOUNTED and place[0].training
