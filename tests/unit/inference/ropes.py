"""Models whose rotary frequencies follow the length, with prompts around the original length.

The expected tokens are those of Transformers.
"""

from __future__ import annotations

from typing import Any

from tests.unit.inference.models import transformers_tokens

ORIGINAL = 32
NEW = 8
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 8,
    "long_factor": [float(factor) for factor in range(2, 10)],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}),
    "longrope": (
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": ORIGINAL, "rope_parameters": LONG},
    ),
}
# With NEW tokens, requests stay within the original length, pass it, or begin beyond it.
LENGTHS = (5, 24, 25, 26, 31, 32, 33, 60, 26, 40)
PROMPTS = [
    [1 + (7 * index + 3 * position) % 90 for position in range(length)]
    for index, length in enumerate(LENGTHS)
]


def expected_tokens(model, prompt):
    """Return the tokens that Plait must generate for one prompt, from a model without other inputs.

    A longrope model generates them without a KV cache. With one, Phi3 of Transformers before 5.20
    drops the cache where a request passes the original length, and then reads only the last token.
    """
    if model.config.rope_parameters["rope_type"] == "longrope":
        return transformers_tokens(model, prompt, NEW, use_cache=False)
    return transformers_tokens(model, prompt, NEW)
