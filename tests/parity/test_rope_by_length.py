"""Rotary frequencies that follow the length, on layouts: the tokens of Transformers' generate of each request alone."""

import pytest

import plait
from tests.parity.layouts import TWO
from tests.unit.inference.models import built
from tests.unit.inference.ropes import KINDS, NEW, PROMPTS, expected_tokens


def generated(rank, world, kind, config):
    """Each of this rank's prompts, and what it became. Runs in a worker."""
    name, fields = KINDS[kind]
    model = built(name, layers=2, **fields)
    engine = plait.initialize(
        model, {"train_micro_batch_size_per_gpu": 1, **config}, loss_fn=plait.causal_lm_loss
    )
    mine = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
    made = engine.generate(mine, max_new_tokens=NEW, temperature=0)
    engine.close()
    return [(one.prompt_ids, one.token_ids) for one in made]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_layouts(pool, kind):
    name, fields = KINDS[kind]
    expected = [
        (prompt, expected_tokens(built(name, layers=2, **fields), prompt)) for prompt in PROMPTS
    ]
    for layout in ("ZeRO 3", "tp", "pp"):
        found = pool.run(2, generated, kind, TWO[layout])
        for rank, one in enumerate(found):
            assert one == (expected[rank::2] if layout == "ZeRO 3" else expected), (kind, layout)
