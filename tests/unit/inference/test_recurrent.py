"""Models whose layers keep a state that every token changes, or a cache of their own, get the tokens of Transformers."""

import pytest

import plait
from plait.sharded.cache import has_recurrent_state, supports_cache
from tests.unit.inference.recurrent import FIELDS, NEW, PROMPTS, built, by_transformers


@pytest.mark.parametrize("kind", list(FIELDS))
def test_tokens(kind):
    """Of prompts of several lengths together, in pieces and without a cache, also twice and after one of them has ended."""
    model = built(kind)
    expected = by_transformers(model)
    assert supports_cache(model) == has_recurrent_state(model) == (kind in ("jamba", "falcon_h1"))
    sharded = plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})
    for ways in ({}, {"prefill_tokens": 3}, {"use_cache": False}, {"batch_size": 2}):
        made = plait.generate(sharded, PROMPTS, max_new_tokens=NEW, temperature=0, **ways)
        assert [one.token_ids for one in made] == expected, ways
    end = next(
        token for token in expected[1][:3] if all(token not in expected[at][:4] for at in (0, 2))
    )
    made = plait.generate(sharded, PROMPTS, max_new_tokens=NEW, temperature=0, eos_token_id=end)
    for one, row in zip(made, expected, strict=True):
        assert one.token_ids == (row[: row.index(end) + 1] if end in row else row)
    sharded.close()
