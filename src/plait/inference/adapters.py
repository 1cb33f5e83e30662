"""LoRA adapters for inference, read from folders that PEFT has saved.

The adapter is not merged into the model. Layers compute base(x) + s B A x, where s is the scaling
of the adapter, with PEFT's own modules. Results are therefore equal to PEFT's, whether weights are
in memory or streamed. The tensors of the adapter stay in memory. Fully trained tensors in the
adapter's file (`modules_to_save`, biases) replace those of the base model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import CheckpointError, InputError
from plait.importing import require_extra
from plait.inference.weight_files import StoredTensor, stored_tensors
from plait.model.layers import first_names
from plait.sharded.load_weights import open_safetensors, read_tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_ADAPTER_NAME = "default"
_FILE_PREFIX = "base_model.model."
"""Prefix of all names in the file of weights."""
_LORA_TENSOR = re.compile(rf"(^|\.)lora_\w+\.{_ADAPTER_NAME}(\.|$)")
_LORA_TENSOR_IN_FILE = re.compile(r"(^|\.)lora_\w+(\.|$)")
_MAGNITUDE = f"lora_magnitude_vector.{_ADAPTER_NAME}.weight"

_USED_FIELDS = {
    *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
    *("bias", "use_rslora", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "use_dora", "lora_bias"),
}
"""Fields of LoraConfig from which PEFT builds its modules."""
_IGNORED_FIELDS = {
    *("base_model_name_or_path", "revision", "peft_type", "task_type", "inference_mode"),
    *("auto_mapping", "peft_version", "megatron_core", "runtime_config", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "modules_to_save"),
    *("init_lora_weights",),
}
"""Fields that change no result, or follow from the file's tensors, or are checked separately."""
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the weights of the base model."""


def is_adapters(name: str) -> bool:
    """Return True if a tensor of a model belongs to an adapter."""
    return _LORA_TENSOR.search(name) is not None


def base_tensor(name: str) -> str:
    """Translate the name of a tensor outside the adapters to its name in the base model."""
    return name.replace(".base_layer.", ".")


def is_adapter_folder(folder: Path) -> bool:
    """Return True if a folder contains an adapter that PEFT has saved."""
    return (folder / CONFIG).is_file()


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter in a folder that PEFT has saved. Its tensors are not loaded yet."""

    folder: Path
    config: Mapping[str, Any]
    """Fields of PEFT's LoraConfig."""
    stored: Mapping[str, StoredTensor]
    """Tensors of the file, by their names without the common prefix."""

    @property
    def replaced(self) -> dict[str, StoredTensor]:
        """Tensors that replace those of the base model, by their names in the base model."""
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in self.stored.items():
            if not _LORA_TENSOR_IN_FILE.search(name):
                tensors[base_tensor(name)] = tensor
        return tensors

    def put_on(self, model: nn.Module) -> None:
        """Add the adapter to a model in place, by wrapping the adapted layers.

        Args:
            model: The base model, on the meta device.

        Raises:
            InputError: The adapter belongs to another model, or contains a fully trained tied
                tensor.
        """
        from peft import LoraConfig, inject_adapter_in_model

        base = model.state_dict()
        tied = set(first_names(model))
        fields = {name: value for name, value in self.config.items() if name in _USED_FIELDS}
        try:
            # With `low_cpu_mem_usage` the adapter is created on the meta device as well.
            inject_adapter_in_model(
                LoraConfig(**fields), model, _ADAPTER_NAME, low_cpu_mem_usage=True
            )
        except (ValueError, TypeError) as error:
            raise InputError(
                f"--adapter {self.folder}: PEFT cannot add it to the model:"
                f" {str(error).splitlines()[0]}; pass an adapter of this model"
            ) from error

        for name, parameter in model.named_parameters():
            if is_adapters(name) and parameter.dtype in (torch.float16, torch.bfloat16):
                # PEFT computes the adapters of such models in float32.
                parameter.data = parameter.data.float()

        adapter_tensors = {}
        for name, tensor in model.state_dict().items():
            if is_adapters(name):
                adapter_tensors[_name_in_file(name)] = tensor
        self._check_tensors(adapter_tensors, base, tied)

    def _check_tensors(
        self,
        adapter_tensors: Mapping[str, torch.Tensor],
        base: Mapping[str, torch.Tensor],
        tied: set[str],
    ) -> None:
        """Raise InputError unless the tensors of the adapter's file match those of the model.

        Args:
            adapter_tensors: Tensors of the wrapped model that belong to the adapter, by their names
                in the adapter's file.
            base: All tensors of the base model.
            tied: Names of tied parameters of the base model.
        """
        if missing := sorted(adapter_tensors.keys() - self.stored.keys()):
            raise InputError(
                f"--adapter {self.folder}: {WEIGHTS} lacks {len(missing)} tensors of the adapter,"
                f" first {missing[0]}; save the adapter again with PEFT"
            )
        for name, stored in self.stored.items():
            tensor = adapter_tensors.get(name, base.get(base_tensor(name)))
            difference = None
            if tensor is None:
                difference = "which the model does not have"
            elif tuple(tensor.shape) != stored.shape:
                difference = f"and the model's is {list(tensor.shape)}"
            if difference is not None:
                raise InputError(
                    f"--adapter {self.folder}: has {name} {list(stored.shape)}, {difference};"
                    " pass an adapter of this model"
                )
            if name not in adapter_tensors and base_tensor(name) in tied:
                raise InputError(
                    f"--adapter {self.folder}: contains a fully trained {name}, but the model ties"
                    " it to another tensor; merge the adapter with PEFT's merge_and_unload, and"
                    " save the merged model"
                )

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read the values of the adapter's tensors into a model.

        Args:
            tensors: Tensors of the model, or of a rank's part of it, by name. Values are converted
                to the dtypes of these tensors.

        Returns:
            The remaining tensors, which belong to the base model, by their names in the base model.
        """
        replaced = self.replaced
        others = {}
        with open_safetensors(self.folder / WEIGHTS) as file, torch.no_grad():
            # Full names by the names that `replaced` and `_name_in_file` use.
            file_names = file.keys()
            names = {base_tensor(name.removeprefix(_FILE_PREFIX)): name for name in file_names}
            for name, tensor in tensors.items():
                stored = _name_in_file(name) if is_adapters(name) else base_tensor(name)
                if is_adapters(name) or stored in replaced:
                    read_tensor(file.get_slice(names[stored]), tensor, name, self.folder / WEIGHTS)
                else:
                    others[stored] = tensor
        return others


def open_adapter(folder: Path) -> Adapter:
    """Open an adapter that PEFT's `save_pretrained` has written.

    Raises:
        InputError: The folder has no adapter, or the adapter is not LoRA or uses a field that is
            not supported.
        CheckpointError: The files of the folder cannot be read.
    """
    require_extra(f"--adapter {folder}", "peft", peft="PEFT")
    if not is_adapter_folder(folder):
        raise InputError(
            f"--adapter {folder}: has no {CONFIG}; pass a folder that PEFT's save_pretrained wrote"
        )
    if not (folder / WEIGHTS).is_file():
        raise InputError(
            f"--adapter {folder}: has no {WEIGHTS}; save it with safe_serialization=True"
        )
    config = _read_config(folder)
    kind = config["peft_type"]
    if kind != "LORA":
        raise InputError(
            f"--adapter {folder}: is of the kind {kind}; only LORA is supported; merge it into the"
            " model with PEFT, and save the merged model"
        )

    remedy = "merge it into the model with PEFT (merge_and_unload), and save the merged model"
    for name, value in config.items():
        if value and name not in _USED_FIELDS | _IGNORED_FIELDS:
            raise InputError(f"--adapter {folder}: {name} = {value!r} is not supported; {remedy}")
    initialisation = config.get("init_lora_weights")
    if initialisation not in _INITIALISATIONS:
        raise InputError(
            f"--adapter {folder}: init_lora_weights = {initialisation!r} has also changed the base"
            f" model's weights; {remedy}"
        )

    stored = {}
    for name, tensor in stored_tensors(folder / WEIGHTS).items():
        stored[name.removeprefix(_FILE_PREFIX)] = tensor
    return Adapter(folder, config, stored)


def base_folder(folder: Path) -> Path:
    """Return the folder of the base model that an adapter's configuration names.

    Raises:
        InputError: The base model is not a folder on this machine.
        CheckpointError: The configuration of the adapter cannot be read.
    """
    base = _read_config(folder).get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise InputError(
            f"--model {folder}: is an adapter, but its base model {base!r} is not a folder on this"
            f" machine; pass --model BASE --adapter {folder}"
        )
    return Path(base)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter, and check that it has a `peft_type`."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config["peft_type"]  # other files of this name have none
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is not a configuration of PEFT: {error}; save the adapter"
            " again with PEFT"
        ) from None
    return config


def _name_in_file(name: str) -> str:
    """Return the name under which PEFT's file stores a tensor, without the common prefix.

    Names in the file do not contain the name of the adapter.
    """
    if name.endswith(_MAGNITUDE):
        return name.removesuffix(f".{_ADAPTER_NAME}.weight")
    if name.endswith(f".{_ADAPTER_NAME}"):
        return name.removesuffix(f".{_ADAPTER_NAME}")
    return name.replace(f".{_ADAPTER_NAME}.", ".")
