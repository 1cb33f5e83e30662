"""Models whose rotary frequencies follow the length, with prompts on both sides of the original length.

The expected tokens are those of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch

ORIGINAL, NEW = 32, 8
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 8, "long_factor": [2.0 + at for at in range(8)],
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "longrope": (
        "phi3",
        {
            "pad_token_id": 0, "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": LONG,
        },
    ),
}  # fmt: skip
LENGTHS = (5, 24, 25, 26, 31, 32, 33, 60, 26, 40)
"""Of prompts: with NEW tokens they stay within the original length, or get past it, or begin past it."""
PROMPTS = [
    [1 + (7 * index + 3 * at) % 90 for at in range(length)] for index, length in enumerate(LENGTHS)
]


def transformers_tokens(model, prompt, **settings):
    """Return the `NEW` greedy tokens that Transformers' `generate` adds to one prompt."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=mask, **greedy, **settings)
    return output[0, len(prompt) :].tolist()


def expected_tokens(model, prompt):
    """Return the tokens that Plait must generate for one prompt, from a model without other inputs.

    A longrope model generates them without a KV cache. With one, Phi3 of Transformers before 5.20
    drops the cache where a request passes the original length, and then reads only the last token
    (`rereads_prompts`).
    """
    if model.config.rope_parameters["rope_type"] == "longrope":
        return transformers_tokens(model, prompt, use_cache=False)
    return transformers_tokens(model, prompt)


def rereads_prompts(model):
    """Return whether Transformers' `generate` reads all tokens again past the original length."""
    token_counts: list[int] = []

    def count_tokens(_module, _args, inputs):
        token_counts.append(inputs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    ids = torch.ones(1, ORIGINAL, dtype=torch.long)
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    handle.remove()
    return token_counts == [ORIGINAL, ORIGINAL + 1]
