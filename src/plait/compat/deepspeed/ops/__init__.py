"""`deepspeed.ops`: the Adam optimizers of DeepSpeed."""

from __future__ import annotations

from typing import Any

from plait.compat.deepspeed.ops import adam
from plait.compat.deepspeed.refused import missing

__all__ = ["adam"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    remedy = 'write "optimizer" in the configuration, or pass an optimizer of torch'
    raise missing("deepspeed.ops", name, {}, default=remedy)
