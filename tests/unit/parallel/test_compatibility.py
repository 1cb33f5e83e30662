"""Refused pairs say why, all at once; what is not refused passes."""

from __future__ import annotations

import pytest

from plait.cluster.layout import Layout
from plait.errors import ConfigError
from plait.parallel.compatibility import REFUSALS, refuse_incompatible
from plait.parallel.compile import Compile


def test_all_at_once() -> None:
    """Every row of the table is reached."""
    with pytest.raises(ConfigError) as caught:
        refuse_incompatible(Layout(pp=2, cp=2, tp=2), Compile(enabled=True))
    assert [problem.field for problem in caught.value.problems] == [refusal.field for refusal in REFUSALS]


def test_what_works_passes() -> None:
    """Data and tensor parallelism, compiled data parallelism."""
    refuse_incompatible(Layout(dp_replicate=2, dp_shard=2, tp=2), Compile())
    refuse_incompatible(Layout(dp_shard=4), Compile(enabled=True))
