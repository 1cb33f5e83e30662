"""A checkpoint that is written beside the training holds the state of the call: its content hash is that of the live tensors then, which
other code takes; the training goes on before the first byte is written.

`make test` takes a few saves of every kind, `make proof` a thousand. The few saves must notice each defect of
`tools/mutants/defects/stale.yaml` (`make mutants`).
"""

import pytest

from tests.parity.saved_states import FEW, KINDS, saves


@pytest.mark.parametrize("kind", FEW)
def test_a_few_saves_are_of_the_call(pool, tmp_path, kind):
    assert pool.run(KINDS[kind][0], saves, kind, str(tmp_path), 3) == [3] * KINDS[kind][0]


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_saves_are_of_the_call(pool, tmp_path, kind):
    assert (
        pool.run(KINDS[kind][0], saves, kind, str(tmp_path), 90, timeout=900)
        == [90] * KINDS[kind][0]
    )
