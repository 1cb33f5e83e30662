"""Discovery of tensors in the output of a `fully_shard` unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.utils._pytree import tree_leaves


def watch_dataclasses(module: FSDPModule) -> None:
    """Make the backward of a unit gather its parameters if its forward returns a dataclass.

    The backward gathers a unit when a gradient of its output arrives. torch 2.11 finds tensors in
    an output with pytree functions only, which treat unregistered dataclasses as leaves. The
    backward would then compute with freed memory. Later releases search dataclasses. Call this once
    per unit.
    """
    if hasattr(_common_utils, "collect_grad_tensors"):
        return
    state: Any = module._get_fsdp_state()
    register = state._register_pre_backward_hook

    def register_in_dataclasses(output: Any) -> Any:
        if torch.is_grad_enabled():
            register(list(_leaves(output)))
        return output

    state._register_pre_backward_hook = register_in_dataclasses


def _leaves(output: Any) -> Iterator[Any]:
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf
