"""Where a model for inference comes from: a folder of `save_pretrained` (or `plait export`), or a
run or checkpoint of `plait train`.
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

from plait.checkpoint.described import described_model
from plait.checkpoint.folder import Found
from plait.checkpoint.inspect import open_one
from plait.checkpoint.load import Reader
from plait.checkpoint.model_content import START, content
from plait.errors import CheckpointError, InputError, first_line
from plait.inference.adapters import Adapter, base_folder, is_adapter_folder, open_adapter
from plait.inference.stored import stored_tensors
from plait.model.described import require_transformers
from plait.model.float32 import keep_in_float32
from plait.model.tied import tied_names
from plait.sharded.assemble import Filler
from plait.sharded.load_weights import INDEX, SINGLE, load_weights, opened, weight_files
from plait.sharded.pretrained import generation_settings, quantisation_of

_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Of a model and its tokenizer."""


@dataclass(frozen=True)
class Source:
    """A model that is not loaded yet."""

    folder: Path
    checkpoint: Found | None
    """None for a folder of Transformers."""
    tokenizer_folder: Path | None
    adapter: Adapter | None = None
    """On the model."""

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.checkpoint.path if self.checkpoint is not None else self.folder)

    def stamp(self) -> str:
        """Another one when a file of the model, its tokenizer or its adapter is replaced."""
        model = self.folder if self.checkpoint is None else Path(str(self.checkpoint.path))
        folders = [
            model,
            self.tokenizer_folder,
            None if self.adapter is None else self.adapter.folder,
        ]
        digest = hashlib.sha256()
        for path in (
            path for folder in folders if folder is not None for path in sorted(folder.iterdir())
        ):
            if path.suffix in _FILES and not path.name.endswith(".partial.json") and path.is_file():
                found = path.stat()
                digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The model on meta, with its generation settings and its adapter. `dtype` None is the one
        that it was saved in. Raises InputError for an adapter of another model.
        """
        found = self._without_adapter(dtype)
        if self.adapter is not None:
            self.adapter.put_on(found)
        return found

    def _without_adapter(self, dtype: torch.dtype | None = None) -> nn.Module:
        settings: Path | None = self.folder
        if self.checkpoint is not None:
            found = described_model(self.checkpoint, dtype=dtype)
            run = None if self.tokenizer_folder is None else self.tokenizer_folder.parent
            settings = (
                run if run is not None and (run / "generation_config.json").is_file() else None
            )
        else:
            found = described(self.folder, dtype=dtype)
        try:
            if settings is not None:
                found.generation_config = generation_settings(settings)
        except Exception as error:  # of a file that is no JSON, and of values, each in its own way
            raise InputError(
                f"--model {self.name}: the generation settings of generation_config.json, or of"
                f" config.json where there is none, cannot be read ({first_line(error)}); correct"
                " or remove them"
            ) from error
        return found

    def filler(self) -> Filler:
        """What gives a model its weights; each rank reads its own slices."""
        if self.adapter is not None:

            def fill_all(model: nn.Module, *, whole: nn.Module, filled: Any) -> None:
                tensors = model.state_dict(keep_vars=True)
                self.fill(tensors, whole=whole)
                for tensor in tensors.values():
                    filled(tensor)

            return fill_all
        if self.checkpoint is None:
            return partial(load_weights, folder=self.folder)
        reader = self._reader

        def fill(model: nn.Module, *, whole: nn.Module, filled: Any) -> None:
            tensors, _ = content(model)
            lacking = [name for name in tensors if name not in reader.tensors]
            if lacking:
                raise CheckpointError(
                    f"{reader.path} lacks {len(lacking)} tensors of its model, first {lacking[0]}"
                )
            reader.fill(tensors)
            for tensor in tensors.values():
                filled(tensor)

        return fill

    def fill(self, tensors: Mapping[str, torch.Tensor], *, whole: nn.Module) -> None:
        """Give some of the model's tensors, sharded or not, their values; `whole` is the uncut
        model on meta.
        """
        if self.adapter is not None:
            tensors = self.adapter.fill(tensors)
            whole = self._base
        if self.checkpoint is None:
            load_weights(_Some(tensors), self.folder, whole=whole)
            return
        reader = self._reader
        ties = {name: group for group in tied_names(whole) for name in group}
        wanted = {}
        for name, tensor in tensors.items():
            stored = next(
                (one for one in (name, *ties.get(name, ())) if f"{START}{one}" in reader.tensors),
                None,
            )
            if stored is None:
                raise CheckpointError(f"{reader.path} lacks {name}, a tensor of its model")
            wanted[f"{START}{stored}"] = tensor
        reader.fill(wanted)

    @cached_property
    def _reader(self) -> Reader:
        """Of the checkpoint."""
        assert self.checkpoint is not None
        return Reader(self.checkpoint)

    @cached_property
    def _base(self) -> nn.Module:
        """The uncut model without adapter, on meta."""
        return self._without_adapter()

    def tokenizer(self) -> Any:
        """Transformers' tokenizer of the folder; None where there is none."""
        if self.tokenizer_folder is None:
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.tokenizer_folder, trust_remote_code=False)
        except (
            Exception
        ) as error:  # tokenizers raises plain Exception for a file that it cannot read
            raise InputError(
                f"--model {self.name}: its tokenizer cannot be loaded ({first_line(error)}); save"
                " it anew with save_pretrained"
            ) from error


class _Some(nn.Module):
    """Some of a model's tensors, under their names in it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "_some", dict(tensors))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = self._some  # type: ignore[assignment]
        return found


def described(config: Path | Mapping[str, Any], *, dtype: torch.dtype | None) -> nn.Module:
    """The model of a configuration (its fields, a config.json, or a folder with one) on meta.
    `dtype` None is the configuration's, or that of the folder's weights where it says none. Raises
    InputError where Transformers cannot build it, or has quantised its weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        found = (
            AutoConfig.for_model(**config)
            if isinstance(config, Mapping)
            else AutoConfig.from_pretrained(config, trust_remote_code=False)
        )
        _refuse_other_heads(found, config)
        refuse_quantised_folder(found, config)
        if dtype is None and found.dtype is None and isinstance(config, Path):
            dtype = _dtype_of_weights(config)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                found, dtype=dtype or found.dtype or torch.float32, trust_remote_code=False
            )
        if real := [name for name, tensor in model.named_parameters() if not tensor.is_meta]:
            raise CheckpointError(
                f"--model {config}: {type(model).__name__} makes {real[0]} with values, wherever it"
                " is built, so that no folder of it can be read without memory for all of it; load"
                " it with Transformers in Python, and use plait.parallelize and plait.generate"
            )
        keep_in_float32(model, dtype or found.dtype)
        return model
    except (CheckpointError, InputError):
        raise
    except Exception as error:  # each configuration class validates in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = lines[-1 if len(lines) == 2 else 0] if lines else type(error).__name__
        name = config["model_type"] if isinstance(config, Mapping) else config
        raise InputError(f"--model {name}: Transformers cannot build it: {first}") from error


def _refuse_other_heads(config: Any, name: object) -> None:
    """Raise InputError for a configuration that Transformers has no causal language model of."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    shown = config.model_type if isinstance(name, Mapping) else name
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"--model {shown}: {config.model_type} has an encoder and a decoder; generate is for"
            " models that go on from a text"
        )
    raise InputError(
        f"--model {shown}: Transformers has no causal language model of the type"
        f" {config.model_type}"
    )


def refuse_quantised_folder(config: Any, name: object) -> None:
    """Raise InputError if the weights of a model of Transformers are stored quantised (its
    config.json has quantization_config).

    The names, shapes and dtypes of such files are those of another library, so they cannot be
    counted, split or streamed by the names of the model's parameters.
    """
    if (method := quantisation_of(config)) is not None:
        raise InputError(
            f"--model {name}: its weights are quantised ({method}), and this command reads weights"
            " that are not. In Python, on one "
            f"device: plait.generate(plait.parallelize(plait.from_pretrained({str(name)!r}),"
            ' {"train_micro_batch_size_per_gpu": 1}), '
            "prompts); or give the folder that was quantised"
        )


def _dtype_of_weights(folder: Path) -> torch.dtype | None:
    """Of the first tensor in the first file that has one to compute in, as Transformers chooses it;
    None where there are no weights.
    """
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        return None
    path = min(weight_files(folder).values())
    tensors = stored_tensors(path)
    with opened(path) as file:  # for the order of names
        found = [tensors[name].dtype for name in file.keys()]  # noqa: SIM118 - it is no dict
    return next((one for one in found if one is not None and one.is_floating_point), None)


def is_of_transformers(folder: Path) -> bool:
    """Whether its config.json is a model's: a run of `plait train` has one of the run."""
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def open_source(folder: Path, adapter: Path | None = None) -> Source:
    """A model, with an adapter of PEFT; `folder` may be an adapter's, which names its base. Raises
    InputError where they are none, CheckpointError where they are incomplete.
    """
    require_transformers("plait generate")
    if not folder.is_dir():
        raise InputError(
            f"--model {folder}: is no folder; give one of save_pretrained, a run's folder, or one"
            " of its checkpoints"
        )
    if is_adapter_folder(folder) and not is_of_transformers(folder):
        if adapter is not None:
            raise InputError(
                f"--model {folder}: is an adapter itself, so --adapter {adapter} would be a second"
                " one; give the base as --model"
            )
        folder, adapter = base_folder(folder), folder
    found = _open_base(folder)
    if adapter is None:
        return found
    words = adapter if _has_tokenizer(adapter) else found.tokenizer_folder
    return replace(found, tokenizer_folder=words, adapter=open_adapter(adapter))


def _open_base(folder: Path) -> Source:
    if is_of_transformers(folder):
        weight_files(folder)
        return Source(folder, None, folder if _has_tokenizer(folder) else None)
    found = open_one(folder)
    words = next(
        (
            parent / "tokenizer"
            for parent in (folder, *folder.parents)
            if (parent / "tokenizer").is_dir()
        ),
        None,
    )
    return Source(folder, found, words)


def _has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    )
