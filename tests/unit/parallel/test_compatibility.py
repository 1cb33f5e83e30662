"""Refused pairs say why, all at once; what is not refused passes."""

from __future__ import annotations

import pytest

from plait.cluster.layout import Layout
from plait.errors import ConfigError
from plait.parallel.order import UNSUPPORTED_COMBINATIONS, refuse_incompatible
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.data_parallel import DataParallel


def test_all_at_once() -> None:
    """Every row of the table is reached."""
    with pytest.raises(ConfigError) as caught:
        refuse_incompatible(
            TechniqueContext(
                Layout(pp=2, cp=2, tp=2),
                (Compile(enabled=True), DataParallel(secondary_partition=2)),
            )
        )
    assert [problem.field for problem in caught.value.problems] == [
        refusal.field for refusal in UNSUPPORTED_COMBINATIONS
    ]


def test_what_works_passes() -> None:
    """Data, tensor and pipeline parallelism, compiled data parallelism, a secondary partition."""
    refuse_incompatible(TechniqueContext(Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)))
    refuse_incompatible(
        TechniqueContext(Layout(dp_shard=4), (DataParallel(secondary_partition=2),))
    )
    refuse_incompatible(TechniqueContext(Layout(dp_shard=4), (Compile(enabled=True),)))
