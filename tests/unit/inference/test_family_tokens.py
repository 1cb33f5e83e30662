"""Families with unusual caches or layers get the tokens of Transformers."""

from contextlib import closing

import pytest

import plait
from plait.inference.deployment import load_model
from plait.inference.source import open_source
from plait.sharded.cache import has_recurrent_state, supports_cache
from tests.unit.inference.cache_models import GEMMA4, model_of
from tests.unit.inference.models import transformers_tokens
from tests.unit.inference.recurrent_models import FIELDS, NEW, PROMPTS, built, by_transformers


def generated(sharded, prompts, **options):
    answers = plait.generate(sharded, prompts, max_new_tokens=NEW, temperature=0, **options)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("kind", list(FIELDS))
def test_recurrent_states_and_caches_of_a_class(kind):
    model = built(kind)
    expected = by_transformers(model)
    assert supports_cache(model) == has_recurrent_state(model) == (kind in ("jamba", "falcon_h1"))
    with closing(plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})) as sharded:
        for options in ({}, {"prefill_tokens": 3}, {"use_cache": False}, {"batch_size": 2}):
            assert generated(sharded, PROMPTS, **options) == expected, options

        # The second request ends early, and the states of the others must stay with them.
        end = next(
            token
            for step, token in enumerate(expected[1], 1)
            if token not in expected[0][:step] + expected[2][:step]
        )
        truncated = [row[: row.index(end) + 1] if end in row else row for row in expected]
        assert generated(sharded, PROMPTS, eos_token_id=end) == truncated


@pytest.mark.parametrize("kind", list(GEMMA4))
def test_layers_with_heads_of_several_sizes(tmp_path, kind):
    model = model_of(kind)
    prompts = [[5, 17, 33, 2, 39, 31, 7], [8, 3, 30]]
    expected = [transformers_tokens(model, prompt, NEW) for prompt in prompts]
    model.save_pretrained(tmp_path)
    with closing(load_model(open_source(tmp_path))) as sharded:
        assert generated(sharded, prompts) == expected
