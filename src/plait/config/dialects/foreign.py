"""Recognises files of other programs, which `load` refuses and `plait config convert`
translates.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from plait.config.dialects.keys import known
from plait.config.reading.source import Document
from plait.errors import ConfigError, Problem

_ACCELERATE = (
    "compute_environment",
    "distributed_type",
    "deepspeed_config",
    "parallelism_config",
    "megatron_lm_config",
    "dynamo_config",
)
"""Keys that only `accelerate config` writes."""
_TRAINER_FSDP = (
    *(
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "cpu_offload",
        "cpu_ram_efficient_loading",
        "forward_prefetch",
    ),
    *(
        "limit_all_gathers",
        "min_num_params",
        "offload_params",
        "reshard_after_forward",
        "sharding_strategy",
        "state_dict_type",
    ),
    *("sync_module_states", "transformer_layer_cls_to_wrap", "use_orig_params", "version"),
    *("xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2"),
)
"""Keys of the Trainer's `fsdp_config`, without `fsdp_`."""


def is_accelerate(tree: Mapping[str, Any]) -> bool:
    """Return whether a file has keys that only `accelerate config` writes."""
    return any(key in tree for key in _ACCELERATE) or ("fsdp_config" in tree and "fsdp" not in tree)


def is_trainer_fsdp(tree: Mapping[str, Any]) -> bool:
    """Return whether a file is the Trainer's `fsdp` and `fsdp_config`, or the file that the latter
    names.
    """
    if "fsdp" in tree:
        return True
    names = [name.removeprefix("fsdp_") for name in tree]
    plaits = [name for name in tree if name in known() and not isinstance(tree[name], bool | str)]
    return (
        bool(names)
        and not plaits
        and any(name in _TRAINER_FSDP and name not in known() for name in names)
    )


def refuse_foreign(document: Document) -> None:
    """Raise ConfigError for a file of Accelerate or of the Trainer's FSDP arguments, with the
    command that converts it.
    """
    if is_accelerate(document.tree):
        program = "Accelerate"
    elif is_trainer_fsdp(document.tree):
        program = "the Trainer's FSDP arguments"
    else:
        return
    file = "FILE" if " " in document.name else document.name
    raise ConfigError(
        Problem(
            document.name,
            None,
            f"is a configuration of {program}",
            f"run: plait config convert {file}",
        )
    )


def refuse_flags(flags: Sequence[str]) -> NoReturn:
    """Raise ConfigError for a list of Megatron-LM's flags, with the command that converts them."""
    shown = " ".join(shlex.quote(str(flag)) for flag in flags)
    raise ConfigError(
        Problem(
            "the configuration",
            None,
            "is a list of Megatron-LM's flags",
            f"run: plait config convert -- {shown}",
        )
    )
