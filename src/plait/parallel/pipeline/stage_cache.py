"""What a model keeps of earlier tokens, where a rank has some of its blocks only.

A model asks its cache how many tokens it has seen, and asks its first layer, which another stage
may have. So every stage of a rank has a cache of its own, in which the layers of other stages are
those of the stage's own blocks: they answer the same, and nobody writes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.parallel.pipeline.stage import StagedModel


class StageCaches:
    """The caches of a rank's stages. `make` returns an empty one of the whole model, with all of
    its layers.
    """

    def __init__(self, staged: StagedModel, make: Callable[[], Any]) -> None:
        self._make = make
        self._own = {index: _layers(staged, index) for index in staged.stages}
        self.caches = {index: self._shared(index) for index in staged.stages}

    def _shared(self, stage: int) -> Any:
        cache = self._make()
        own = self._own[stage]
        first: dict[type, int] = {}
        for index in own:
            first.setdefault(type(cache.layers[index]), index)
        for index, layer in enumerate(cache.layers):
            if index not in own:
                cache.layers[index] = cache.layers[first.get(type(layer), own[0])]
        return cache

    def empty(self) -> Any:
        """One of the whole model that nothing is kept in."""
        return self._make()

    def own_layers(self) -> list[Any]:
        """Those that this rank's blocks write to."""
        return [
            cache.layers[index]
            for stage, cache in self.caches.items()
            for index in self._own[stage]
        ]

    def get_seq_length(self) -> int:
        """How many tokens were seen."""
        stage, cache = next(iter(self.caches.items()))
        return int(cache.layers[self._own[stage][0]].get_seq_length())


def for_stage(piece: Any, stage: int) -> Any:
    """A micro-batch with the cache of one stage, where it has any."""
    return _replaced(piece, lambda caches: caches.caches[stage])


def with_empty_cache(piece: Any) -> Any:
    """A micro-batch for a model that has all of its blocks and has seen no token, where it has a
    cache.
    """
    return _replaced(piece, lambda caches: caches.empty())


def _replaced(piece: Any, cache_of: Callable[[StageCaches], Any]) -> Any:
    """Replace the caches of a micro-batch, which may have either of the names in `CACHES`."""
    if not isinstance(piece, Mapping):
        return piece
    caches = {
        name: cache_of(entry) for name, entry in piece.items() if isinstance(entry, StageCaches)
    }
    return {**piece, **caches} if caches else piece


def _layers(staged: StagedModel, stage: int) -> list[int]:
    """The layers of a cache that a stage's blocks write to."""
    found = set()
    for name in staged.stages[stage].blocks:
        own = {
            at
            for module in staged.model.get_submodule(name).modules()
            if (at := _index(module)) is not None
        }
        if not own:
            raise ModelError(
                f"parallel.pp: {name} does not say which layer of a cache is its own (`layer_idx`"
                " of its attention), so its stage cannot keep keys and values; keep none:"
                ' use_cache=False, or "use_cache": false in the generation_config.json of its'
                " folder; or use parallel.pp = 1 (--pp 1)"
            )
        found |= own
    return sorted(found)


def _index(module: nn.Module) -> int | None:
    found = getattr(module, "layer_idx", None)
    return found if isinstance(found, int) else None
