"""Rotary frequencies that depend on the length, on layouts, against Transformers' generate."""

import pytest

from tests.parity import cases
from tests.parity.layouts import TWO
from tests.unit.inference.models import built
from tests.unit.inference.ropes import KINDS, NEW, PROMPTS, expected_tokens


def generate(rank, world, kind, layout):
    """Return (prompt, new tokens) of this rank's requests. Runs on every rank."""
    name, fields = KINDS[kind]
    model = built(name, layers=2, **fields)
    engine = cases.engine(model, {"train_micro_batch_size_per_gpu": 1, **layout})
    prompts = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
    samples = engine.generate(prompts, max_new_tokens=NEW, temperature=0)
    engine.close()
    return [(sample.prompt_ids, sample.token_ids) for sample in samples]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_request_has_the_tokens_of_one_alone(pool, kind):
    name, fields = KINDS[kind]
    expected = []
    for prompt in PROMPTS:
        # A new model, because long prompts change the frequencies that it keeps.
        model = built(name, layers=2, **fields)
        expected.append((prompt, expected_tokens(model, prompt)))
    for layout in ("ZeRO 3", "tp", "pp"):
        for rank, samples in enumerate(pool.run(2, generate, kind, TWO[layout])):
            of_rank = expected[rank::2] if layout == "ZeRO 3" else expected
            assert samples == of_rank, layout
