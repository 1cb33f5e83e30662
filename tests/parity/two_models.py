"""Layouts that weights go from and to, and a model with values of its own for each side."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity import cases, layouts

LAYOUTS: dict[str, dict[str, Any] | None] = {
    **{name: layouts.TWO[name] for name in ("ZeRO 1", "ZeRO 3", "tp", "sequence parallel", "pp")},
    "one": None,
}
"""None: a plain module on the first rank, and nothing on the others."""
FOUR: dict[str, dict[str, Any] | None] = {
    **{name: layouts.FOUR[name] for name in ("tp x pp", "pp x ZeRO 3", "hybrid sharding")},
    "tp 4": {"parallel": {"tp": 4, **layouts.OFF}},
    "one": None,
}


def built(seed: int, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(cases.transformers_config("llama", tied=tied)).to(dtype)
