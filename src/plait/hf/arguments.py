"""`TrainingArguments(deepspeed=...)` and `fsdp=` for Plait.

Transformers' own handling of `deepspeed` requires DeepSpeed, and switches loading and saving to it.
That of `fsdp` makes a plugin of Accelerate.

Note [Changes to Transformers]
    Importing this module changes `TrainingArguments.__post_init__` and
    `Trainer.create_accelerator_and_postprocess` of Transformers in this process. The first leaves
    both fields to Plait. The second refuses arguments with one of them in a Trainer that is not
    Plait's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import transformers
from transformers import Seq2SeqTrainingArguments as TheirSeq2SeqTrainingArguments
from transformers import TrainingArguments as TheirTrainingArguments

from plait.cluster.topology import without_variable
from plait.config.convert.conversion import load_foreign
from plait.config.schema.config import Config
from plait.errors import InputError

_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""Environment variable that `accelerate launch --use_deepspeed` sets."""
_MARK = "_plait_reroutes"
"""Attribute of Transformers' class after `reroute`."""


def reroute() -> None:
    """Change Transformers, once per process. See Note [Changes to Transformers]."""
    if getattr(TheirTrainingArguments, _MARK, False):
        return
    TheirTrainingArguments.__post_init__ = _leave_to_plait(TheirTrainingArguments.__post_init__)
    transformers.Trainer.create_accelerator_and_postprocess = _refuse_other_trainer(
        transformers.Trainer.create_accelerator_and_postprocess
    )
    setattr(TheirTrainingArguments, _MARK, True)


def _leave_to_plait(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Any) -> None:
        deepspeed = self.deepspeed
        fsdp = self.fsdp
        fsdp_config = _read_section(self.fsdp_config)
        self.deepspeed = self.fsdp = self.fsdp_config = None
        try:
            with without_variable(_USE_DEEPSPEED):
                original(self)
        finally:
            self.deepspeed = deepspeed
            self.fsdp = fsdp
            self.fsdp_config = fsdp_config

    return post_init


def _read_section(config: Any) -> Any:
    """Return `fsdp_config` as a mapping, also if it names a file.

    Raises:
        InputError: The file cannot be read, or is not a JSON object.
    """
    if not isinstance(config, str):
        return config or {}
    try:
        section = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"TrainingArguments.fsdp_config = {config!r}: is not a JSON file that can be read"
            f" ({error})"
        ) from error
    if not isinstance(section, dict):
        raise InputError(
            f"TrainingArguments.fsdp_config = {config!r}: holds a {type(section).__name__} and not"
            " an object"
        )
    return section


def fsdp_config_of(args: Any) -> Config | None:
    """Return the configuration that `fsdp` and `fsdp_config` describe, or None if FSDP is off.

    Raises:
        ConfigError: A key has no equivalent in Plait.
    """
    if not args.fsdp:
        return None
    return load_foreign({"fsdp": args.fsdp, "fsdp_config": args.fsdp_config})


def _refuse_other_trainer(original: Any) -> Any:
    @wraps(original)
    def create(self: Any) -> None:
        argument = None
        if self.args.deepspeed:
            argument = "deepspeed"
        elif self.args.fsdp:
            argument = "fsdp"
        if argument is not None and not getattr(self, "trains_with_plait", False):
            raise InputError(
                f"{type(self).__name__} got TrainingArguments({argument}=...), which only Plait's"
                " Trainers handle once `plait.hf` is imported; use plait.hf.Trainer, or"
                f" plait.hf.wrap({type(self).__name__})"
            )
        original(self)

    return create


@dataclass
class TrainingArguments(TheirTrainingArguments):
    """`transformers.TrainingArguments` with a field for Plait's configuration."""

    plait_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "Plait's configuration: a path to JSON or YAML, or its content. As `deepspeed`, by"
                " another name."
            )
        },
    )


@dataclass
class Seq2SeqTrainingArguments(TheirSeq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with a field for Plait's configuration."""

    plait_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "Plait's configuration: a path to JSON or YAML, or its content. As `deepspeed`, by"
                " another name."
            )
        },
    )
