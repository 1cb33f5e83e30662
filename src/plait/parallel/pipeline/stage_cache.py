"""KV caches of a rank that has only some of the model's blocks.

A model asks its cache for the number of tokens that it has seen, and the cache asks its first
layer, which may belong to another stage. Every stage of a rank therefore has its own cache, in
which the layers of other stages are replaced by layers of the stage's own blocks. They give the
same answers, and no block writes through the index of a replaced layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.errors import ModelError
from plait.parallel.pipeline.stage import StagedModel


class StageCaches:
    """Caches of the stages of this rank.

    Args:
        staged: The stages.
        make: Returns an empty cache of the complete model, with all of its layers.

    Attributes:
        caches: Cache of each stage, by the stage's index.
    """

    def __init__(self, staged: StagedModel, make: Callable[[], Any]) -> None:
        self._make = make
        self._layers = {index: _cache_layers(staged, index) for index in staged.stages}
        self.caches = {index: self._make_stage_cache(index) for index in staged.stages}

    def _make_stage_cache(self, stage: int) -> Any:
        cache = self._make()
        stage_layers = self._layers[stage]
        # Layers of a model may have several types, such as full and sliding-window attention.
        first: dict[type, int] = {}
        for index in stage_layers:
            first.setdefault(type(cache.layers[index]), index)
        for index, layer in enumerate(cache.layers):
            if index not in stage_layers:
                cache.layers[index] = cache.layers[first.get(type(layer), stage_layers[0])]
        return cache

    def empty(self) -> Any:
        """Return an empty cache of the complete model."""
        return self._make()

    def own_layers(self) -> list[Any]:
        """Return the layers that this rank's blocks write to."""
        layers = []
        for stage, cache in self.caches.items():
            layers += [cache.layers[index] for index in self._layers[stage]]
        return layers

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        stage, cache = next(iter(self.caches.items()))
        return int(cache.layers[self._layers[stage][0]].get_seq_length())


def for_stage(batch: Any, stage: int) -> Any:
    """Return a micro-batch in which the caches are replaced by the cache of one stage."""
    return _replace_caches(batch, lambda caches: caches.caches[stage])


def with_empty_cache(batch: Any) -> Any:
    """Return a micro-batch in which the caches are replaced by an empty one of the whole model."""
    return _replace_caches(batch, lambda caches: caches.empty())


def _replace_caches(batch: Any, replacement: Callable[[StageCaches], Any]) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    # Models name this argument differently, so the entries are found by their type.
    replaced = {
        name: replacement(entry) for name, entry in batch.items() if isinstance(entry, StageCaches)
    }
    if not replaced:
        return batch
    return {**batch, **replaced}


def _cache_layers(staged: StagedModel, stage: int) -> list[int]:
    """Return the indices of the layers of a cache that a stage's blocks write to."""
    stage_layers: set[int] = set()
    for name in staged.stages[stage].blocks:
        indices = [
            getattr(module, "layer_idx", None)
            for module in staged.model.get_submodule(name).modules()
        ]
        block_layers = {index for index in indices if isinstance(index, int)}
        if not block_layers:
            raise ModelError(
                f"parallel.pp: {name} does not say which layer of a cache is its own (`layer_idx`"
                " of its attention), so its stage cannot keep keys and values; keep none:"
                ' use_cache=False, or "use_cache": false in the generation_config.json of its'
                " folder; or use parallel.pp = 1 (--pp 1)"
            )
        stage_layers |= block_layers
    return sorted(stage_layers)
