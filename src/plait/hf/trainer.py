"""Transformers' own Trainers on Plait, and `wrap` for subclasses of them."""

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
    """Return a class like `trainer` that trains with Plait.

    Args:
        trainer: A subclass of `transformers.Trainer`, such as a trainer of TRL.

    Raises:
        InputError: `trainer` is something else.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise InputError(f"plait.hf.wrap takes a subclass of transformers.Trainer, not {trainer!r}")
    if issubclass(trainer, TrainerMixin):
        return trainer
    # The name, module and documentation of the class that the script knows.
    members = {"__doc__": trainer.__doc__, "__module__": trainer.__module__}
    return type(trainer.__name__, (TrainerMixin, trainer), members)
