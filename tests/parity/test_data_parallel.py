"""ZeRO 0 to 3 and hybrid sharding against one process in float64: losses, norms, gradients and parameters after three steps."""

from __future__ import annotations

from itertools import product

import pytest

from plait.verify.parity import compare, worst
from tests.covers import cover
from tests.parity.data_parallel import LAYOUTS, reference, settings, train
from tests.pool import Pool

CASES = [(*layout, *model) for layout in LAYOUTS for model in product(("llama", "gpt2", "plain", "frozen"), (False, True), (1, 3))]


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "kind", "tied", "accumulation"),
    cover(
        CASES,
        features=lambda world, stage, replicas, *model: (world, (stage, replicas), *model),
        cost=lambda world, *_: world,
        name=lambda *case: "-".join(("tied" if value else "untied") if isinstance(value, bool) else str(value) for value in case),
    ),
)
def test_equals_one_process(pool: Pool, world: int, stage: int, replicas: int, kind: str, tied: bool, accumulation: int) -> None:
    """Every number of a run is that of one process."""
    found = pool.run(world, train, kind, tied, settings(world, stage, replicas, accumulation))[0]
    bar = worst(compare(reference(kind, tied, world * accumulation), found))
    assert bar.ok(1e-10), f"{bar.name}: {bar.error}"
