"""ZeRO stages 0 to 3 and hybrid sharding equal one process in float64.

Losses, norms, gradients and parameters are compared after two steps.
"""

from itertools import product

import pytest

from tests.covers import cover
from tests.parity.data_parallel import LAYOUTS, assert_same, reference, settings, train

MODELS = list(product(("llama", "gpt2", "plain", "frozen"), (False, True), (1, 3)))
CASES = [(*layout, *model) for layout, model in product(LAYOUTS, MODELS)]


def named(world, stage, replicas, kind, tied, accumulation):
    return f"{world}-{stage}-{replicas}-{kind}-{'tied' if tied else 'untied'}-{accumulation}"


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "kind", "tied", "accumulation"),
    [
        *cover([case for case in CASES if case[0] == 1], strength=1, name=named),
        *cover(
            [case for case in CASES if case[0] > 1],
            features=lambda world, stage, replicas, *model: (world, (stage, replicas), *model),
            cost=lambda world, *_: world,
            name=named,
        ),
    ],
)
def test_equals_one_process(pool, world, stage, replicas, kind, tied, accumulation):
    config = settings(world, stage, replicas, accumulation)
    trace = pool.run(world, train, kind, tied, config)[0]
    assert_same(reference(kind, tied, world * accumulation), trace)
