"""Detection of configurations of other programs: Accelerate, the Trainer and Megatron-LM.

`plait config convert` translates them. `load` refuses them, and its error contains the command that
converts them. `load` looks for them only if a file has problems, because every file of another
program has keys that Plait does not know.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from plait.config.dialects.keys import known_paths
from plait.config.source import Document
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
    "activation_checkpointing",
    "auto_wrap_policy",
    "backward_prefetch",
    "cpu_offload",
    "cpu_ram_efficient_loading",
    "forward_prefetch",
    "limit_all_gathers",
    "min_num_params",
    "offload_params",
    "reshard_after_forward",
    "sharding_strategy",
    "state_dict_type",
    "sync_module_states",
    "transformer_layer_cls_to_wrap",
    "use_orig_params",
    "version",
    "xla",
    "xla_fsdp_grad_ckpt",
    "xla_fsdp_settings",
    "xla_fsdp_v2",
)
"""Keys of the Trainer's `fsdp_config`, without the prefix `fsdp_`."""


def is_accelerate(tree: Mapping[str, Any]) -> bool:
    """Return True if a file has keys that only `accelerate config` writes."""
    if any(key in tree for key in _ACCELERATE):
        return True
    # The Trainer's arguments have both keys.
    return "fsdp_config" in tree and "fsdp" not in tree


def is_trainer_fsdp(tree: Mapping[str, Any]) -> bool:
    """Return True for the Trainer's `fsdp` arguments, or for a file that `fsdp_config` names."""
    if "fsdp" in tree:
        return True
    # `activation_checkpointing` is a flag of the Trainer and a section of DeepSpeed.
    known = [name for name in tree if name in known_paths()]
    if any(not isinstance(tree[name], bool | str) for name in known):
        return False
    names = {name.removeprefix("fsdp_") for name in tree}
    return bool(names.intersection(_TRAINER_FSDP) - known_paths())


def refuse_foreign(document: Document) -> None:
    """Refuse a file of Accelerate or of the Trainer's FSDP arguments.

    Raises:
        ConfigError: The file is one of these. The remedy is the command that converts it.
    """
    if is_accelerate(document.tree):
        program = "Accelerate"
    elif is_trainer_fsdp(document.tree):
        program = "the Trainer's FSDP arguments"
    else:
        return
    # The name of a document that was not read from a file is a phrase.
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
    """Refuse a list of Megatron-LM flags.

    Raises:
        ConfigError: Always. The remedy is the command that converts the flags.
    """
    arguments = " ".join(shlex.quote(str(flag)) for flag in flags)
    raise ConfigError(
        Problem(
            "the configuration",
            None,
            "is a list of Megatron-LM's flags",
            f"run: plait config convert -- {arguments}",
        )
    )
