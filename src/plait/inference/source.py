"""Sources of models for inference.

A source is a folder of `save_pretrained` (or `plait export`), or a run or checkpoint of
`plait train`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.inspect import open_checkpoint
from plait.checkpoint.load import Reader, build_described_model
from plait.checkpoint.states import MODEL_START
from plait.errors import CheckpointError, InputError, first_line
from plait.inference.adapters import Adapter, base_folder, is_adapter_folder, open_adapter
from plait.inference.weight_files import stored_tensors
from plait.model.described import require_transformers
from plait.model.float32 import keep_in_float32
from plait.model.layers import tied_names
from plait.sharded.assemble import WeightFiller
from plait.sharded.load_weights import (
    INDEX_FILE,
    SINGLE_FILE,
    load_weights,
    open_safetensors,
    weight_files,
)
from plait.sharded.pretrained import generation_settings, quantisation_of

_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Suffixes of the files of a model and its tokenizer."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class Source:
    """Folder of a model, run or checkpoint whose weights are not loaded yet."""

    folder: Path
    checkpoint: CheckpointFolder | None
    """Checkpoint of `plait train`; None for a folder of Transformers."""
    tokenizer_folder: Path | None
    adapter: Adapter | None = None
    """Adapter on the model."""

    @property
    def name(self) -> str:
        """Path of the model, for messages."""
        return str(self.checkpoint.path if self.checkpoint is not None else self.folder)

    def stamp(self) -> str:
        """Return a hash that changes if a file of the model, tokenizer or adapter is replaced."""
        folders = [self.folder if self.checkpoint is None else Path(str(self.checkpoint.path))]
        if self.tokenizer_folder is not None:
            folders.append(self.tokenizer_folder)
        if self.adapter is not None:
            folders.append(self.adapter.folder)

        digest = hashlib.sha256()
        for folder in folders:
            for path in sorted(folder.iterdir()):
                # `plait generate` may be writing its answers to the same folder.
                if path.suffix not in _SUFFIXES or path.name.endswith(".partial.json"):
                    continue
                if path.is_file():
                    status = path.stat()
                    entry = f"{path.name} {status.st_size} {status.st_mtime_ns}\n"
                    digest.update(entry.encode())
        return digest.hexdigest()

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the model on the meta device, with its generation settings and its adapter.

        Args:
            dtype: Dtype of the model. None means the dtype that it was saved in.

        Raises:
            InputError: The model cannot be built, or the adapter belongs to another model.
        """
        model = self._base_model(dtype)
        if self.adapter is not None:
            self.adapter.put_on(model)
        return model

    def _base_model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the model without its adapter, on the meta device."""
        settings: Path | None = self.folder
        if self.checkpoint is None:
            model = model_of_config(self.folder, dtype=dtype)
        else:
            model = build_described_model(self.checkpoint, dtype=dtype)
            settings = self._settings_of_run()
        try:
            if settings is not None:
                model.generation_config = generation_settings(settings)
        except Exception as error:  # invalid JSON and invalid values raise different errors
            raise InputError(
                f"--model {self.name}: the generation settings of generation_config.json, or of"
                f" config.json if it is missing, cannot be read ({first_line(error)}); correct"
                " or remove them"
            ) from error
        return model

    def _settings_of_run(self) -> Path | None:
        """Return the folder of the run, or None if it contains no generation settings."""
        if self.tokenizer_folder is None:
            return None
        run = self.tokenizer_folder.parent
        return run if (run / "generation_config.json").is_file() else None

    def filler(self) -> WeightFiller:
        """Return a function that reads a model's weights. Each rank reads its own slices."""
        if self.adapter is None and self.checkpoint is None:
            return partial(load_weights, folder=self.folder)
        return self._fill_model

    def _fill_model(self, model: nn.Module, *, unsplit_model: nn.Module, filled: Any) -> None:
        tensors = model.state_dict(keep_vars=True)
        self.fill(tensors, unsplit_model=unsplit_model)
        for tensor in tensors.values():
            filled(tensor)

    def fill(self, tensors: Mapping[str, torch.Tensor], *, unsplit_model: nn.Module) -> None:
        """Read the values of the given tensors of the model.

        Args:
            tensors: The tensors by name, sharded or not.
            unsplit_model: The complete model, on the meta device.

        Raises:
            CheckpointError: A tensor is missing, or a file cannot be read.
        """
        if self.adapter is not None:
            tensors = self.adapter.fill(tensors)
            unsplit_model = self._base
        if self.checkpoint is None:
            load_weights(_StateDict(tensors), self.folder, unsplit_model=unsplit_model)
            return

        reader = self._reader
        ties: dict[str, tuple[str, ...]] = {}
        for group in tied_names(unsplit_model):
            ties.update(dict.fromkeys(group, group))
        destinations = {}
        for name, tensor in tensors.items():
            # A tied tensor may be stored under any of its names.
            stored_names = [f"{MODEL_START}{alias}" for alias in (name, *ties.get(name, ()))]
            stored_name = next((alias for alias in stored_names if alias in reader.tensors), None)
            if stored_name is None:
                raise CheckpointError(
                    f"{reader.path} lacks {name}, a tensor of its model; load another checkpoint"
                )
            destinations[stored_name] = tensor
        reader.fill(destinations)

    @cached_property
    def _reader(self) -> Reader:
        """Reader of the checkpoint that `plait train` wrote."""
        assert self.checkpoint is not None
        return Reader(self.checkpoint)

    @cached_property
    def _base(self) -> nn.Module:
        """Complete model without adapter, on the meta device."""
        return self._base_model()

    def tokenizer(self) -> Any:
        """Load Transformers' tokenizer of the model, or return None if it has none.

        Raises:
            InputError: The tokenizer cannot be loaded.
        """
        if self.tokenizer_folder is None:
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.tokenizer_folder, trust_remote_code=False)
        except Exception as error:  # tokenizers raises it for a file that it cannot read
            raise InputError(
                f"--model {self.name}: its tokenizer cannot be loaded ({first_line(error)}); save"
                " it again with save_pretrained"
            ) from error


class _StateDict(nn.Module):
    """Module whose state dict is a subset of a model's tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "_tensors", dict(tensors))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._tensors  # type: ignore[return-value]


def model_of_config(config: Path | Mapping[str, Any], *, dtype: torch.dtype | None) -> nn.Module:
    """Build the model of a configuration on the meta device.

    Args:
        config: Fields of the configuration, a config.json, or a folder with one.
        dtype: Dtype of the model. None means the configuration's dtype, or the dtype of the
            folder's weights if the configuration has none.

    Raises:
        InputError: Transformers cannot build the model, or its weights are quantised.
        CheckpointError: The class of the model cannot be built without memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if isinstance(config, Mapping):
            loaded = AutoConfig.for_model(**config)
        else:
            loaded = AutoConfig.from_pretrained(config, trust_remote_code=False)
        _refuse_other_heads(loaded, config)
        refuse_quantised_folder(loaded, config)
        # The configurations of some folders have no dtype.
        if dtype is None and loaded.dtype is None and isinstance(config, Path):
            dtype = _dtype_of_weights(config)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                loaded, dtype=dtype or loaded.dtype or torch.float32, trust_remote_code=False
            )
        _refuse_values(model, config)
        keep_in_float32(model, dtype or loaded.dtype)
        return model
    except (CheckpointError, InputError):
        raise
    except Exception as error:  # each configuration class validates in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = type(error).__name__
        if lines:
            # An error of two lines has its reason in the second.
            reason = lines[1] if len(lines) == 2 else lines[0]
        name = config["model_type"] if isinstance(config, Mapping) else config
        raise InputError(
            f"--model {name}: Transformers cannot build it: {reason}; correct its configuration"
        ) from error


def _refuse_values(model: nn.Module, name: object) -> None:
    """Raise CheckpointError if a model built on the meta device has parameters with values."""
    for parameter_name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise CheckpointError(
                f"--model {name}: {type(model).__name__} creates {parameter_name} with values even"
                " on the meta device, so the model cannot be built without memory for all of its"
                " weights; load it with Transformers in Python, and use plait.parallelize and"
                " plait.generate"
            )


def _refuse_other_heads(config: Any, name: object) -> None:
    """Raise InputError if Transformers has no causal language model for a configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    shown = config.model_type if isinstance(name, Mapping) else name
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"--model {shown}: {config.model_type} has an encoder and a decoder; generate supports"
            " only decoder-only models (...ForCausalLM)"
        )
    raise InputError(
        f"--model {shown}: Transformers has no causal language model of the type"
        f" {config.model_type}; pass a model with a ...ForCausalLM class"
    )


def refuse_quantised_folder(config: Any, name: object) -> None:
    """Raise InputError if the weights of a Transformers model are stored quantised.

    Such a model has `quantization_config` in its config.json. Names, shapes and dtypes in its files
    are those of the quantisation library, and differ from those of the model's parameters.

    Args:
        config: Configuration of the model.
        name: Name of the model, for the message.
    """
    method = quantisation_of(config)
    if method is not None:
        raise InputError(
            f"--model {name}: its weights are quantised ({method}), but this command only reads"
            " weights that are not quantised; pass the folder with the weights before quantisation,"
            " or generate in Python on one device:"
            f" plait.generate(plait.parallelize(plait.from_pretrained({str(name)!r}),"
            ' {"train_micro_batch_size_per_gpu": 1}), prompts)'
        )


def _dtype_of_weights(folder: Path) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in the first file of weights.

    Transformers chooses the same dtype. The result is None if there are no weights.
    """
    if not (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file():
        return None
    path = min(weight_files(folder).values())
    tensors = stored_tensors(path)
    with open_safetensors(path) as file:
        # In the order of safetensors, which Transformers uses as well.
        names = list(file.keys())
    for name in names:
        dtype = tensors[name].dtype
        if dtype is not None and dtype.is_floating_point:
            return dtype
    return None


def is_of_transformers(folder: Path) -> bool:
    """Return True if the config.json of a folder describes a Transformers model.

    The folder of a `plait train` run also has a config.json, but that is the configuration of the
    run.
    """
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def open_source(folder: Path, adapter: Path | None = None) -> Source:
    """Open the folder of a model, run, checkpoint or adapter as a `Source`.

    Args:
        folder: Folder of the model, or of an adapter that names its base model.
        adapter: Folder of an adapter of PEFT for the model.

    Raises:
        InputError: The folders contain no model or no adapter.
        CheckpointError: A folder is incomplete.
    """
    require_transformers("plait generate")
    if not folder.is_dir():
        raise InputError(
            f"--model {folder}: is not a folder; pass one of save_pretrained, a run's folder, or"
            " one of its checkpoints"
        )
    if is_adapter_folder(folder) and not is_of_transformers(folder):
        if adapter is not None:
            raise InputError(
                f"--model {folder}: is an adapter itself, so it cannot be combined with --adapter"
                f" {adapter}; pass the base model as --model"
            )
        adapter = folder
        folder = base_folder(folder)

    base = _open_base(folder)
    if adapter is None:
        return base
    tokenizer_folder = adapter if _has_tokenizer(adapter) else base.tokenizer_folder
    return replace(base, tokenizer_folder=tokenizer_folder, adapter=open_adapter(adapter))


def _open_base(folder: Path) -> Source:
    if is_of_transformers(folder):
        weight_files(folder)  # raises an error if they are incomplete
        return Source(folder, None, folder if _has_tokenizer(folder) else None)

    _refuse_broken_config(folder)
    checkpoint = open_checkpoint(folder)
    tokenizer_folder = None
    # A checkpoint is below the folder of its run, which has the tokenizer.
    for parent in (folder, *folder.parents):
        if (parent / "tokenizer").is_dir():
            tokenizer_folder = parent / "tokenizer"
            break
    return Source(folder, checkpoint, tokenizer_folder)


def _refuse_broken_config(folder: Path) -> None:
    """Raise InputError if a folder has a config.json that is not JSON."""
    file = folder / "config.json"
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return
    except ValueError as error:
        raise InputError(
            f"--model {folder}: its config.json is not JSON ({first_line(error)}); correct it, or"
            " save the model again"
        ) from None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)
