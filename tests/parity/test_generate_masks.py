"""Generation in a pipeline of models whose blocks are given what is as long as the cache: a mask, or a bias of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from tests.parity.layouts import TWO

PROMPTS = [[5, 17, 33, 2, 90, 41, 7], [8, 3, 60]]
NEW = 8
SIZES: dict[str, dict[str, Any]] = {
    "gptj": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 4,
    },
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    "codegen": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 4,
    },
    "gpt_neox_japanese": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}


def built(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, initializer_range=0.3, **SIZES[kind], **ends)
    )


def generated(rank, world, kind):
    """The tokens of each prompt, and losses before and after. Runs in a worker."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, **TWO["pp"]}
    engine = plait.initialize(built(kind).eval(), config, loss_fn=plait.causal_lm_loss)
    made = engine.generate(PROMPTS, max_new_tokens=NEW, temperature=0)
    ids = torch.tensor([PROMPTS[0]])
    losses = [
        float(engine.train_batch([{"input_ids": ids, "labels": ids}] * 2).loss) for _ in range(2)
    ]
    engine.close()
    return [one.token_ids for one in made], losses


@pytest.mark.parametrize("kind", SIZES)
def test_tokens_are_those_of_transformers(pool, kind):
    model, expected = built(kind).eval(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        expected.append(made[0, len(prompt) :].tolist())
    assert len({token for row in expected for token in row}) > 3
    (first, losses), (second, _) = pool.run(2, generated, kind)
    assert first == second == expected
    assert losses[0] != losses[1]
