"""Tables of the FSDP keys of Accelerate 1.15 and of the Trainer of Transformers 5.23.

Names have no prefix `fsdp_`. Several keys together determine the sharding strategy; they are read
in `fsdp_sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.config.convert.translated import ForeignKey
from plait.config.dialects.deepspeed import Kind
from plait.config.dialects.table_values import as_flag
from plait.config.schema.provenance import Status

_STAGE = "zero_optimization.stage"
_TO_HOST = {
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
}
_BLOCKS = (
    "the unit that is gathered is a block of the model, which is found in it; parallel.blocks names"
    " others"
)
_OVERLAP = "the next block is gathered while one computes, in forward and in backward"
_FILES = "a checkpoint loads on any layout; save_pretrained writes a folder of Hugging Face's"


def on(settings: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that maps true to the settings, and false to none."""
    return lambda value: settings if as_flag(value) else {}


def ignored(name: str, kind: Kind, why: str) -> ForeignKey:
    """Return a key without an equivalent that does not change the results."""
    return ForeignKey(name, Status.IGNORED, kind, why)


def refused(name: str, kind: Kind, why: str, remedy: str, *off: Any) -> ForeignKey:
    """Return a key without an equivalent that changes the results, unless its value is in `off`."""
    return ForeignKey(name, Status.REFUSED, kind, why, off, remedy)


def renamed(
    name: str, kind: Kind, sets: Callable[[Any], Mapping[str, Any]], note: str = ""
) -> ForeignKey:
    """Return a key that has an equivalent in Plait."""
    return ForeignKey(name, Status.SUPPORTED, kind, note, sets=sets)


OFFLOAD = on(_TO_HOST)
"""Settings of FSDP's offload of parameters, gradients and optimizer states to host memory."""

SHARED: tuple[ForeignKey, ...] = (
    ignored("auto_wrap_policy", "text", _BLOCKS),
    ignored("transformer_layer_cls_to_wrap", "any", _BLOCKS),
    ignored("min_num_params", "integer", _BLOCKS),
    ignored("backward_prefetch", "any", _OVERLAP),
    ignored("forward_prefetch", "flag", _OVERLAP),
    ignored(
        "limit_all_gathers", "flag", "a block is freed before the one after the next is gathered"
    ),
    ignored("use_orig_params", "flag", "the optimizer always has the model's own parameters"),
    ignored("sync_module_states", "flag", "the weights of a model are always taken from rank 0"),
    ignored(
        "cpu_ram_efficient_loading",
        "flag",
        "with plait.from_pretrained every rank reads only its slices of the weights",
    ),
    ignored("state_dict_type", "text", _FILES),
    renamed("activation_checkpointing", "flag", on({"parallel.recompute.mode": "full"})),
)
"""Keys that Accelerate and the Trainer have in common."""

ACCELERATE_KEYS: tuple[ForeignKey, ...] = (
    *SHARED,
    renamed("offload_params", "flag", OFFLOAD, "FSDP's offload takes optimizer states with it"),
    renamed(
        "activation_checkpointing_offload",
        "flag",
        on({"activation_checkpointing.cpu_checkpointing": True}),
    ),
    refused(
        "ignored_modules",
        "any",
        "every parameter is sharded or replicated by the stage",
        "leave it out",
        "",
        [],
    ),
)
"""Keys of `fsdp_config` in a file of Accelerate."""

_XLA = "this release does not run on XLA"
_NOT_IN_TRAINER = "the Trainer does not read it in fsdp_config"
TRAINER_KEYS: tuple[ForeignKey, ...] = (
    *SHARED,
    renamed("cpu_offload", "flag", OFFLOAD, "FSDP's offload takes optimizer states with it"),
    refused("offload_params", "flag", _NOT_IN_TRAINER, "write cpu_offload", False),
    refused("sharding_strategy", "any", _NOT_IN_TRAINER, "write reshard_after_forward"),
    refused("xla", "flag", _XLA, "leave it out", False),
    refused("xla_fsdp_v2", "flag", _XLA, "leave it out", False),
    refused("xla_fsdp_grad_ckpt", "flag", _XLA, "leave it out", False),
    ignored("xla_fsdp_settings", "object", "settings of XLA, which is off"),
)
"""Keys of `fsdp_config` in the Trainer's arguments."""

STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
"""ZeRO stage of FSDP1's strategies, in the order of their numbers, which start at 1."""
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def strategy_named(value: Any) -> str:
    """Return the name of FSDP1's strategy, given by its name or number.

    Raises:
        ValueError: There is no such strategy. The text is `rule; remedy`.
    """
    text = str(value).upper()
    names = list(STRATEGIES)
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise ValueError(
            f"is no strategy of FSDP1; use {', '.join(names)}, or 1 to {len(names)} in this order"
        )
    return text


def reshard_settings(value: Any) -> Mapping[str, Any]:
    """Return the settings of FSDP2's `reshard_after_forward`.

    Raises:
        ValueError: The value is not a boolean. The text is `rule; remedy`.
    """
    flag = as_flag(value)
    if flag is None:
        raise ValueError(
            "is true or false in FSDP2 (fsdp_version 2); use true for FULL_SHARD, false for"
            " SHARD_GRAD_OP"
        )
    return {_STAGE: 3 if flag else 2}
