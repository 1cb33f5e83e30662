"""Predicted bytes of the caches of tensor-parallel ranks and pipeline stages are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.inference.capacity import CacheDemand, cache_bytes, cache_layout_of
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.parallel.pipeline.stage import StageCaches
from tests.unit.inference.cache_models import model_of

PROMPTS = [[5, 17, 33, 2, 30, 31, 7, 9, 11], [8, 3, 6, 20, 21, 22, 23, 24, 25]]
NEW_TOKENS = 4


def bytes_of_cache(cache):
    """Return the bytes of all tensors of a cache. A layer may have dictionaries of them."""
    layers = cache.own_layers() if isinstance(cache, StageCaches) else cache.layers
    total = 0
    for layer in layers:
        for value in vars(layer).values():
            tensors = value.values() if isinstance(value, dict) else [value]
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.ndim:
                    total += tensor.nbytes
    return total


def cache_and_predictions(rank, world, folder, tp, pp):
    """Return bytes of the cache, those predicted for this rank, and for the largest rank.

    Runs on every rank.
    """
    sharded = load_model(open_source(Path(folder)), tp=tp, pp=pp)
    caches = []
    new_cache = sharded.new_cache

    def recorded_cache(**arguments):
        caches.append(new_cache(**arguments))
        return caches[-1]

    # The class is frozen, and no public call returns the cache of a generation.
    object.__setattr__(sharded, "new_cache", recorded_cache)
    try:
        arguments = {"temperature": 0, "eos_token_id": [39], "pad_token_id": 0}
        generate(sharded, PROMPTS, max_new_tokens=NEW_TOKENS, **arguments)
        (cache,) = caches
        layout = cache_layout_of(sharded.model)
        # The last token is not an input.
        demand = CacheDemand(len(PROMPTS), len(PROMPTS[0]) + NEW_TOKENS - 1, 4)
        blocks = None if sharded.pipeline is None else sharded.parts.blocks
        of_rank = cache_bytes(layout, demand, tp=tp, blocks=blocks)
        return bytes_of_cache(cache), of_rank, cache_bytes(layout, demand, tp=tp, pp=pp)
    finally:
        sharded.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "falcon, new", "gemma2", "qwen2"])
def test_cache_bytes_are_as_predicted(pool, tmp_path, name, tp, pp):
    model_of(name).save_pretrained(tmp_path)
    results = pool.run(2, cache_and_predictions, str(tmp_path), tp, pp)
    for allocated, predicted, _ in results:
        assert allocated == predicted
    assert max(allocated for allocated, _, _ in results) == results[0][2]
