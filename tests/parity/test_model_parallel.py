"""Megatron's way in: sizes, rank queries and groups, and the collectives on them."""

from __future__ import annotations

import pytest
import torch

from plait.cluster.model_parallel import initialize_model_parallel
from plait.comm.collectives import leave
from plait.errors import ConfigError
from tests.pool import Pool


def queries(rank: int, world: int) -> dict[str, object]:
    """tp 2 of 4 processes; the rest is data parallel. Runs in a worker."""
    state = initialize_model_parallel(2)
    assert state.pipeline_model_parallel_group is None and state.context_parallel_world_size == 1
    assert state.is_pipeline_first_stage and state.is_pipeline_last_stage
    summed = leave(torch.tensor([float(rank)]), state.tensor_model_parallel_group)
    return {
        "tp": (state.tensor_model_parallel_rank, state.tensor_model_parallel_world_size),
        "dp": (state.data_parallel_rank, state.data_parallel_world_size),
        "sum": float(summed),
        "dp size": state.data_parallel_group.size() if state.data_parallel_group else 1,
    }


def test_queries(pool: Pool) -> None:
    """Neighbours are tensor parallel."""
    found = pool.run(4, queries)
    assert [entry["tp"] for entry in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [entry["dp"] for entry in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [entry["sum"] for entry in found] == [1, 1, 5, 5]
    assert {entry["dp size"] for entry in found} == {2}


def impossible(rank: int, world: int) -> None:
    """Runs in a worker."""
    with pytest.raises(ConfigError, match=r"4 processes are not a multiple of 3"):
        initialize_model_parallel(3)


def test_impossible_sizes(pool: Pool) -> None:
    """With the numbers."""
    pool.run(4, impossible)
