"""Where a model for inference comes from: a folder of `save_pretrained` (or `plait export`), or a run or checkpoint of `plait train`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint.described import described_model
from plait.checkpoint.folder import Found
from plait.checkpoint.inspect import open_one
from plait.checkpoint.load import Reader
from plait.checkpoint.model_content import content
from plait.errors import CheckpointError, InputError
from plait.model.described import require_transformers
from plait.sharded.assemble import Filler
from plait.sharded.load_weights import load_weights, weight_files


@dataclass(frozen=True)
class Source:
    """A model that is not loaded yet."""

    folder: Path
    checkpoint: Found | None
    """None for a folder of Transformers."""
    tokenizer_folder: Path | None

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.checkpoint.path if self.checkpoint is not None else self.folder)

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The model on meta, with its generation settings. `dtype` None is the one that it was saved in."""
        if self.checkpoint is not None:
            return described_model(self.checkpoint, dtype=dtype)
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        try:
            config = AutoConfig.from_pretrained(self.folder)
            with torch.device("meta"):
                found = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"--model {self.folder}: Transformers cannot build it: {first}") from error
        if (self.folder / "generation_config.json").is_file():
            found.generation_config = GenerationConfig.from_pretrained(self.folder)
        return found

    def filler(self) -> Filler:
        """What gives a model its weights; each rank reads its own slices."""
        if self.checkpoint is None:
            return partial(load_weights, folder=self.folder)
        reader = Reader(self.checkpoint)

        def fill(model: nn.Module, *, whole: nn.Module, filled: Any) -> None:
            tensors, _ = content(model)
            lacking = [name for name in tensors if name not in reader.tensors]
            if lacking:
                raise CheckpointError(f"{reader.path} lacks {len(lacking)} tensors of its model, first {lacking[0]}")
            reader.fill(tensors)
            for tensor in tensors.values():
                filled(tensor)

        return fill

    def tokenizer(self) -> Any:
        """Transformers' tokenizer of the folder; None where there is none."""
        if self.tokenizer_folder is None:
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer_folder)


def _is_of_transformers(folder: Path) -> bool:
    """Whether its config.json is a model's: a run of `plait train` has one of the run."""
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def open_source(folder: Path) -> Source:
    """Raises InputError where the folder is neither, CheckpointError where it is incomplete."""
    require_transformers("plait generate")
    if not folder.is_dir():
        raise InputError(f"--model {folder}: is no folder; give one of save_pretrained, a run's folder, or one of its checkpoints")
    if _is_of_transformers(folder):
        weight_files(folder)
        has_words = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model"))
        return Source(folder, None, folder if has_words else None)
    found = open_one(folder)
    words = next((parent / "tokenizer" for parent in (folder, *folder.parents) if (parent / "tokenizer").is_dir()), None)
    return Source(folder, found, words)
