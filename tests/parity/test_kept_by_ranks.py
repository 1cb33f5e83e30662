"""What ranks of tensor and pipeline parallelism are said to keep of tokens, and what their caches hold after a generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.inference.capacity import CacheDemand, cache_bytes, cache_layout_of
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.parallel.pipeline.stage import StageCaches
from tests.unit.inference.cache_models import model_of

PROMPTS, NEW = [[5, 17, 33, 2, 30, 31, 7, 9, 11], [8, 3, 6, 20, 21, 22, 23, 24, 25]], 4


def held(rank, world, folder, tp, pp):
    """(bytes of this rank's cache, what it was said to take, what the rank that keeps most was). Runs in a worker."""
    sharded = load_model(open_source(Path(folder)), tp=tp, pp=pp)
    made: list[Any] = []
    new_cache = sharded.new_cache
    object.__setattr__(sharded, "new_cache", lambda **of: made.append(new_cache(**of)) or made[-1])
    try:
        generate(
            sharded, PROMPTS, max_new_tokens=NEW, temperature=0, eos_token_id=[39], pad_token_id=0
        )
        (cache,) = made
        layers = cache.own_layers() if isinstance(cache, StageCaches) else cache.layers
        several = [
            list(value.values()) if isinstance(value, dict) else [value]
            for layer in layers
            for value in vars(layer).values()
        ]
        found = sum(
            one.nbytes
            for values in several
            for one in values
            if isinstance(one, torch.Tensor) and one.ndim
        )
        keeps, asked = (
            cache_layout_of(sharded.model),
            CacheDemand(len(PROMPTS), len(PROMPTS[0]) + NEW - 1, 4),
        )
        blocks = None if sharded.pipeline is None else sharded.parts.blocks
        return (
            found,
            cache_bytes(keeps, asked, tp=tp, blocks=blocks),
            cache_bytes(keeps, asked, tp=tp, pp=pp),
        )
    finally:
        sharded.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "falcon, new", "gemma2", "qwen2"])
def test_bytes_of_ranks(pool, tmp_path, name, tp, pp):
    model_of(name).save_pretrained(tmp_path)
    found = pool.run(2, held, str(tmp_path), tp, pp)
    assert all(of_rank == said for of_rank, said, _ in found)
    assert max(of_rank for of_rank, _, _ in found) == found[0][2]
