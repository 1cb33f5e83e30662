"""`TrainingArguments(deepspeed=...)` for Plait: Transformers' own handling of that field asks for DeepSpeed, and switches loading and
saving to it.

Importing this module changes `TrainingArguments.__post_init__` and `Trainer.create_accelerator_and_postprocess` of Transformers for the
process: the first leaves `deepspeed` to Plait, the second refuses arguments with it in a Trainer that is not Plait's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import transformers
from transformers import Seq2SeqTrainingArguments as TheirSeq2SeqTrainingArguments
from transformers import TrainingArguments as TheirTrainingArguments

from plait.cluster.topology import without_variable
from plait.errors import InputError

_LAUNCHERS = "ACCELERATE_USE_DEEPSPEED"
"""What `accelerate launch --use_deepspeed` sets."""
_DONE = "_plait_reroutes"


def reroute() -> None:
    """Do it, once."""
    if not getattr(TheirTrainingArguments, _DONE, False):
        TheirTrainingArguments.__post_init__ = _post_init(TheirTrainingArguments.__post_init__)
        transformers.Trainer.create_accelerator_and_postprocess = _refusing(transformers.Trainer.create_accelerator_and_postprocess)
        setattr(TheirTrainingArguments, _DONE, True)


def _post_init(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Any) -> None:
        asked, self.deepspeed = self.deepspeed, None
        try:
            with without_variable(_LAUNCHERS):
                original(self)
        finally:
            self.deepspeed = asked

    return post_init


def _refusing(original: Any) -> Any:
    @wraps(original)
    def create(self: Any) -> None:
        if self.args.deepspeed and not getattr(self, "trains_with_plait", False):
            raise InputError(
                f"{type(self).__name__} got TrainingArguments(deepspeed=...), which Plait takes since `plait.hf` was imported, and it is "
                f"not Plait's; use plait.hf.Trainer, or plait.hf.wrap({type(self).__name__})"
            )
        original(self)

    return create


@dataclass
class TrainingArguments(TheirTrainingArguments):
    """Transformers', with a field for Plait's configuration."""

    plait_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Plait's configuration: a path to JSON or YAML, or its content. As `deepspeed`, by another name."}
    )


@dataclass
class Seq2SeqTrainingArguments(TheirSeq2SeqTrainingArguments):
    """Transformers', with a field for Plait's configuration."""

    plait_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Plait's configuration: a path to JSON or YAML, or its content. As `deepspeed`, by another name."}
    )
