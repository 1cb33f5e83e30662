"""`plait.from_pretrained`: a model of Transformers that gets its weights where it is sharded, each
rank its own slices.

The model is built on `meta`, and says in an attribute of its own which folder its weights are in;
whatever shards it (`shard`) fills it.
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
from plait.model.described import require_transformers
from plait.sharded.hub import saved_folder
from plait.sharded.load_weights import sources_of, weight_files

_ATTRIBUTE = "_plait_weights"


def from_pretrained(
    name: str | Path, *, model_class: Any = None, dtype: torch.dtype = torch.float32, **fields: Any
) -> nn.Module:
    """The model in a folder of `save_pretrained`, or of that name on the hub, without its weights:
    `plait.initialize`, `plait.parallelize` and `plait.hf.Trainer` read them, each rank the slices
    that it keeps. In training mode.

    `model_class` is a class of Transformers (AutoModelForCausalLM). `dtype` is the parameters' own,
    which the optimizer updates; what is computed in follows from the configuration. `fields`
    replace those of config.json. Where Transformers converts the weights of a family while it loads
    them, or adds a new head, or has quantised the weights (config.json has quantization_config), or
    a class makes its parameters on the CPU wherever it is built, Transformers loads the model, in
    full in every process, with a warning. Raises InputError for what is no such folder and for
    fields that the model does not have.
    """
    require_transformers("plait.from_pretrained")
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = saved_folder(name, "plait.from_pretrained")
    kind = model_class or AutoModelForCausalLM
    # Transformers would ask at the terminal, once per process
    fields.setdefault("trust_remote_code", False)
    try:
        config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **fields)
        if unknown:
            raise InputError(
                f"plait.from_pretrained({', '.join(f'{field}=...' for field in unknown)}):"
                f" {config.model_type} has no such field"
            )
        with torch.device("meta"):
            model: Any = _built(kind, config, dtype, trust_remote_code=fields["trust_remote_code"])
        settings = generation_settings(folder)
    except InputError:
        raise
    except Exception as error:  # each configuration class validates in its own way
        reason = f"{kind.__name__} cannot be built of it ({first_line(error)})"
        if "trust_remote_code" in str(error):
            reason = (
                "it needs the code in the folder; read that code, and pass trust_remote_code=True"
                " if you trust it"
            )
        raise InputError(f"plait.from_pretrained({str(name)!r}): {reason}") from error
    not_on_meta = next(
        (name for name, parameter in model.named_parameters() if not parameter.is_meta), None
    )
    quantisation = quantisation_of(config)
    try:
        if quantisation is not None:
            raise CheckpointError(f"its weights are quantised ({quantisation})")
        if not_on_meta is not None:
            raise CheckpointError(
                f"{type(model).__name__} makes {not_on_meta} on the CPU wherever it is built"
            )
        sources_of(model, model.state_dict(keep_vars=True), weight_files(folder), folder)
    except CheckpointError as error:
        if place().rank == 0:
            known = quantisation is not None or not_on_meta is not None
            why = error if known else f"it converts or adds weights: {error}"
            warn(
                f"plait.from_pretrained: Transformers loads {folder} in full in every process,"
                f" because {why}"
            )
        try:
            return kind.from_pretrained(folder, dtype=dtype, **fields).train()
        except SafetensorError:
            raise error from None
        except ImportError as missing:  # the library that quantised the weights
            raise InputError(
                f"plait.from_pretrained({str(name)!r}): {first_line(missing)}"
            ) from missing
        except ValueError as refusal:
            if quantisation is None:
                raise
            rule = f"Transformers cannot load its quantised weights ({first_line(refusal)})"
            raise InputError(
                f"plait.from_pretrained({str(name)!r}): {rule}; correct quantization_config in its"
                " config.json"
            ) from refusal
    if getattr(model, "generation_config", None) is not None:
        model.generation_config = settings
    object.__setattr__(model, _ATTRIBUTE, folder)
    if callable(getattr(model, "resize_token_embeddings", None)):
        object.__setattr__(
            model, "resize_token_embeddings", types.MethodType(_refuse_resize, model)
        )
    return model.train()


def grown_folder(folder: Path, tokens: int) -> str:
    """Return what to do, in a sentence without its end, for a saved model that has too few rows for
    a tokenizer.
    """
    return (
        f'resize and save it once: model = AutoModelForCausalLM.from_pretrained("{folder}"), '
        f"model.resize_token_embeddings({tokens}), model.save_pretrained(another folder),"
    )


def _refuse_resize(
    self: Any, new_num_tokens: int | None = None, *args: Any, **settings: Any
) -> Any:
    """Resize an embedding, which on meta would need values that are not there.

    After the model has got its weights, the call is of Transformers again, or refused by the
    sharded model.
    """
    folder = vars(self)[_ATTRIBUTE]
    if (new_num_tokens is None and not args and not settings) or not next(
        self.parameters()
    ).is_meta:
        return type(self).resize_token_embeddings(self, new_num_tokens, *args, **settings)
    raise InputError(
        f"{type(self).__name__}.resize_token_embeddings({new_num_tokens}) of a model of "
        "plait.from_pretrained, which has no weights yet: "
        f"{grown_folder(folder, new_num_tokens or 0)} and give that folder to plait.from_pretrained"
    )


def quantisation_of(config: Any) -> str | None:
    """Return the quantisation method of config.json ("torchao", "bitsandbytes", ...), or None for
    weights that are not quantised.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:  # a model with images may say it of its language model
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return None
    method = (
        found.get("quant_method")
        if isinstance(found, dict)
        else getattr(found, "quant_method", None)
    )
    return str(getattr(method, "value", method) or "quantization_config")


def generation_settings(folder: Path) -> Any:
    """Transformers' GenerationConfig of generation_config.json, or of config.json where there is
    none.
    """
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(
        folder, config_file_name="config.json", _from_model_config=True
    )


def _built(kind: Any, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
    if hasattr(kind, "from_config"):
        found: nn.Module = kind.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
        return found
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(before)


def weights_of(model: nn.Module) -> Path | None:
    """The folder that `from_pretrained` took a model on meta from. Raises InputError where that is
    a part of `model`: its other parts have no weights there.
    """
    for name, module in model.named_modules():
        found: Path | None = vars(module).get(_ATTRIBUTE)
        if found is not None and name and next(module.parameters()).is_meta:
            raise InputError(
                f"`{name}` is a model of plait.from_pretrained, which has no weights yet, inside of"
                f" another one, whose other parameters {found} does not hold; build it with"
                f" {type(module).__name__}.from_pretrained, in full in every process"
            )
        if found is not None:
            return found
    return None
