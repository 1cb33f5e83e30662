"""The tiny model of `trainers` with LoRA adapters, which PEFT makes."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity import trainers

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def model(dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, targets: Any = TARGETS) -> Any:
    """With B that is not zero, so that every gradient counts."""
    return on(trainers.model(dtype), dropout=dropout, targets=targets)


def on(base: Any, *, dropout: float = 0.0, targets: Any = TARGETS) -> Any:
    """The same adapters on a model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    found = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=list(targets), task_type="CAUSAL_LM"))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=draw)
    return found
