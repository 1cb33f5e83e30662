"""Generation with weights that are streamed to the device: its tokens are those of the model in memory, and it uses the link."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plait.inference.generate import generate
from plait.inference.source import Source, open_source
from plait.inference.streamed import least_budget, load_streamed, tensors_of
from plait.units import GIB, MIB
from plait.validation.context import Context, require, sized, timed
from plait.validation.links import copy_rate
from plait.validation.memory import LARGE, MEDIUM, SMALL, TINY, fields_of
from plait.validation.rows import Found, compared
from plait.verify.model_under_test import transformers_model

LEAST_SHARE = 0.9
"""Of the rate of plain copies from pinned memory."""
SIZES: Mapping[str, Mapping[str, Any]] = {"large": LARGE, "medium": MEDIUM, "small": SMALL, "tiny": TINY}
NEEDED = {"large": 8 * GIB, "medium": 3 * GIB, "small": 1 * GIB, "tiny": 0.25 * GIB}
PROMPTS, LENGTH, TOKENS = 2, 12, 16
ALL = 1 << 62
MOST_COPIED = 256 * MIB
OTHER = 64 * MIB
"""Of the budget, for keys, values and activations."""


def weights(context: Context, settings: Mapping[str, Any]) -> Found:
    """Every layer streamed from `settings["source"]`, `host` memory or `files`. With `settings["rate"]` the bytes a second are compared
    with those of plain copies; else the tokens with those of the model in the device's memory."""
    require("transformers")
    size = sized(context, SIZES, least_bytes=NEEDED)
    with tempfile.TemporaryDirectory(prefix="plait-streaming-") as name:
        source = _saved(size, Path(name))
        model = source.model()
        least = least_budget(model, tensors_of(source, model), other_bytes=OTHER)
        streamed, seconds, brought = _generated(context, source, least, ALL if settings["source"] == "host" else 0)
        if not settings.get("rate"):
            resident, _, _ = _generated(context, source, ALL, 0)
            same = streamed == resident and brought > 0
            return compared([] if same else ["other tokens than of the model in the device's memory"], bytes_a_token=brought)
    rate, link = TOKENS * brought / seconds, copy_rate(context, min(brought, MOST_COPIED))
    slow = f"{rate / 1e9:.1f} GB/s of weights are streamed, and plain copies have {link / 1e9:.1f} GB/s"
    numbers = {"bytes_a_token": brought, "rate": rate, "link": link, "least_share": LEAST_SHARE}
    return timed(context, compared([slow] if rate < LEAST_SHARE * link else [], **numbers))


def _saved(size: Mapping[str, Any], folder: Path) -> Source:
    torch.manual_seed(0)
    model: Any = transformers_model(fields_of(size, 64), dtype=torch.bfloat16, device="cpu")
    model.save_pretrained(folder)
    return open_source(folder)


def _generated(context: Context, source: Source, budget: int, host_bytes: int) -> tuple[list[list[int]], float, int]:
    """Tokens, seconds of `TOKENS` of them after the first call, and bytes that are brought for each."""
    sharded, planned = load_streamed(source, budget_bytes=budget, other_bytes=OTHER, host_bytes=host_bytes)
    prompts = [[(7 * at + 3 * prompt) % 97 for at in range(LENGTH)] for prompt in range(PROMPTS)]
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "use_cache": True}
    try:
        made = generate(sharded, prompts, **settings)
        context.synchronize()
        began = time.perf_counter()
        generate(sharded, prompts, **settings)
        context.synchronize()
        return [one.token_ids for one in made], time.perf_counter() - began, planned.streamed_bytes
    finally:
        sharded.close()
        del sharded
        gc.collect()
