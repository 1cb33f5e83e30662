"""`TrainingArguments(deepspeed=...)` and `fsdp=` for Plait: Transformers' own handling of the first
asks for DeepSpeed, and switches loading and saving to it; that of the second makes a plugin of
Accelerate's.

Importing this module changes `TrainingArguments.__post_init__` and
`Trainer.create_accelerator_and_postprocess` of Transformers for the process: the first leaves both
fields to Plait, the second refuses arguments with one of them in a Trainer that is not Plait's.
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

_LAUNCHERS = "ACCELERATE_USE_DEEPSPEED"
"""What `accelerate launch --use_deepspeed` sets."""
_DONE = "_plait_reroutes"


def reroute() -> None:
    """Do it, once."""
    if not getattr(TheirTrainingArguments, _DONE, False):
        TheirTrainingArguments.__post_init__ = _post_init(TheirTrainingArguments.__post_init__)
        transformers.Trainer.create_accelerator_and_postprocess = _refusing(
            transformers.Trainer.create_accelerator_and_postprocess
        )
        setattr(TheirTrainingArguments, _DONE, True)


def _post_init(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Any) -> None:
        asked = self.deepspeed, self.fsdp, _section(self.fsdp_config)
        self.deepspeed = self.fsdp = self.fsdp_config = None
        try:
            with without_variable(_LAUNCHERS):
                original(self)
        finally:
            self.deepspeed, self.fsdp, self.fsdp_config = asked

    return post_init


def _section(config: Any) -> Any:
    """`fsdp_config` as a mapping, where it names a file. Raises InputError."""
    if not isinstance(config, str):
        return config or {}
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"TrainingArguments.fsdp_config = {config!r}: is not a JSON file that can be read"
            f" ({error})"
        ) from error
    if not isinstance(found, dict):
        raise InputError(
            f"TrainingArguments.fsdp_config = {config!r}: holds a {type(found).__name__} and not an"
            " object"
        )
    return found


def fsdp_config_of(args: Any) -> Config | None:
    """Return the configuration that the arguments' `fsdp` and `fsdp_config` describe; None if FSDP
    is off. Raises ConfigError.
    """
    return load_foreign({"fsdp": args.fsdp, "fsdp_config": args.fsdp_config}) if args.fsdp else None


def _refusing(original: Any) -> Any:
    @wraps(original)
    def create(self: Any) -> None:
        given = "deepspeed" if self.args.deepspeed else "fsdp" if self.args.fsdp else None
        if given is not None and not getattr(self, "trains_with_plait", False):
            raise InputError(
                f"{type(self).__name__} got TrainingArguments({given}=...), which Plait takes since"
                " `plait.hf` was imported, and it is not Plait's; use plait.hf.Trainer, or"
                f" plait.hf.wrap({type(self).__name__})"
            )
        original(self)

    return create


@dataclass
class TrainingArguments(TheirTrainingArguments):
    """Transformers', with a field for Plait's configuration."""

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
    """Transformers', with a field for Plait's configuration."""

    plait_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "Plait's configuration: a path to JSON or YAML, or its content. As `deepspeed`, by"
                " another name."
            )
        },
    )
