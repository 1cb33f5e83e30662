"""Construction of a Transformers causal language model from the `model` section.

The model is created on the meta device: it has shapes but no memory. The engine shards it first and
then loads or initialises its weights. Mistakes that Transformers would accept silently (a misspelt
field, a vocabulary smaller than the tokenizer's, more positions than the model has) are refused
here.
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
from plait.sharded.pretrained import quantisation_of, resize_remedy, saved_folder
from plait.sizes import dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# Fields of a configuration that do not decide whether a checkpoint fits.
_NOT_SHAPE = {
    "transformers_version",
    "use_cache",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "architectures",
    "_attn_implementation",
}


@dataclass(frozen=True)
class BuiltModel:
    """Model on the meta device, without weights.

    Attributes:
        model: The model, on the meta device.
        weights: Folder with the model's safetensors, or None to initialise the model from the seed.
        kind: Model type of Transformers, such as `llama`.
        hidden_size: Width of the residual stream, or None if the configuration does not tell.
        identity: Values of `model.<field>`. A run resumes only from a checkpoint with the same
            values.
    """

    model: nn.Module
    weights: Path | None
    kind: str
    hidden_size: int | None
    identity: dict[str, Any]


def weights_folder(section: ModelSection) -> Path | None:
    """Return the local folder of `section.path`, or None for a model from scratch.

    Weights on the Hugging Face Hub are downloaded first.
    """
    if section.path is None:
        return None
    return saved_folder(section.path, "model.path")


def check_model(section: ModelSection) -> None:
    """Check the `model` section as far as possible without a tokenizer.

    Raises:
        ConfigError: Transformers does not have the architecture or a field.
        InputError: The folder has no weights, or Transformers is not installed.
    """
    require_transformers("model")
    if section.config is None:
        weights_folder(section)
        return
    check_fields(section.config)


def build_model(
    section: ModelSection, tokenizer: PreTrainedTokenizerBase, *, positions: int
) -> BuiltModel:
    """Build the model of a section on the meta device.

    Args:
        section: Section `model` of the configuration.
        tokenizer: Tokenizer whose vocabulary the embedding must hold.
        positions: Length of the longest sequence that the model must accept.

    Raises:
        ConfigError: The configuration is not one of a causal language model, or does not fit the
            tokenizer or the positions.
        InputError: The folder of `section.path` does not hold a usable model.
    """
    check_model(section)
    weights = weights_folder(section)
    config = _load_config(section, weights, tokenizer)
    _check_fit(config, tokenizer, positions, saved=weights)
    config.use_cache = False
    model = _instantiate(config, section)

    if attends_to_later_tokens(model) and _declares_bidirectional(model.config):
        raise ConfigError(
            Problem(
                "model",
                None,
                f"a {config.model_type} with this configuration lets tokens attend to the later"
                " tokens that it is trained to predict",
                "set is_decoder to true where the architecture has it, choose a causal model, or"
                " train it with plait.hf.Trainer",
            )
        )

    identity = {
        f"model.{name}": value for name, value in config.to_dict().items() if name not in _NOT_SHAPE
    }
    return BuiltModel(
        model=model.train(),
        weights=weights,
        kind=config.model_type,
        hidden_size=getattr(config, "hidden_size", None),
        identity=identity | {"model.dtype": section.dtype},
    )


def _load_config(
    section: ModelSection, weights: Path | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Return the configuration of the folder, or of `section.config` for a model from scratch."""
    from transformers import AutoConfig

    try:
        if weights is not None:
            config = AutoConfig.from_pretrained(weights, trust_remote_code=False)
        else:
            tokenizer_fields = {
                "vocab_size": vocabulary_size(tokenizer),
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
            }
            config = described_config(section.config or {}, defaults=tokenizer_fields)
    except (ValueError, OSError) as error:
        raise InputError(
            f"model.path: {weights}/config.json is not a Transformers configuration"
            f" ({first_line(error)}); name the folder of a Transformers model"
        ) from error

    method = quantisation_of(config)
    if method is not None:
        raise InputError(
            f"model.path: the weights of {weights} are quantised ({method}), and plait train needs "
            "unquantised weights; name the folder of the unquantised model, or train adapters on "
            "this one: plait.hf.Trainer with LoRA on a model that Transformers has loaded"
        )
    return config


def _instantiate(config: PreTrainedConfig, section: ModelSection) -> nn.Module:
    """Create the model on the meta device. Raise its errors as errors of the `model` section."""
    from transformers import AutoModelForCausalLM

    kind = config.model_type
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype_of(section.dtype), trust_remote_code=False
            )
    except ValueError as error:
        raise InputError(
            f"model: {kind!r} is not a causal language model of Transformers"
            f" ({first_line(error)}); choose one that AutoModelForCausalLM supports"
        ) from error
    except Exception as error:
        # A module may raise anything for sizes that it cannot have. A KeyError is usually a value
        # that a table of the class does not have, such as an unknown activation.
        if isinstance(error, KeyError):
            rule = f"Transformers has no such value for a {kind}"
            problems = []
            for name, value in (section.config or {}).items():
                if value == error.args[0]:
                    problems.append(Problem(f"model.config.{name}", value, rule, "correct it"))
            if problems:
                raise ConfigError(*problems) from error
        raise ConfigError(
            Problem(
                "model.config",
                None,
                f"no {kind} can be built from it ({type(error).__name__}:"
                f" {first_line(error)[:200]})",
                "correct its sizes",
            )
        ) from error
    return model


def _declares_bidirectional(config: Any) -> bool:
    """Return True if fields of a configuration show that tokens attend to later ones.

    Attention modules do not show it: those of BigBird-Pegasus and GIT are not causal by themselves,
    but their decoders pass a causal mask.
    """
    # `is_decoder` of GPT-NeoX has no meaning.
    is_gpt_neox = str(config.model_type).startswith("gpt_neox")
    if getattr(config, "is_decoder", None) is False and not is_gpt_neox:
        return True

    bidirectional_values = {
        "use_bidirectional_attention": (True, "all"),
        "is_causal": (False,),
        "causal": (False,),
    }
    return any(
        getattr(config, name, None) in values for name, values in bidirectional_values.items()
    )


def _check_fit(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    *,
    saved: Path | None,
) -> None:
    """Raise ConfigError if the model has too few embedding rows or positions."""
    needed = vocabulary_size(tokenizer)
    rows = getattr(config, "vocab_size", needed)
    if rows < needed:
        rule = f"the tokenizer has {needed:,} tokens and the model's embedding {rows:,} rows"
        remedy = f"use {needed} or more, leave it out, or set data.tokenizer to the model's own"
        if saved is not None:
            # The rows of a saved model are not a setting of the run.
            remedy = (
                f"{resize_remedy(saved, needed)} and set model.path to that folder, or set"
                " data.tokenizer to the model's own"
            )
        raise ConfigError(Problem("model vocab_size", rows, rule, remedy))

    most = getattr(config, "max_position_embeddings", None)
    if most is not None and positions > most:
        raise ConfigError(
            Problem(
                "model max_position_embeddings",
                most,
                f"the model has {most} positions and the run needs {positions}",
                "raise model.config.max_position_embeddings, or lower data.sequence_length",
            )
        )
