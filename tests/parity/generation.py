"""Tiny models that generate, and what Transformers generates with them in one process. Imported by workers."""

import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from tests.parity import cases

PROMPTS = [[5, 17, 33, 2, 90, 41, 7, 11, 64], [8, 3], [71, 12, 12, 12, 99]]


def built(kind="llama", *, tied=False, **fields):
    """With weights, the same on every rank, and without an end."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = cases.transformers_config(kind, tied=tied, layers=4)
    config.update({"eos_token_id": None, "initializer_range": 0.3, **fields})
    return AutoModelForCausalLM.from_config(config)


def engine_on(layout, model, *, size=2):
    """An engine with these sections of a file."""
    config = {"train_micro_batch_size_per_gpu": size, **layout}
    return plait.initialize(model, config, loss_fn=plait.causal_lm_loss)


def by_transformers(model, new, *, prompts=PROMPTS, **settings):
    """What `generate` of Transformers returns for the prompts together, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with keeping_float64(model):
        return model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **settings
        )
