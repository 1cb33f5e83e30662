"""Generation in a pipeline of models whose blocks receive a mask or position bias of all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import cases
from tests.parity.layouts import TWO

PROMPTS = [[5, 17, 33, 2, 90, 41, 7], [8, 3, 60]]
NEW_TOKENS = 8
GPTJ_SIZES = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
SIZES: dict[str, dict[str, Any]] = {
    "gptj": GPTJ_SIZES,
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    "codegen": GPTJ_SIZES,
    "gpt_neox_japanese": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
}


def build(kind):
    """Build a model with large random weights and without an end token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, initializer_range=0.3, **SIZES[kind], **fields)
    return AutoModelForCausalLM.from_config(config).eval()


def generate_and_train(rank, world, kind):
    """Return the tokens per prompt, and two losses after them. Runs on every rank."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, **TWO["pp"]}
    engine = cases.engine(build(kind), config)
    results = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0)
    ids = torch.tensor([PROMPTS[0]])
    batch = [{"input_ids": ids, "labels": ids}] * 2
    losses = [float(engine.train_batch(batch).loss) for _ in range(2)]
    engine.close()
    return [result.token_ids for result in results], losses


@pytest.mark.parametrize("kind", SIZES)
def test_tokens_are_those_of_transformers(pool, kind):
    model = build(kind)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        expected.append(output[0, len(prompt) :].tolist())
    # A model that repeats one token would hide wrong masks.
    assert len({*expected[0], *expected[1]}) > 3

    (tokens, losses), (other_tokens, _) = pool.run(2, generate_and_train, kind)
    assert tokens == other_tokens == expected
    assert losses[0] != losses[1]
