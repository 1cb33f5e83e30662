"""Refused pairs say why, all at once; what is not refused passes."""

from __future__ import annotations

import pytest

from plait.cluster.layout import Layout
from plait.errors import ConfigError
from plait.parallel.compatibility import REFUSALS, Choice, refuse_incompatible
from plait.parallel.compile import Compile


def test_all_at_once() -> None:
    """Every row of the table is reached."""
    with pytest.raises(ConfigError) as caught:
        refuse_incompatible(
            Choice(
                layout=Layout(pp=2, cp=2, tp=2),
                compiled=Compile(enabled=True),
                second_copy=2,
            )
        )
    assert [problem.field for problem in caught.value.problems] == [refusal.field for refusal in REFUSALS]


def test_what_works_passes() -> None:
    """Data, tensor and pipeline parallelism, compiled data parallelism, a second copy."""
    refuse_incompatible(Choice(layout=Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)))
    refuse_incompatible(Choice(layout=Layout(dp_shard=4), second_copy=2))
    refuse_incompatible(Choice(layout=Layout(dp_shard=4), compiled=Compile(enabled=True)))
