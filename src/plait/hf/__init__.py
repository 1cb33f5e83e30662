"""The Hugging Face Trainer on any layout: `from plait.hf import Trainer` in place of `from
transformers import Trainer`.

Importing this package takes `TrainingArguments(deepspeed=...)` for Plait; see `hf.arguments`.
"""

from __future__ import annotations

from plait.importing import require_extra

require_extra("plait.hf", "hf", transformers="Hugging Face Transformers", accelerate="Accelerate")

from plait.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402
from plait.hf.loop_accelerator import Accelerator  # noqa: E402
from plait.hf.mixin import TrainerMixin  # noqa: E402
from plait.hf.trainer import Seq2SeqTrainer, Trainer, wrap  # noqa: E402

__all__ = [
    "Accelerator",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
    "wrap",
]
