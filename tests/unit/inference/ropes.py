"""Models whose rotary frequencies follow the length, and prompts on both sides of the original length."""

from __future__ import annotations

from typing import Any

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
PROMPTS = [[1 + (7 * index + 3 * at) % 90 for at in range(length)] for index, length in enumerate(LENGTHS)]
