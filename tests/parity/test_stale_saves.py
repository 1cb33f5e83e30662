"""An asynchronous checkpoint holds the state of the call, although training continues meanwhile.

Its content hash is compared with that of the live tensors, which other code computes. `make test`
writes a few checkpoints of every kind, `make proof` a thousand in all. The few must notice each
defect of `tools/mutants/defects/stale.yaml` (`make mutants`).
"""

import pytest

from tests.parity.saved_states import FEW, KINDS, saves


@pytest.mark.parametrize("kind", FEW)
def test_a_few_saves_are_of_the_call(pool, tmp_path, kind):
    ranks = KINDS[kind][0]
    assert pool.run(ranks, saves, kind, str(tmp_path), 3) == [3] * ranks


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_saves_are_of_the_call(pool, tmp_path, kind):
    ranks = KINDS[kind][0]
    assert pool.run(ranks, saves, kind, str(tmp_path), 90, timeout=900) == [90] * ranks
