"""A Transformers causal language model from the `model` section, on the meta device: shapes without
memory.

The engine shards it and only then gives it weights. What the library would let pass silently (a
misspelt field, a vocabulary smaller than the tokenizer's, more positions than the model has) is
refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.config.schema.sections import ModelSection
from plait.data.tokenizer import vocabulary_size
from plait.errors import ConfigError, InputError, Problem, first_line
from plait.model.described import check_fields, described_config, require_transformers
from plait.sharded.cache import attends_to_later_tokens
from plait.sharded.hub import saved_folder
from plait.sharded.pretrained import grown_folder, quantisation_of
from plait.units import dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Built:
    """A model that has shapes and no weights yet."""

    model: nn.Module
    weights: Path | None
    """The folder with its safetensors, or None to initialise from the seed."""
    kind: str
    """The architecture, such as `llama`."""
    hidden_size: int | None
    identity: dict[str, Any]
    """`model.<field>` to value: what a checkpoint must share to fit."""


def weights_folder(section: ModelSection) -> Path | None:
    """Where the weights named by `section.path` are on this machine, fetched from the hub if need
    be. None for a model from scratch.
    """
    return saved_folder(section.path, "model.path") if section.path is not None else None


def check_model(section: ModelSection) -> None:
    """What can be known of a model without its tokenizer. Raises ConfigError for an architecture or
    a field that Transformers does not have, InputError for a folder without weights or where
    Transformers is not installed.
    """
    require_transformers("model")
    if section.config is None:
        weights_folder(section)
        return
    check_fields(section.config)


def build_model(
    section: ModelSection, tokenizer: PreTrainedTokenizerBase, *, positions: int
) -> Built:
    """The model of `section` on the meta device, fit for `tokenizer` and for sequences of
    `positions` tokens.

    Raises ConfigError or InputError when the configuration is not one of a causal language model,
    or does not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_model(section)
    weights = weights_folder(section)
    try:
        config = (
            AutoConfig.from_pretrained(weights, trust_remote_code=False)
            if weights
            else _config(section.config or {}, tokenizer)
        )
    except (ValueError, OSError) as error:
        raise InputError(
            f"model.path: {weights}/config.json is not a Transformers configuration"
            f" ({first_line(error)})"
        ) from error
    if (method := quantisation_of(config)) is not None:
        raise InputError(
            f"model.path: the weights of {weights} are quantised ({method}), and plait train needs "
            "unquantised weights; name the folder of the unquantised model, or train adapters on "
            "this one: plait.hf.Trainer with LoRA on a model that Transformers has loaded"
        )
    _check_fit(config, tokenizer, positions, saved=weights)
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype_of(section.dtype), trust_remote_code=False
            )
    except ValueError as error:
        raise InputError(
            f"model: {config.model_type!r} is not a causal language model of Transformers"
            f" ({first_line(error)})"
        ) from error
    except (
        Exception
    ) as error:  # sizes and numbers that a module cannot have end in whatever it raises
        if isinstance(error, KeyError):  # a word that none of its tables has
            written = {
                name: value
                for name, value in (section.config or {}).items()
                if value == error.args[0]
            }
            if written:
                rule = f"Transformers has no such value for a {config.model_type}"
                raise ConfigError(
                    *(
                        Problem(f"model.config.{name}", value, rule, "correct it")
                        for name, value in written.items()
                    )
                ) from error
        rule = (
            f"no {config.model_type} can be built of it ({type(error).__name__}:"
            f" {first_line(error)[:200]})"
        )
        raise ConfigError(Problem("model.config", None, rule, "correct its sizes")) from error
    if attends_to_later_tokens(model) and _says_so(model.config):
        rule = (
            f"a {config.model_type} with this configuration lets tokens attend to those that it is"
            " to predict"
        )
        remedy = (
            "set is_decoder to true where the architecture has it, choose a causal one, or train it"
            " with plait.hf.Trainer"
        )
        raise ConfigError(Problem("model", None, rule, remedy))
    identity = {
        f"model.{name}": value for name, value in config.to_dict().items() if name not in _NOT_SHAPE
    }
    return Built(
        model.train(),
        weights,
        config.model_type,
        getattr(config, "hidden_size", None),
        identity | {"model.dtype": section.dtype},
    )


def _says_so(config: Any) -> bool:
    """Return whether fields of a configuration show that tokens attend to later ones.

    Attention modules do not show it: those of BigBird-Pegasus and GIT are not causal by themselves,
    but their decoders pass a causal mask. `is_decoder` of GPT-NeoX has no meaning.
    """
    if getattr(config, "is_decoder", None) is False and not str(config.model_type).startswith(
        "gpt_neox"
    ):
        return True
    fields = {
        "use_bidirectional_attention": (True, "all"),
        "is_causal": (False,),
        "causal": (False,),
    }
    return any(getattr(config, name, None) in values for name, values in fields.items())


_NOT_SHAPE = {
    "transformers_version",
    "use_cache",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "architectures",
    "_attn_implementation",
}


def _config(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    follow = {
        "vocab_size": vocabulary_size(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return described_config(fields, follow=follow)


def _check_fit(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    *,
    saved: Path | None,
) -> None:
    needed = vocabulary_size(tokenizer)
    rows = getattr(config, "vocab_size", needed)
    if rows < needed:
        rule = f"the tokenizer has {needed:,} tokens and the model's embedding {rows:,} rows"
        remedy = f"use {needed} or more, leave it out, or set data.tokenizer to the model's own"
        if saved is not None:
            # The rows of a saved model are not a setting of the run.
            remedy = (
                f"{grown_folder(saved, needed)} and set model.path to that folder, or set"
                " data.tokenizer to the model's own"
            )
        raise ConfigError(Problem("model vocab_size", rows, rule, remedy))
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and positions > most:
        rule = f"the model has {most} positions and the run needs {positions}"
        remedy = (
            "raise model.config.max_position_embeddings, or lower data.sequence_length and"
            " run.sample.tokens"
        )
        raise ConfigError(Problem("model max_position_embeddings", most, rule, remedy))
