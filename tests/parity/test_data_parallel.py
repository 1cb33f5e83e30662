"""ZeRO 0 to 3 and hybrid sharding against one process in float64: losses, norms, gradients and parameters after three steps."""

from __future__ import annotations

import pytest

from plait.verify.parity import compare, worst
from tests.parity.data_parallel import LAYOUTS, reference, settings, train
from tests.pool import Pool

MODELS = [
    pytest.param(
        kind,
        tied,
        steps,
        id=f"{kind}-{'tied' if tied else 'untied'}-{steps}",
        marks=[pytest.mark.proof] * ((number + tied + steps // 2) % 2),
    )
    for number, kind in enumerate(("llama", "gpt2", "plain", "frozen"))
    for tied in (False, True)
    for steps in (1, 3)
]
"""Of (kind, tied embeddings, accumulation), all; `make test` takes half, in which every two values meet."""


@pytest.mark.parametrize(("kind", "tied", "accumulation"), MODELS)
@pytest.mark.parametrize(("world", "stage", "replicas"), LAYOUTS)
def test_equals_one_process(pool: Pool, world: int, stage: int, replicas: int, kind: str, tied: bool, accumulation: int) -> None:
    """Every number of a run is that of one process."""
    found = pool.run(world, train, kind, tied, settings(world, stage, replicas, accumulation))[0]
    bar = worst(compare(reference(kind, tied, world * accumulation), found))
    assert bar.ok(1e-10), f"{bar.name}: {bar.error}"
