"""Models of PEFT: which adapters a generation is right with."""

from __future__ import annotations

from typing import Any

from torch import nn

from plait.errors import InputError


def refuse_other_adapters(model: nn.Module) -> None:
    """Raise InputError for a model of PEFT with an active adapter that computes something else of a
    token than of the same token in a full pass over the text. Its other adapters are computed by
    PEFT's own modules.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    if not configs:
        return
    active: Any = model.active_adapters
    # a method of Transformers' own classes, which do not know them all
    for name in configs if callable(active) else active:
        config = configs[name]
        kind = getattr(config.peft_type, "value", config.peft_type)
        if getattr(config, "is_prompt_learning", False):
            raise InputError(
                f"generate: the adapter {name!r} of the kind {kind} puts"
                f" {config.num_virtual_tokens} virtual tokens before the prompt, which is not"
                " supported; use PEFT's own generate, or an adapter of the kind LORA"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise InputError(
                f"generate: the adapter {name!r} begins at some tokens of the text"
                " (alora_invocation_tokens), which is not supported; use PEFT's own generate, or"
                " an adapter without them"
            )
