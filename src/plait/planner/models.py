"""Conversion of public models, Hugging Face configurations and folders to an Architecture.

Weights are never read. `to_config` converts an Architecture back to the configuration that a plan
writes for `plait train`.

A configuration is read in three steps: `text_part` finds the language model inside a multimodal
configuration and adds the default sizes of Transformers, `dropouts_of` reads its dropout in
training, and `from_config` reads its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.files import user_path
from plait.model.described import check_sizes
from plait.names import did_you_mean
from plait.planner.architecture import Architecture
from plait.planner.built import as_built
from plait.sizes import format_count, is_count

DROPOUTS = {
    "dropout": (
        "resid_pdrop",
        "resid_dropout",
        "residual_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "dropout",
    ),
    "attention_dropout": ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"),
    "embedding_dropout": ("embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout"),
}
"""Names of dropout probabilities in configurations, keyed by field of `Architecture`."""
_DROPOUT_BY_DEFAULT = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
    "opt": ("dropout",),
    "biogpt": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "seed_oss": ("residual_dropout", "attention_dropout"),
}
"""Names of dropout probabilities that are not 0 by default in Transformers, keyed by family."""


def dropouts_of(config: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Return the dropout fields of `Architecture`: 1 if a probability is above 0, else 0.

    A probability that the Hugging Face configuration leaves out has the default of the model
    family.
    """
    rates: dict[str, Any] = dict.fromkeys(_DROPOUT_BY_DEFAULT.get(kind, ()), 0.1)
    rates |= {name: value for name, value in config.items() if value is not None}

    def is_positive(name: str) -> bool:
        rate = rates.get(name)
        return isinstance(rate, int | float) and rate > 0

    return {field: int(any(map(is_positive, names))) for field, names in DROPOUTS.items()}


NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "vocab": ("vocab_size",),
}
"""Names of required sizes in configurations of different families."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Keys of the language model in configurations of multimodal models."""


def text_part(config: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the language model's configuration inside a multimodal one, or None if there is none.

    Transformers writes only values that differ from the family's defaults, so missing sizes are
    set to the defaults.
    """
    inner = next(
        (config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)), None
    )
    if inner is None or any(config.get(name) is not None for name in NAMES["layers"]):
        return None
    inner_kind = inner.get("model_type") or kind
    text = {"model_type": inner_kind}
    for name, value in inner.items():
        # A null `q_lora_rank` means that queries are not compressed. Other nulls mean the default.
        if value is not None or name == "q_lora_rank":
            text[name] = value
    if config.get("vocab_size") is not None:
        text.setdefault("vocab_size", config["vocab_size"])

    for keys in NAMES.values():
        if any(text.get(key) is not None for key in keys):
            continue
        size = size_of_transformers(inner_kind, keys[0])
        if size is not None:
            text[keys[0]] = size

    return text


def size_of_transformers(kind: str, name: str) -> int | None:
    """Return the Transformers default for a size of a model family, or None."""
    config_class = _config_class(kind)
    if config_class is None:
        return None
    try:
        size = getattr(config_class().get_text_config(decoder=True), name, None)
    except Exception:  # a configuration that has no defaults
        return None
    return size if isinstance(size, int) else None


def _config_class(kind: str) -> Any:
    """Return Transformers' configuration class of a model type, or None if there is none."""
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[kind]


def _inner_config(config: Mapping[str, Any], kind: str) -> tuple[str, Any] | None:
    """Return (name, configuration) of the language model inside a multimodal model.

    The configuration is the one that Transformers builds from `config`. The result is None for
    language models, and if Transformers is not installed.
    """
    config_class = _config_class(kind)
    if config_class is None:
        return None
    try:
        outer = config_class.from_dict(dict(config))
    except Exception:  # `plait train` reports the error when it builds the model
        return None

    for name in _TEXT_PARTS:
        inner = getattr(outer, name, None)
        if hasattr(inner, "to_diff_dict"):
            return name, inner
    return None


def check_places(config: Mapping[str, Any], kind: str, source: str) -> None:
    """Raise ConfigError for top-level sizes that contradict the nested configuration.

    Transformers reads sizes from the nested configuration and ignores the top-level ones.
    """
    nested = _inner_config(config, kind)
    if nested is None:
        return
    part, inner = nested
    problems = []
    for name in chain.from_iterable(NAMES.values()):
        value = config.get(name)
        read = getattr(inner, name, None)
        if value is None or read in (None, value):
            continue
        rule = f"Transformers takes it from {part}, where it is {read}"
        problems.append(Problem(f"{source}: {name}", value, rule, f"write it there: {part}.{name}"))
    raise_problems(problems)


@cache
def _table() -> dict[str, Any]:
    file = files("plait.planner") / "data" / "architectures.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def names() -> tuple[str, ...]:
    """Return the names of all public models in the table."""
    return tuple(_table()["models"])


def named(name: str) -> Architecture | None:
    """Return the public model with this name in the table, or None.

    Case, `-`, `_` and the organization before `/` are ignored.
    """
    query = _normalize(name)
    match = next((key for key in _table()["models"] if _normalize(key) == query), None)
    if match is None:
        return None
    entry = _table()["models"][match]
    family = _table()["families"][entry["family"]]
    layers, hidden, heads, kv_heads, ffn, vocab = entry["shape"]
    experts = entry.get("experts", {})

    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=entry.get("head_dim", hidden // heads),
        ffn=ffn,
        vocab=vocab,
        gated=int(family["gated"]),
        tied=int(entry.get("tied", family["tied"])),
        positions=entry.get("positions", 0),
        **{name: int(family.get(name, False)) for name in ("bias", "qkv_bias", "qk_norm")},
        experts=experts.get("count", 0),
        active=experts.get("active", 0),
        expert_ffn=experts.get("ffn", 0),
        shared_ffn=experts.get("shared", 0),
        dense_layers=experts.get("dense_layers", 0),
        **dict.fromkeys(DROPOUTS, int(family.get("dropout", False))),
        **_latent_fields(entry.get("mla")),
        name=match,
        model_type=family["model_type"],
    )


def _normalize(name: str) -> str:
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-").replace(" ", "-")
    for old, new in (
        ("meta-llama-", "llama-"),
        ("llama-3.1-", "llama-3-"),
        ("llama2-", "llama-2-"),
        ("llama3-", "llama-3-"),
        ("llama3.1-", "llama-3-"),
    ):
        if plain.startswith(old):
            plain = plain.replace(old, new)

    return plain.replace("llama-3.1-", "llama-3-").replace("-", "")


def _latent_fields(mla: Mapping[str, int] | None) -> dict[str, int]:
    """Return the fields of an Architecture for latent attention."""
    if not mla:
        return {}
    return {
        "query_rank": mla.get("q_rank") or 0,
        "latent_rank": mla["kv_rank"],
        "rope_dim": mla["rope"],
        "value_dim": mla["value"],
    }


_OPTIONAL: dict[str, tuple[str, ...]] = {
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "moe_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
    "shared": ("n_shared_experts", "moe_num_shared_experts"),
}
_TWO_MATRICES = {
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "phi",
    "mpt",
    "starcoder2",
    "codegen",
    "biogpt",
    "persimmon",
    "nemotron",
    "arcee",
    "apertus",
    "jais2",
    "nanochat",
}
_GATED = {
    *(
        "llama",
        "mistral",
        "ministral3",
        "phi3",
        "internlm3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "granite",
        "helium",
        "ernie4_5",
        "bitnet",
    ),
    *(
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "olmo",
        "olmo2",
        "olmo3",
        "cohere",
        "cohere2",
        "exaone4",
        "cwm",
    ),
    *(
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "gpt_oss",
        "granitemoe",
        "phimoe",
        "ernie4_5_moe",
        "glm4_moe",
        "dots1",
        "minimax_m2",
    ),
    *("deepseek_v2", "deepseek_v3"),
}
_TIED = {
    "gpt2",
    "gpt_neo",
    "opt",
    "bloom",
    "falcon",
    "gpt_bigcode",
    "mpt",
    "gemma",
    "gemma2",
    "gemma3_text",
}
_LEARNED_POSITIONS = {
    "gpt2": "n_positions",
    "gpt_bigcode": "n_positions",
    "gpt_neo": "max_position_embeddings",
    "opt": "max_position_embeddings",
    "biogpt": "max_position_embeddings",
}
_LAYER_NORM = _TWO_MATRICES - {"falcon", "nemotron", "arcee", "apertus", "nanochat"}
_NOT_DECODERS = {
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "t5",
    "bart",
    "bert",
    "roberta",
    "vit",
    "whisper",
    "clip",
}


_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")

_MAX_PARAMETERS = 10**15
_LATENT_SIZES = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_OTHER_SIZES = (
    "kv_lora_rank",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    *_LATENT_SIZES,
    *_LEARNED_POSITIONS.values(),
)


def _check_optional(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for invalid optional sizes and incomplete latent attention."""
    names = [*chain.from_iterable(_OPTIONAL.values()), *_OTHER_SIZES]
    needed = _LATENT_SIZES if config.get("kv_lora_rank") else ()
    problems = []
    for name in dict.fromkeys(names):
        if (config.get(name) is not None or name in needed) and (
            type(config.get(name)) is not int or config[name] < 0
        ):
            problems.append(
                Problem(
                    f"{source}: {name}",
                    config.get(name),
                    "not a whole number of at least 0",
                    "set one" if name in needed else "set one, or leave it out",
                )
            )
    tied = config.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        problems.append(
            Problem(
                f"{source}: tie_word_embeddings",
                tied,
                "must be true or false",
                "write true or false, or leave it out",
            )
        )

    raise_problems(problems)


def _check_counts(model: Architecture, source: str) -> None:
    """Raise ConfigError for more active experts than experts, and for absurdly large models."""
    if model.active > model.experts:
        raise ConfigError(
            Problem(
                f"{source}: num_experts_per_tok",
                model.active,
                f"each token is routed to {model.active} experts, but a layer has {model.experts}",
                f"use at most {model.experts}",
            )
        )

    widths = (
        4 * model.heads * model.head_dim
        + 3 * (model.ffn + model.experts * model.expert_ffn)
        + model.shared_ffn
    )
    count = model.hidden * (model.layers * widths + 2 * model.vocab)
    if count > _MAX_PARAMETERS:
        rule = (
            f"these sizes give {count:.1e} parameters, and the largest supported number is"
            f" {_MAX_PARAMETERS:.0e}"
        )
        raise ConfigError(Problem(source, None, rule, "use smaller sizes"))


def unknown_layers(model: Architecture) -> str | None:
    """Return a note on a model whose layers the planner does not know, or None."""
    kind = str(model.model_type)
    if kind in _GATED | _TWO_MATRICES:
        return None
    if model.layer_parameters:
        return (
            f"{kind}: the planner does not know its layers; it takes their parameters from the"
            f" model that Transformers builds ({model.layers} blocks of"
            f" {format_count(float(model.layer_parameters))} and"
            f" {format_count(float(model.end_parameters))} outside them), and their time from"
            " Llama's layers; measure a step before you trust times"
        )

    return (
        f"{kind}: the planner does not know its layers, and counts layers of Llama of the same"
        " sizes; compare the parameters with the model's before you trust times and bytes"
    )


def _with_defaults(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a configuration with the sizes that Transformers adds when training builds the model.

    For example, a `qwen3` without head_dim has heads of 128 elements, and a `deepseek_v3` whose
    q_lora_rank is null does not compress its queries.
    """
    written = {name: value for name, value in config.items() if value is not None}
    config_class = _config_class(kind)
    if config_class is None:
        return written
    # The vocabulary determines none of these sizes, and Transformers would print a warning about
    # special tokens outside it.
    explicit = {name: value for name, value in config.items() if name != "vocab_size"}

    try:
        complete = config_class.from_dict(explicit).to_dict()
    except Exception:  # `plait train` reports the error when it builds the model
        return written
    read = {
        *chain.from_iterable(_OPTIONAL.values()),
        *_OTHER_SIZES,
        "tie_word_embeddings",
        "multi_query",
    }
    defaults = {}
    for names, kind_of_value in (
        (read, int),
        (chain.from_iterable(DROPOUTS.values()), float),
        (_ACTIVATIONS, str),
    ):
        for name in names:
            if isinstance(complete.get(name), kind_of_value):
                defaults[name] = complete[name]
    # Values of the configuration itself have precedence.
    return defaults | written


def from_config(
    config: Mapping[str, Any], *, source: str = "the configuration", vocab: int | None = None
) -> Architecture:
    """Return the architecture that a Hugging Face configuration describes.

    Args:
        config: The configuration.
        source: Name of the configuration for error messages.
        vocab: Vocabulary size if the configuration has none.

    Raises:
        ConfigError: A size is missing or invalid.
        InputError: The model is not a decoder-only language model.
    """
    return as_built(_describe(config, source=source, vocab=vocab), config)


def _describe(config: Mapping[str, Any], *, source: str, vocab: int | None) -> Architecture:
    """Return the architecture that a configuration describes, without building the model."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            Problem(
                f"{source}: model_type",
                model_type,
                "must be the name of an architecture",
                "set it, for example to llama",
            )
        )

    inner = text_part(config, model_type)
    if inner is not None:
        return _describe(inner, source=source, vocab=vocab)
    check_places(config, model_type, source)
    if model_type in _NOT_DECODERS:
        raise InputError(
            f"{source}: {model_type!r} is not a decoder-only transformer, and only those can be"
            " planned; use another model"
        )
    sizes = _required_sizes(config, model_type, source=source, vocab=vocab)
    check_sizes(config, f"{source}: ")
    _check_optional(config, source)
    config = _with_defaults(config, model_type)
    optional: dict[str, Any] = {}
    for field, keys in _OPTIONAL.items():
        optional[field] = next((config[key] for key in keys if config.get(key) is not None), None)
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    if optional["head_dim"] is None and hidden % heads:
        raise ConfigError(
            Problem(
                f"{source}: hidden_size",
                hidden,
                f"num_attention_heads is {heads} and {hidden} % {heads} = {hidden % heads}",
                f"set head_dim, or make hidden_size a multiple of {heads}",
            )
        )

    mla = _latent_attention(config)
    kv_heads = optional["kv_heads"] or heads
    # GPT-BigCode and Falcon have one head of keys and values by default.
    if model_type == "gpt_bigcode" and config.get("multi_query", True):
        kv_heads = 1
    if model_type == "falcon":
        has_several = config.get("new_decoder_architecture") or not config.get("multi_query", True)
        kv_heads = config.get("num_kv_heads", 1) if has_several else 1
    experts = optional["experts"] or 0
    if experts and optional["active"] == 0:
        name = next(name for name in _OPTIONAL["active"] if config.get(name) == 0)
        raise ConfigError(
            Problem(
                f"{source}: {name}",
                0,
                f"a layer has {experts} experts, but a token is routed to none of them",
                "use at least 1",
            )
        )

    ffn = optional["ffn"] or 4 * hidden
    head_dim = optional["head_dim"] or hidden // heads
    if mla:
        # A head of latent attention has one part with rotary positions and one without.
        head_dim = mla["nope"] + mla["rope"]
    positions = 0
    if model_type in _LEARNED_POSITIONS:
        positions = int(config.get(_LEARNED_POSITIONS[model_type], 1024))
    model = Architecture(
        **sizes,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        gated=int(model_type not in _TWO_MATRICES),
        tied=int(config.get("tie_word_embeddings", model_type in _TIED)),
        positions=positions,
        bias=int(model_type in _LAYER_NORM),
        qkv_bias=int(model_type in ("qwen2", "qwen2_moe")),
        qk_norm=int(model_type in ("qwen3", "qwen3_moe")),
        experts=experts,
        active=(optional["active"] or 2) if experts else 0,
        expert_ffn=(optional["expert_ffn"] or ffn) if experts else 0,
        shared_ffn=int(config.get("shared_expert_intermediate_size") or 0)
        or (optional["shared"] or 0) * (optional["expert_ffn"] or ffn) * bool(experts),
        dense_layers=min(optional["dense_layers"] or 0, sizes["layers"]) if experts else 0,
        **dropouts_of(config, model_type),
        activation=next(
            (config[name] for name in _ACTIVATIONS if isinstance(config.get(name), str)), ""
        ),
        **_latent_fields(mla),
        name=str(config.get("_name_or_path") or model_type),
        model_type=model_type,
    )
    _check_counts(model, source)
    return model


def _required_sizes(
    config: Mapping[str, Any], model_type: str, *, source: str, vocab: int | None
) -> dict[str, int]:
    """Return the required sizes of a configuration, keyed by the field of `Architecture`."""
    sizes: dict[str, int] = {}
    problems = []
    defaults: Mapping[str, int] = {}
    if model_type == "gpt2":
        defaults = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257}

    for field, keys in NAMES.items():
        value = next(
            (config[key] for key in keys if config.get(key) is not None), defaults.get(field)
        )
        if value is None and field == "vocab":
            value = vocab or None
        if value is None:
            # Training builds the model with the default of Transformers.
            defaults_of_family = (size_of_transformers(model_type, key) for key in keys)
            value = next(filter(None, defaults_of_family), None)
        if is_count(value):
            sizes[field] = value
            continue
        rule = "not a whole number of at least 1"
        if value is None:
            rule = f"is missing, and Transformers has no default for {model_type}"
        problems.append(Problem(f"{source}: {keys[0]}", value, rule, f"set {' or '.join(keys)}"))

    raise_problems(problems)
    return sizes


def _latent_attention(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ranks and widths of multi-head latent attention, or None for other attention."""
    if not config.get("kv_lora_rank"):
        return None
    return {
        "kv_rank": config["kv_lora_rank"],
        "rope": config["qk_rope_head_dim"],
        "nope": config["qk_nope_head_dim"],
        "value": config["v_head_dim"],
        "q_rank": config.get("q_lora_rank"),
    }


@dataclass(frozen=True)
class Model:
    """Architecture, and the `model` section of a training configuration that describes it."""

    architecture: Architecture
    section: Mapping[str, Any]
    """`model` section of a training configuration."""


_NOT_FOR_TRAINING = (
    "architectures",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "auto_map",
    "quantization_config",
    "use_cache",
)


def find_model(source: str, *, sequence: int | None = None) -> Model:
    """Return the model for a name in the table, a config.json, or a folder that contains one.

    Args:
        source: Name or path.
        sequence: Tokens per sample. A public model gets this number of positions.

    Raises:
        InputError: There is no such file, folder or model.
    """
    path = user_path(source, "--model")
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        config = _read_config(file)
        section = config.get("model")
        if isinstance(section, Mapping) and isinstance(section.get("config"), Mapping):
            # The file is a configuration of `plait train`.
            config = dict(section["config"])
        architecture = from_config(config, source=str(file))
        # A run starts from the weights of the folder if there are any.
        if path.is_dir() and any(path.glob("*.safetensors")):
            return Model(architecture, {"path": str(path)})
        fields = {}
        for name, value in config.items():
            if name not in _NOT_FOR_TRAINING and value is not None:
                fields[name] = value
        return Model(architecture, {"config": fields})

    public = named(source)
    if public is None:
        hint = did_you_mean(source, names(), count=3, cutoff=0.4)
        raise InputError(
            f"model {source!r}: neither a file, a folder nor a known public model; {hint}`plait"
            " plan models` lists the known ones"
        )

    return Model(public, {"config": to_config(public, positions=sequence or 2048)})


def _read_config(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"model {file}: {error.strerror}; name a config.json, a folder that holds one, or a"
            " public model"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"model {file}: not JSON ({error}); name a Hugging Face config.json"
        ) from None

    if not isinstance(content, dict):
        raise InputError(
            f"model {file}: contains a value of type {type(content).__name__}, not a JSON"
            " object; name a Hugging Face config.json"
        )

    return content


def to_config(architecture: Architecture, *, positions: int) -> dict[str, Any]:
    """Return the Hugging Face configuration of a model in the table.

    Args:
        architecture: The model.
        positions: Largest sequence length.
    """
    model = architecture
    names = NAMES | _OPTIONAL
    if model.model_type == "gpt2":
        shape = {
            names[field][1]: getattr(model, field) for field in ("layers", "hidden", "heads", "ffn")
        }
        return {
            "model_type": "gpt2",
            **shape,
            "vocab_size": model.vocab,
            "n_positions": max(model.positions, positions),
        }

    config = {
        "model_type": model.model_type,
        **{
            names[field][0]: getattr(model, field)
            for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        },
        "max_position_embeddings": positions,
        "tie_word_embeddings": bool(model.tied),
    }
    if model.head_dim != model.hidden // model.heads and not model.latent_rank:
        config["head_dim"] = model.head_dim
    if model.model_type == "mixtral":
        config |= {"num_local_experts": model.experts, "num_experts_per_tok": model.active}
    if model.model_type == "qwen3_moe":
        config |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.active,
            "moe_intermediate_size": model.expert_ffn,
        }

    if model.model_type == "deepseek_v3":
        config |= {
            "n_routed_experts": model.experts,
            "num_experts_per_tok": model.active,
            "moe_intermediate_size": model.expert_ffn,
            "n_shared_experts": model.shared_ffn // model.expert_ffn,
            "first_k_dense_replace": model.dense_layers,
            "q_lora_rank": model.query_rank,
            "kv_lora_rank": model.latent_rank,
            "qk_nope_head_dim": model.head_dim - model.rope_dim,
            "qk_rope_head_dim": model.rope_dim,
            "v_head_dim": model.value_dim,
        }

    return config
