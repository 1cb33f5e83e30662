"""ZeRO 0 to 3 and hybrid sharding against one process in float64: losses, norms, gradients and parameters after two steps."""

from itertools import product

import pytest

from tests.covers import cover
from tests.parity.data_parallel import LAYOUTS, assert_same, reference, settings, train

MODELS = list(product(("llama", "gpt2", "plain", "frozen"), (False, True), (1, 3)))
ALONE, TOGETHER = (
    [(*layout, *model) for layout in LAYOUTS if (layout[0] == 1) == one for model in MODELS]
    for one in (True, False)
)


def named(*case):
    return "-".join(
        ("tied" if value else "untied") if isinstance(value, bool) else str(value) for value in case
    )


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "kind", "tied", "accumulation"),
    [
        *cover(ALONE, strength=1, name=named),
        *cover(
            TOGETHER,
            features=lambda world, stage, replicas, *model: (world, (stage, replicas), *model),
            cost=lambda world, *_: world,
            name=named,
        ),
    ],
)
def test_equals_one_process(pool, world, stage, replicas, kind, tied, accumulation):
    """Every number of a run is that of one process."""
    found = pool.run(world, train, kind, tied, settings(world, stage, replicas, accumulation))[0]
    assert_same(reference(kind, tied, world * accumulation), found)
