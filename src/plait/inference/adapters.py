"""A folder with an adapter (PEFT's LoRA) beside a model for inference: its modules in the model,
and its tensors.

Nothing is merged: layers compute base(x) + s B A x with PEFT's own modules, so numbers are PEFT's,
with weights in memory or streamed. The adapter's tensors stay in memory. What it has trained in
full (`modules_to_save`, biases) takes the place of the base's.
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
from plait.inference.stored import Stored, stored_tensors
from plait.model.tied import tied_names
from plait.sharded.load_weights import opened, read_tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
_START = "base_model.model."
"""Of the names in the file."""
_OWN = re.compile(rf"(^|\.)lora_\w+\.{_NAME}(\.|$)")
_OWN_IN_FILE = re.compile(r"(^|\.)lora_\w+(\.|$)")
_MAGNITUDE = f"lora_magnitude_vector.{_NAME}.weight"

_HONOURED = {
    *(
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "fan_in_fan_out",
        "bias",
        "use_rslora",
    ),
    *(
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "use_dora",
        "lora_bias",
    ),
}
"""Fields of LoraConfig that PEFT's modules are made from."""
_OTHERS = {
    *(
        "base_model_name_or_path",
        "revision",
        "peft_type",
        "task_type",
        "inference_mode",
        "auto_mapping",
        "peft_version",
        "megatron_core",
    ),
    *(
        "runtime_config",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
    ),
    *("modules_to_save", "init_lora_weights"),
}
"""Fields that change no number, or are read from the file's tensors, or are looked at here."""
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`: others change the base model's weights, too."""


def is_adapters(name: str) -> bool:
    """Whether a tensor of a model for inference is an adapter's."""
    return _OWN.search(name) is not None


def base_tensor(name: str) -> str:
    """What another tensor is called in the model without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter_folder(folder: Path) -> bool:
    """Whether PEFT wrote an adapter there."""
    return (folder / CONFIG).is_file()


@dataclass(frozen=True)
class Adapter:
    """LoRA that is not loaded yet."""

    folder: Path
    config: Mapping[str, Any]
    """Fields of PEFT's LoraConfig."""
    stored: Mapping[str, Stored]
    """Of the file, by its names without their common beginning."""

    @property
    def replaced(self) -> dict[str, Stored]:
        """Tensors of the base that the adapter has in full, by the base's names."""
        return {
            base_tensor(name): one
            for name, one in self.stored.items()
            if not _OWN_IN_FILE.search(name)
        }

    def put_on(self, model: nn.Module) -> None:
        """Wrap the layers of `model`, on meta, in place. Raises InputError where the folder is of
        another model.
        """
        from peft import LoraConfig, inject_adapter_in_model

        base = model.state_dict()
        tied = {name for group in tied_names(model) for name in group}
        fields = {name: value for name, value in self.config.items() if name in _HONOURED}
        try:
            inject_adapter_in_model(LoraConfig(**fields), model, _NAME, low_cpu_mem_usage=True)
        except (ValueError, TypeError) as error:
            raise InputError(
                f"--adapter {self.folder}: PEFT cannot put it on the model:"
                f" {str(error).splitlines()[0]}"
            ) from error
        for name, parameter in model.named_parameters():
            if is_adapters(name) and parameter.dtype in (torch.float16, torch.bfloat16):
                # PEFT computes adapters of such models in float32
                parameter.data = parameter.data.float()
        own = {
            _in_file(name): tensor
            for name, tensor in model.state_dict().items()
            if is_adapters(name)
        }
        if lacking := sorted(own.keys() - self.stored.keys()):
            raise InputError(
                f"--adapter {self.folder}: {WEIGHTS} lacks {len(lacking)} of its tensors, first"
                f" {lacking[0]}"
            )
        for name, one in self.stored.items():
            found = own.get(name, base.get(base_tensor(name)))
            if found is None or tuple(found.shape) != one.shape:
                what = (
                    "which the model does not have"
                    if found is None
                    else f"and the model's is {list(found.shape)}"
                )
                raise InputError(
                    f"--adapter {self.folder}: has {name} {list(one.shape)}, {what}; is it another"
                    " model's?"
                )
            if name not in own and base_tensor(name) in tied:
                raise InputError(
                    f"--adapter {self.folder}: has trained {name} in full, and the model ties it to"
                    " another tensor; merge it with PEFT's merge_and_unload, and save that"
                )

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give tensors of a model, or of a rank's part of it, their values where the adapter has
        them, in the dtype that they have. Returns the others, by the base's names.
        """
        replaced = self.replaced
        others = {}
        with opened(self.folder / WEIGHTS) as file, torch.no_grad():
            names = {base_tensor(name.removeprefix(_START)): name for name in file.keys()}  # noqa: SIM118 (no mapping)
            for name, tensor in tensors.items():
                stored = _in_file(name) if is_adapters(name) else base_tensor(name)
                if is_adapters(name) or stored in replaced:
                    read_tensor(file.get_slice(names[stored]), tensor, name, self.folder / WEIGHTS)
                else:
                    others[stored] = tensor
        return others


def open_adapter(folder: Path) -> Adapter:
    """Raises InputError for an adapter of another kind than LoRA, and for one with something that
    is not supported, by its name.
    """
    require_extra(f"--adapter {folder}", "peft", peft="PEFT")
    if not is_adapter_folder(folder):
        raise InputError(
            f"--adapter {folder}: has no {CONFIG}; give a folder that PEFT's save_pretrained wrote"
        )
    if not (folder / WEIGHTS).is_file():
        raise InputError(
            f"--adapter {folder}: has no {WEIGHTS}; save it with safe_serialization=True"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / CONFIG} is no configuration of PEFT: {error}") from None
    if kind != "LORA":
        raise InputError(
            f"--adapter {folder}: is of the kind {kind}, and LORA is supported; merge it into the"
            " model with PEFT, and save that"
        )
    remedy = "merge it into the model with PEFT (merge_and_unload), and save that"
    for name, value in config.items():
        if value and name not in _HONOURED | _OTHERS:
            raise InputError(f"--adapter {folder}: {name} = {value!r} is not supported; {remedy}")
    if (beginning := config.get("init_lora_weights")) not in _PLAIN_BEGINNINGS:
        raise InputError(
            f"--adapter {folder}: init_lora_weights = {beginning!r} has changed the base model's"
            f" weights, too; {remedy}"
        )
    return Adapter(
        folder,
        config,
        {name.removeprefix(_START): one for name, one in stored_tensors(folder / WEIGHTS).items()},
    )


def base_folder(folder: Path) -> Path:
    """The model that an adapter's folder names as its base. Raises InputError where it is no folder
    here.
    """
    try:
        named = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONFIG} is no configuration of PEFT: {error}") from None
    if not named or not Path(named).is_dir():
        raise InputError(
            f"--model {folder}: is an adapter, and {named!r}, which it names as its base, is no"
            f" folder here; give --model BASE --adapter {folder}"
        )
    return Path(named)


def _in_file(name: str) -> str:
    """What an adapter's tensor is called in the file."""
    if name.endswith(_MAGNITUDE):
        return name.removesuffix(f".{_NAME}.weight")
    return (
        name.removesuffix(f".{_NAME}")
        if name.endswith(f".{_NAME}")
        else name.replace(f".{_NAME}.", ".")
    )
