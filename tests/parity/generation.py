"""Tiny models that generate, and what Transformers generates with them in one process."""

import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from tests.parity import cases

PROMPTS = [[5, 17, 33, 2, 90, 41, 7, 11, 64], [8, 3], [71, 12, 12, 12, 99]]


def built(kind="llama", *, tied=False, **fields):
    """Build a model with the same weights on every rank and without an end-of-sequence token."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = cases.transformers_config(kind, tied=tied, layers=4)
    config.update({"eos_token_id": None, "initializer_range": 0.3, **fields})
    return AutoModelForCausalLM.from_config(config)


def engine_on(layout, model, *, size=2):
    """Return an engine with the sections of a layout."""
    config = {"train_micro_batch_size_per_gpu": size, **layout}
    return plait.initialize(model, config, loss_fn=plait.causal_lm_loss)


def by_transformers(model, new, *, prompts=PROMPTS, **settings):
    """Return what Transformers' `generate` returns for the prompts as one batch.

    The prompts are padded on the left.
    """
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = torch.tensor(prompt)
        mask[row, -len(prompt) :] = 1
    with keeping_float64(model):
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            pad_token_id=0,
            **settings,
        )
