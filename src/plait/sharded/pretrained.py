"""`plait.from_pretrained`: a Transformers model that receives its weights when it is sharded.

The model is built on `meta` from a folder of `save_pretrained`, on this machine or on the Hugging
Face hub. Its attribute `_WEIGHTS_FOLDER` names that folder, from which `assemble.shard` fills the
model. Each rank reads only its own slices.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from plait.cluster.topology import place
from plait.errors import CheckpointError, InputError, first_line, warn
from plait.files import is_path, user_path
from plait.model.described import require_transformers
from plait.sharded.load_weights import sources_of, weight_files

_WEIGHTS_FOLDER = "_plait_weights"


def from_pretrained(
    name: str | Path, *, model_class: Any = None, dtype: torch.dtype = torch.float32, **fields: Any
) -> nn.Module:
    """Return a saved model without its weights, in training mode.

    `plait.initialize`, `plait.parallelize` and `plait.hf.Trainer` read the weights; each rank reads
    the slices that it keeps.

    In these cases Transformers loads the model, in full in every process and with a warning:

    - Transformers converts the weights of this family while it loads them, or adds a new head.
    - The weights are quantised (config.json has quantization_config).
    - The model's class creates parameters on the CPU even under `torch.device("meta")`.

    Args:
        name: Folder of `save_pretrained`, or the model's name on the hub.
        model_class: Class of Transformers. The default is AutoModelForCausalLM.
        dtype: Dtype of the parameters, which the optimizer updates. The dtype of the computation
            is a setting of the configuration.
        fields: Values that replace fields of config.json.

    Raises:
        InputError: The folder does not exist, the model cannot be built, or config.json has no
            field of this name.
    """
    require_transformers("plait.from_pretrained")
    from transformers import AutoModelForCausalLM

    folder = saved_folder(name, "plait.from_pretrained")
    kind = model_class or AutoModelForCausalLM
    # Otherwise Transformers would ask at the terminal, once per process.
    fields.setdefault("trust_remote_code", False)
    model, config, settings = _build_on_meta(name, folder, kind, dtype, fields)

    quantisation = quantisation_of(config)
    not_on_meta = next((name for name, p in model.named_parameters() if not p.is_meta), None)
    try:
        if quantisation is not None:
            raise CheckpointError(f"its weights are quantised ({quantisation})")
        if not_on_meta is not None:
            raise CheckpointError(
                f"{type(model).__name__} creates {not_on_meta} on the CPU even under"
                " torch.device('meta')"
            )
        sources_of(model, model.state_dict(keep_vars=True), weight_files(folder), folder)
    except CheckpointError as error:
        reason = str(error)
        if quantisation is None and not_on_meta is None:
            reason = f"it converts or adds weights: {error}"
        if place().rank == 0:
            warn(
                f"plait.from_pretrained: Transformers loads {folder} in full in every process,"
                f" because {reason}"
            )
        try:
            return _load_in_full(name, folder, kind, dtype, fields, quantisation=quantisation)
        except SafetensorError:
            # The files are damaged. `error` describes it with a remedy.
            raise error from None

    if getattr(model, "generation_config", None) is not None:
        model.generation_config = settings
    # Plain attributes, outside nn.Module's registries.
    object.__setattr__(model, _WEIGHTS_FOLDER, folder)
    if callable(getattr(model, "resize_token_embeddings", None)):
        object.__setattr__(
            model, "resize_token_embeddings", types.MethodType(_refuse_resize, model)
        )
    return model.train()


def _build_on_meta(
    name: str | Path, folder: Path, kind: Any, dtype: torch.dtype, fields: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Return (model on meta, configuration of the model, settings for generation)."""
    from transformers import AutoConfig

    try:
        config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **fields)
        if unknown:
            raise InputError(
                f"plait.from_pretrained({', '.join(f'{field}=...' for field in unknown)}):"
                f" config.json of a {config.model_type} has no such field; check its spelling, or"
                " leave it out"
            )
        with torch.device("meta"):
            model = _build(kind, config, dtype, trust_remote_code=fields["trust_remote_code"])
        return model, config, generation_settings(folder)
    except InputError:
        raise
    except Exception as error:
        # Each configuration class validates in its own way.
        reason = f"{kind.__name__} cannot be built from its config.json ({first_line(error)})"
        if "trust_remote_code" in str(error):
            reason = (
                "it needs the code in the folder; read that code, and pass trust_remote_code=True"
                " if you trust it"
            )
        raise InputError(f"plait.from_pretrained({str(name)!r}): {reason}") from error


def _build(kind: Any, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    # Auto classes.
    if hasattr(kind, "from_config"):
        return kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # The constructor of a model has no argument for the dtype.
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(default_dtype)


def _load_in_full(
    name: str | Path,
    folder: Path,
    kind: Any,
    dtype: torch.dtype,
    fields: dict[str, Any],
    *,
    quantisation: str | None,
) -> nn.Module:
    try:
        model: nn.Module = kind.from_pretrained(folder, dtype=dtype, **fields)
        return model.train()
    except ImportError as error:
        # The library that quantised the weights is not installed.
        raise InputError(f"plait.from_pretrained({str(name)!r}): {first_line(error)}") from error
    except ValueError as error:
        if quantisation is None:
            raise
        raise InputError(
            f"plait.from_pretrained({str(name)!r}): Transformers cannot load its quantised weights"
            f" ({first_line(error)}); correct quantization_config in its config.json"
        ) from error


def _refuse_resize(
    self: Any, new_num_tokens: int | None = None, *args: Any, **settings: Any
) -> Any:
    """Resize an embedding, or raise InputError while the model is on meta.

    Once the model has its weights, Transformers' method is restored, or the sharded model refuses
    the call.
    """
    # Without arguments the call only returns the embedding.
    only_reads = new_num_tokens is None and not args and not settings
    if only_reads or not next(self.parameters()).is_meta:
        return type(self).resize_token_embeddings(self, new_num_tokens, *args, **settings)
    folder = vars(self)[_WEIGHTS_FOLDER]
    raise InputError(
        f"{type(self).__name__}.resize_token_embeddings({new_num_tokens}) of a model of"
        " plait.from_pretrained, which has no weights yet:"
        f" {resize_remedy(folder, new_num_tokens or 0)} and give that folder to"
        " plait.from_pretrained"
    )


def resize_remedy(folder: Path, tokens: int) -> str:
    """Return the remedy for a saved model whose embedding has too few rows for a tokenizer.

    Args:
        folder: The folder of the model.
        tokens: Number of rows that are needed.

    Returns:
        A clause for a message, without a final period.
    """
    return (
        f'resize and save it once: model = AutoModelForCausalLM.from_pretrained("{folder}"), '
        f"model.resize_token_embeddings({tokens}), model.save_pretrained(another folder),"
    )


def weights_of(model: nn.Module) -> Path | None:
    """Return the weights folder of a model that `from_pretrained` returned, or None.

    Raises:
        InputError: Only a submodule comes from `from_pretrained` and has no weights yet. The folder
            has no weights for the other modules.
    """
    for name, module in model.named_modules():
        folder: Path | None = vars(module).get(_WEIGHTS_FOLDER)
        if folder is None:
            continue
        if name and next(module.parameters()).is_meta:
            raise InputError(
                f"`{name}` was created by plait.from_pretrained and has no weights yet, but it is"
                f" part of another model, and {folder} does not contain the other parameters;"
                f" build it with {type(module).__name__}.from_pretrained, which loads it in full"
                " in every process"
            )
        return folder
    return None


def saved_folder(name: str | Path, field: str) -> Path:
    """Return the folder of a saved model on this machine. Fetches it from the hub if necessary.

    Args:
        name: A folder, or the model's name on the hub.
        field: Setting or call that the name comes from, for messages.

    Raises:
        InputError: There is no such folder, or it has no weights in safetensors.
    """
    folder = user_path(name, field)
    if not folder.is_dir():
        folder = _fetch(str(name), field)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{field} = {str(name)!r}: the folder needs config.json and *.safetensors; save the"
            " model with save_pretrained"
        )
    return folder


def _fetch(name: str, field: str) -> Path:
    remedy = "name a folder with config.json and safetensors weights"
    if is_path(name):
        raise InputError(f"{field} = {name!r}: there is no such folder; {remedy}")

    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
        )
    except Exception as error:
        # The hub and the network raise a dozen classes.
        raise InputError(
            f"{field} = {name!r}: there is no such folder, and it cannot be fetched from the hub"
            f" ({first_line(error)}); {remedy}"
        ) from error


def quantisation_of(config: Any) -> str | None:
    """Return the quantisation method in a Transformers configuration.

    Returns:
        The name in config.json ("torchao", "bitsandbytes", ...), or None for weights that are not
        quantised.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        # A model with images may have it in the configuration of its language model.
        quantisation = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if quantisation is None:
        return None
    if isinstance(quantisation, dict):
        method = quantisation.get("quant_method")
    else:
        method = getattr(quantisation, "quant_method", None)
    return str(getattr(method, "value", method) or "quantization_config")


def generation_settings(folder: Path) -> Any:
    """Return Transformers' GenerationConfig of a folder.

    It is read from generation_config.json, or from config.json if there is no such file.
    """
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(
        folder, config_file_name="config.json", _from_model_config=True
    )
