"""Generation with weights that are streamed to the device: the same tokens, and the rate of the
link.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.inference.generate import generate
from plait.inference.source import Source, open_source
from plait.inference.streamed import least_budget, load_streamed, tensors_of
from plait.units import GIB, MIB
from plait.validation.ceilings import copy_rate
from plait.validation.context import Context, largest_size, require, timed
from plait.validation.models import TINY, WIDE, Workload, on_device
from plait.validation.rows import Verdict, verdict

LEAST_SHARE = 0.9
"""Share of the rate of plain copies from pinned memory that streaming must reach."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    # A layer is on its way for 8 ms at 55 GB/s. Layers of toys would measure Python.
    "wide": {"workload": replace(WIDE, layers=6, vocabulary=32000, length=2048)},
    # With two layers, the places that streamed layers compute in would hold both of them.
    "tiny": {"workload": TINY.with_layers(6)},
}
REQUIRED_BYTES = {"wide": 8 * GIB, "tiny": 0.25 * GIB}
PROMPTS = 2
PROMPT_TOKENS = 12
TOKENS = 16
_UNLIMITED = 1 << 62
_MOST_COPIED_BYTES = 256 * MIB
_OTHER_BYTES = 64 * MIB
"""Part of the budget for keys, values and activations."""


def weights(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Generate with every layer streamed from `settings["source"]`, `host` memory or `files`.

    With `settings["rate"]` the rate is compared with that of plain copies, otherwise the tokens are
    compared with those of the model in the device's memory.
    """
    require("transformers")
    workload: Workload = largest_size(context, SIZES, required_bytes=REQUIRED_BYTES)["workload"]
    with tempfile.TemporaryDirectory(prefix="plait-streaming-") as name:
        source = _saved(context, workload, Path(name))
        model = source.model()
        budget = least_budget(model, tensors_of(source, model), other_bytes=_OTHER_BYTES)
        host_bytes = _UNLIMITED if settings["source"] == "host" else 0
        streamed, seconds, nbytes = _generated(context, source, budget, host_bytes)
        if not settings.get("rate"):
            resident, _, _ = _generated(context, source, _UNLIMITED, 0)
            same = streamed == resident and nbytes > 0
            problem = "other tokens than those of the model in the device's memory"
            return verdict([] if same else [problem], bytes_per_token=nbytes)
    if not nbytes:
        return verdict([f"no layer of {workload.layers} was streamed"])
    rate = TOKENS * nbytes / seconds
    link = copy_rate(context, min(nbytes, _MOST_COPIED_BYTES))
    numbers = {
        "bytes_per_token": nbytes,
        "rate": rate,
        "link": link,
        "share": rate / link,
        "least_share": LEAST_SHARE,
    }
    problem = f"streaming reaches {rate / 1e9:.1f} GB/s, and plain copies {link / 1e9:.1f} GB/s"
    return timed(context, verdict([problem] if rate < LEAST_SHARE * link else [], **numbers))


def _saved(context: Context, workload: Workload, folder: Path) -> Source:
    model: Any = on_device(workload, context.device, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(folder)
    return open_source(folder)


def _generated(
    context: Context, source: Source, budget_bytes: int, host_bytes: int
) -> tuple[list[list[int]], float, int]:
    """Return (tokens, seconds of the second generation, bytes that are streamed per token)."""
    sharded, plan = load_streamed(
        source, budget_bytes=budget_bytes, other_bytes=_OTHER_BYTES, host_bytes=host_bytes
    )
    prompts = [
        [(7 * position + 3 * prompt) % 97 for position in range(PROMPT_TOKENS)]
        for prompt in range(PROMPTS)
    ]
    settings: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": False,
        "use_cache": True,
    }
    try:
        answers = generate(sharded, prompts, **settings)
        context.synchronize()
        started = time.perf_counter()
        generate(sharded, prompts, **settings)
        context.synchronize()
        seconds = time.perf_counter() - started
        return [answer.token_ids for answer in answers], seconds, plan.streamed_bytes
    finally:
        sharded.close()
        del sharded
        gc.collect()
