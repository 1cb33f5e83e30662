"""Transformers' own Trainers on Plait, and `wrap` for any other."""

from __future__ import annotations

from typing import Any

import transformers

from plait.errors import InputError
from plait.hf.mixin import TrainerMixin


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on any layout of Plait."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on any layout of Plait."""


def wrap(trainer: type[Any]) -> type[Any]:
    """A class like `trainer`, a subclass of `transformers.Trainer`, on Plait. Raises InputError for
    any other.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise InputError(f"plait.hf.wrap takes a subclass of transformers.Trainer, not {trainer!r}")
    if issubclass(trainer, TrainerMixin):
        return trainer
    return type(
        trainer.__name__,
        (TrainerMixin, trainer),
        {"__doc__": trainer.__doc__, "__module__": trainer.__module__},
    )
