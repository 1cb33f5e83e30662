"""The Hugging Face Trainer and Accelerate's Accelerator on any layout.

`from plait.hf import Trainer` replaces `from transformers import Trainer`, and
`from plait.hf import Accelerator` replaces `from accelerate import Accelerator`. Importing this
package makes Plait handle `TrainingArguments(deepspeed=...)`; see `hf.arguments`.
"""

from __future__ import annotations

from plait.importing import require_extra

require_extra("plait.hf", "hf", transformers="Hugging Face Transformers", accelerate="Accelerate")

# Imported after the check, whose error names the missing packages and how to install them.
from plait.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402
from plait.hf.loop_accelerator import Accelerator  # noqa: E402
from plait.hf.trainer import (  # noqa: E402
    Seq2SeqTrainer,
    Trainer,
    TrainerMixin,
    wrap,
)

__all__ = [
    "Accelerator",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
    "wrap",
]
