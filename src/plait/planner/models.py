"""Where an Architecture comes from: the table of public models, a Hugging Face configuration, a
folder that holds one. Weights are never read.

The inverse, `to_config`, makes the configuration that a plan writes for `plait train`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from plait.errors import ConfigError, InputError, Problem, refuse
from plait.files import user_path
from plait.model.described import check_sizes
from plait.planner.architecture import Architecture
from plait.planner.built import as_built
from plait.planner.dropouts import DROPOUTS, dropouts_of
from plait.planner.text_part import NAMES, check_places, size_of_transformers, text_part
from plait.units import format_count


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (files("plait.planner") / "data" / "architectures.yaml").read_text(encoding="utf-8")
    )
    return content


def names() -> tuple[str, ...]:
    """Names of the public models that are known."""
    return tuple(_table()["models"])


def named(name: str) -> Architecture | None:
    """The public model of that name; letters' case, `-`, `_` and the organisation before `/` do not
    matter. None for an unknown one.
    """
    wanted = _plain(name)
    found = next((key for key in _table()["models"] if _plain(key) == wanted), None)
    if found is None:
        return None
    entry = _table()["models"][found]
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
        **_latent(entry.get("mla")),
        name=found,
        model_type=family["model_type"],
    )


def _plain(name: str) -> str:
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-").replace(" ", "-")
    for old, new in (
        ("meta-llama-", "llama-"),
        ("llama-3.1-", "llama-3-"),
        ("llama2-", "llama-2-"),
        ("llama3-", "llama-3-"),
        ("llama3.1-", "llama-3-"),
    ):
        plain = plain.replace(old, new) if plain.startswith(old) else plain
    return plain.replace("llama-3.1-", "llama-3-").replace("-", "")


def _latent(mla: Mapping[str, int] | None) -> dict[str, int]:
    """The fields of an Architecture with latent attention."""
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
_STRUCTURE = {
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

_MOST_PARAMETERS = 10**15
_LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_OTHERS = (
    "kv_lora_rank",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    *_LATENT,
    *_LEARNED_POSITIONS.values(),
)


def _check_optional(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for sizes that may be left out and are no whole numbers, and for latent
    attention without its sizes.
    """
    names = [name for keys in _OPTIONAL.values() for name in keys] + list(_OTHERS)
    needed = _LATENT if config.get("kv_lora_rank") else ()
    problems = [
        Problem(
            f"{source}: {name}",
            config.get(name),
            "not a whole number",
            "set one" if name in needed else "set one, or leave it out",
        )
        for name in dict.fromkeys(names)
        if (config.get(name) is not None or name in needed)
        and (type(config.get(name)) is not int or config[name] < 0)
    ]
    tied = config.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        problems.append(
            Problem(
                f"{source}: tie_word_embeddings",
                tied,
                "not true or false",
                "write one, or leave it out",
            )
        )
    refuse(problems)


def _check_counts(model: Architecture, source: str) -> None:
    """Raise ConfigError for a token that goes to more experts than there are, and for a model that
    is too large to count.
    """
    if model.active > model.experts:
        rule = f"a token goes to {model.active} experts, and a layer has {model.experts}"
        raise ConfigError(
            Problem(f"{source}: num_experts_per_tok", model.active, rule, "give at most that many")
        )
    widths = (
        4 * model.heads * model.head_dim
        + 3 * (model.ffn + model.experts * model.expert_ffn)
        + model.shared_ffn
    )
    count = model.hidden * (model.layers * widths + 2 * model.vocab)
    if count > _MOST_PARAMETERS:
        rule = (
            f"these sizes are {count:.1e} parameters, and no plan counts more than"
            f" {_MOST_PARAMETERS:.0e}"
        )
        raise ConfigError(Problem(source, None, rule, "correct them"))


def unknown_layers(model: Architecture) -> str | None:
    """What to tell of a model of whose layers the planner does not know that they are what it
    counts; None for the others.
    """
    kind = str(model.model_type)
    if kind in _GATED | _TWO_MATRICES:
        return None
    if model.layer_parameters:
        return (
            f"{kind}: what its layers are is not known to the planner, which counts their"
            f" parameters of the model that Transformers builds ({model.layers} blocks of"
            f" {format_count(float(model.layer_parameters))} and"
            f" {format_count(float(model.end_parameters))} outside of them), and their time as that"
            " of Llama's layers; measure a step before you trust times"
        )
    return (
        f"{kind}: what its layers are is not known to the planner, which counts Llama's from its"
        " sizes; compare the parameters with the model's before you trust times and bytes"
    )


def _with_defaults(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`config` with the sizes that it leaves to Transformers, as training builds them: a `qwen3`
    without head_dim has heads of 128, and a `deepseek_v3` whose q_lora_rank is null does not
    compress its queries.
    """
    written = {name: value for name, value in config.items() if value is not None}
    if find_spec("transformers") is None:
        return written
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return written
    # Without the vocabulary, which decides none of them and which it compares with its own special
    # tokens, aloud.
    asked = {name: value for name, value in config.items() if name != "vocab_size"}
    try:
        whole = CONFIG_MAPPING[kind].from_dict(asked).to_dict()
    except Exception:  # what Transformers refuses it tells where the model is built
        return written
    read = {
        *(name for keys in _OPTIONAL.values() for name in keys),
        *_OTHERS,
        "tie_word_embeddings",
        "multi_query",
    }
    sizes = {name: whole[name] for name in read if isinstance(whole.get(name), int)}
    shares = {
        name: whole[name]
        for names in DROPOUTS.values()
        for name in names
        if isinstance(whole.get(name), float)
    }
    return (
        sizes
        | shares
        | {name: whole[name] for name in _ACTIVATIONS if isinstance(whole.get(name), str)}
        | written
    )


def from_config(
    config: Mapping[str, Any], *, source: str = "the configuration", vocab: int | None = None
) -> Architecture:
    """The shape that a Hugging Face configuration describes; `vocab` is taken where it has none.
    Raises ConfigError for what is missing or does not fit, InputError for an architecture that is
    no decoder-only language model.
    """
    return as_built(_described(config, source=source, vocab=vocab), config)


def _described(config: Mapping[str, Any], *, source: str, vocab: int | None) -> Architecture:
    """By what the configuration says alone."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(
            Problem(
                f"{source}: model_type",
                kind,
                "names no architecture",
                "set it, for example to llama",
            )
        )
    inner = text_part(config, kind)
    if inner is not None:
        return _described(inner, source=source, vocab=vocab)
    check_places(config, kind, source)
    if kind in _STRUCTURE:
        raise InputError(
            f"{source}: {kind!r} is no decoder-only transformer, which is what can be planned"
        )
    found: dict[str, int] = {}
    problems = []
    defaults: Mapping[str, int] = (
        {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257} if kind == "gpt2" else {}
    )
    for field, keys in NAMES.items():
        value = next(
            (config[key] for key in keys if config.get(key) is not None), defaults.get(field)
        )
        if value is None:  # as training builds it
            own = vocab if field == "vocab" else None
            value = own or next(
                (size for key in keys if (size := size_of_transformers(kind, key))), None
            )
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            found[field] = value
            continue
        rule = "not a whole number of at least 1"
        if value is None:
            rule = f"is neither here, nor in a text_config, nor has Transformers a {kind} with one"
        problems.append(Problem(f"{source}: {keys[0]}", value, rule, f"set {' or '.join(keys)}"))
    refuse(problems)
    check_sizes(config, f"{source}: ")
    _check_optional(config, source)
    config = _with_defaults(config, kind)
    optional = {
        field: next((config[key] for key in keys if config.get(key) is not None), None)
        for field, keys in _OPTIONAL.items()
    }
    hidden = found["hidden"]
    heads = found["heads"]
    if optional["head_dim"] is None and hidden % heads:
        rule = f"num_attention_heads is {heads} and {hidden} % {heads} = {hidden % heads}"
        raise ConfigError(
            Problem(f"{source}: hidden_size", hidden, rule, "give head_dim, or sizes that divide")
        )
    gated = int(kind not in _TWO_MATRICES)
    bias = int(kind in _LAYER_NORM)
    mla = None
    if config.get("kv_lora_rank"):
        mla = {
            "kv_rank": config["kv_lora_rank"],
            "rope": config["qk_rope_head_dim"],
            "nope": config["qk_nope_head_dim"],
            "value": config["v_head_dim"],
            "q_rank": config.get("q_lora_rank"),
        }
    kv_heads = optional["kv_heads"] or heads
    activation = next(
        (config[name] for name in _ACTIVATIONS if isinstance(config.get(name), str)), ""
    )
    if kind == "gpt_bigcode" and config.get("multi_query", True):
        kv_heads = 1
    if kind == "falcon":
        kv_heads = (
            config.get("num_kv_heads", 1)
            if config.get("new_decoder_architecture") or not config.get("multi_query", True)
            else 1
        )
    experts = optional["experts"] or 0
    if experts and optional["active"] == 0:
        name = next(name for name in _OPTIONAL["active"] if config.get(name) == 0)
        raise ConfigError(
            Problem(
                f"{source}: {name}",
                0,
                f"a layer has {experts} experts, and a token goes to none",
                "give at least 1",
            )
        )
    ffn = optional["ffn"] or 4 * hidden
    model = Architecture(
        **found,
        kv_heads=kv_heads,
        head_dim=(mla["nope"] + mla["rope"]) if mla else optional["head_dim"] or hidden // heads,
        ffn=ffn,
        gated=gated,
        tied=int(config.get("tie_word_embeddings", kind in _TIED)),
        positions=(
            int(config.get(_LEARNED_POSITIONS[kind], 1024)) if kind in _LEARNED_POSITIONS else 0
        ),
        bias=bias,
        qkv_bias=int(kind in ("qwen2", "qwen2_moe")),
        qk_norm=int(kind in ("qwen3", "qwen3_moe")),
        experts=experts,
        active=(optional["active"] or 2) if experts else 0,
        expert_ffn=(optional["expert_ffn"] or ffn) if experts else 0,
        shared_ffn=int(config.get("shared_expert_intermediate_size") or 0)
        or (optional["shared"] or 0) * (optional["expert_ffn"] or ffn) * bool(experts),
        dense_layers=min(optional["dense_layers"] or 0, found["layers"]) if experts else 0,
        **dropouts_of(config, kind),
        activation=activation,
        **_latent(mla),
        name=str(config.get("_name_or_path") or kind),
        model_type=kind,
    )
    _check_counts(model, source)
    return model


@dataclass(frozen=True)
class Model:
    """An architecture, and how a training configuration names it."""

    architecture: Architecture
    section: Mapping[str, Any]
    """The `model` section of a training configuration."""


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
    """A name in the table, a config.json, or a folder that holds one. Raises InputError for what is
    neither.
    """
    path = user_path(source, "--model")
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        config = _read(file)
        if (
            "model" in config
            and isinstance(config["model"], Mapping)
            and isinstance(config["model"].get("config"), Mapping)
        ):
            config = dict(config["model"]["config"])  # a training configuration
        architecture = from_config(config, source=str(file))
        if path.is_dir() and any(path.glob("*.safetensors")):
            return Model(architecture, {"path": str(path)})
        return Model(
            architecture,
            {
                "config": {
                    k: v for k, v in config.items() if k not in _NOT_FOR_TRAINING and v is not None
                }
            },
        )
    found = named(source)
    if found is None:
        near = difflib.get_close_matches(source.lower(), names(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise InputError(
            f"model {source!r}: no file, no folder and no public model that is known; {hint}`plait"
            " plan models` prints them"
        )
    return Model(found, {"config": to_config(found, positions=sequence or 2048)})


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"model {file}: {error.strerror}; name a config.json, a folder that holds one, or a"
            " public model"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"model {file}: no JSON ({error}); name a Hugging Face config.json"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            f"model {file}: holds {type(content).__name__}, not the keys of a Hugging Face"
            " configuration"
        )
    return content


def to_config(architecture: Architecture, *, positions: int) -> dict[str, Any]:
    """The Hugging Face configuration of a model in the table, for sequences of `positions`
    tokens.
    """
    a = architecture
    names = NAMES | _OPTIONAL
    if a.model_type == "gpt2":
        shape = {
            names[field][1]: getattr(a, field) for field in ("layers", "hidden", "heads", "ffn")
        }
        return {
            "model_type": "gpt2",
            **shape,
            "vocab_size": a.vocab,
            "n_positions": max(a.positions, positions),
        }
    config = {
        "model_type": a.model_type,
        **{
            names[field][0]: getattr(a, field)
            for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        },
        "max_position_embeddings": positions,
        "tie_word_embeddings": bool(a.tied),
    }
    if a.head_dim != a.hidden // a.heads and not a.latent_rank:
        config["head_dim"] = a.head_dim
    if a.model_type == "mixtral":
        config |= {"num_local_experts": a.experts, "num_experts_per_tok": a.active}
    if a.model_type == "qwen3_moe":
        config |= {
            "num_experts": a.experts,
            "num_experts_per_tok": a.active,
            "moe_intermediate_size": a.expert_ffn,
        }
    if a.model_type == "deepseek_v3":
        config |= {
            "n_routed_experts": a.experts,
            "num_experts_per_tok": a.active,
            "moe_intermediate_size": a.expert_ffn,
            "n_shared_experts": a.shared_ffn // a.expert_ffn,
            "first_k_dense_replace": a.dense_layers,
            "q_lora_rank": a.query_rank,
            "kv_lora_rank": a.latent_rank,
            "qk_nope_head_dim": a.head_dim - a.rope_dim,
            "qk_rope_head_dim": a.rope_dim,
            "v_head_dim": a.value_dim,
        }
    return config
