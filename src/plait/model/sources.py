"""Sources of the tensor-parallel rules of a model. The first source that has rules is used.

1. The user's `{pattern: style}`.
2. Plait's table of families for which Transformers has no plan, or an incomplete one.
3. Transformers' own plan, read as data. Styles that Plait does not support are errors.
4. A guess from the structure.

The table of families (`FAMILIES`) has been checked against the modeling code of Transformers 5.23.
The attention of a family is split between heads if its code reshapes by head counts that each rank
can set to its own values. If queries, keys and values are concatenated in one weight, or if
position biases are computed for all heads outside the layer, the layer is split and its output
gathered. This is correct for any layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.model.experts import SPLIT_FAMILIES, find_experts
from plait.model.guess import guess_rules
from plait.model.layers import STYLES, Counts, RuleSet, Style, StyleRule, matches
from plait.model.sequence import is_inside
from plait.names import did_you_mean, listed_names

USER_SOURCE = "parallel.plan"
GUESS_SOURCE = "guessed"

_OLD_NAMES: dict[str, Style] = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
}
"""Names of two styles in Transformers before 5.0."""
_NO_STYLE = "replicate"


def rules_for(
    model: nn.Module, *, user: Mapping[str, str] | None = None, blocks: Sequence[str] = ()
) -> RuleSet:
    """Return the tensor-parallel rules of a model, from the first source that has any.

    Args:
        model: The model without adapters.
        user: Style by pattern. If it is given, no other source is used.
        blocks: Names of the repeated blocks, in which a guess looks for layers.

    Raises:
        ModelError: A style is unknown or not supported, or nothing is known about the model and
            nothing can be guessed.
    """
    if user is not None:
        return RuleSet(_user_rules(user), USER_SOURCE, known_counts=True, complete=True)
    rules = table_rules(model) or _transformers_rules(model)
    if rules is not None:
        return rules
    return RuleSet(guess_rules(model, blocks), GUESS_SOURCE, known_counts=True)


def _user_rules(user: Mapping[str, str]) -> tuple[StyleRule, ...]:
    if not user:
        raise ModelError(
            f"{USER_SOURCE} is empty; name at least one module, or leave it out to use the model"
            " family's own plan"
        )
    return tuple(StyleRule(pattern, _user_style(style, pattern)) for pattern, style in user.items())


def _user_style(style: str, pattern: str) -> Style:
    known = _style(style)
    if known is not None:
        return known
    raise ModelError(
        f"{USER_SOURCE}: {pattern!r} has the unknown style {style!r};"
        f" {did_you_mean(style, STYLES)}the styles are {', '.join(STYLES)}"
    )


def _style(name: str) -> Style | None:
    return next((style for style in STYLES if style == name), None)


def _transformers_rules(model: nn.Module) -> RuleSet | None:
    """Return the rules of the plans that Transformers collects for its models, or None.

    Transformers combines the plans of a model's class, its configuration and its parts. Only the
    plans of the outermost Transformers models in `model` are used.
    """
    rules: list[StyleRule] = []
    families: list[str] = []
    for name, module, plan in _models_with_plans(model):
        family = str(getattr(module.config, "model_type", type(module).__name__))
        prefix = f"{name}." if name else ""
        styles = _translate(module, plan, family)
        # Transformers adds a plan of embedding and head to every model, without its layers.
        if any("*" in pattern for pattern in styles):
            rules += [StyleRule(prefix + pattern, style) for pattern, style in styles.items()]
            families.append(family)
    if not rules:
        return None
    return RuleSet(tuple(rules), f"transformers' plan of {', '.join(families)}", optional=True)


def _models_with_plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    outermost: list[str] = []
    for name, module in model.named_modules():
        if not hasattr(module, "config") or "" in outermost or is_inside(name, outermost):
            continue
        # The plan must be an attribute of the module itself. A wrapper (PEFT's) forwards unknown
        # attributes, and the names of a plan begin at the model that owns it.
        if "_tp_plan" not in vars(module) and not hasattr(type(module), "_tp_plan"):
            continue
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping):
            outermost.append(name)
            yield name, module, plan


def _translate(model: nn.Module, plan: Mapping[str, str], family: str) -> dict[str, Style]:
    """Translate Transformers' styles to Plait's.

    Raises:
        ModelError: A module or parameter has a style that is not supported.
    """
    # Experts are split by parallel.ep or replicated, so their styles in the plan do not matter.
    experts: list[str] = []
    if family in SPLIT_FAMILIES:
        experts = [layer.name for layer in find_experts(model)]
    names = []
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        if name not in experts and not is_inside(name, experts):
            names.append(name)

    styles: dict[str, Style] = {}
    unsupported: dict[str, str] = {}
    for pattern, style in plan.items():
        known = _style(_OLD_NAMES.get(style, style))
        if known is not None:
            styles[pattern] = known
        elif style != _NO_STYLE and any(matches(name, pattern) for name in names):
            unsupported[pattern] = style
    if unsupported:
        styled = [f"{pattern} is {style!r}" for pattern, style in unsupported.items()]
        raise ModelError(
            f"Transformers' plan of {family} has styles that Plait does not apply:"
            f" {listed_names(styled, 3)}; use parallel.tp = 1, or set {USER_SOURCE} with styles"
            " for other layers, which leaves these replicated on every rank"
        )
    return styles


@dataclass(frozen=True)
class Variant:
    """Plan of a model family for some of its configurations."""

    rules: Mapping[str, Style]
    """Style by pattern, relative to the base model."""
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes that count heads, by pattern of their module."""
    when: Mapping[str, object] = field(default_factory=dict)
    """Attributes of the configurations that the variant is for."""
    full_sequence_reason: str | None = None
    """Reason why the blocks need full sequences, see `RuleSet`."""


def _split(prefix: str, columns: tuple[str, ...], row: str) -> dict[str, Style]:
    """Return the styles of column- and row-split layers between which activations stay split."""
    return {**{f"{prefix}.{name}": "colwise" for name in columns}, f"{prefix}.{row}": "rowwise"}


def _gathered(prefix: str, columns: tuple[str, ...], row: str) -> dict[str, Style]:
    """Return the styles of column- and row-split layers between which activations are gathered."""
    return {
        **{f"{prefix}.{name}": "colwise_gather_output" for name in columns},
        f"{prefix}.{row}": "rowwise_split_input",
    }


_QKV = ("q_proj", "k_proj", "v_proj")
_GPT2_MLP = _split("h.*.mlp", ("c_fc",), "c_proj")
_4H_MLP = _split("h.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h")
_LLAMA_MLP = _split("layers.*.mlp", ("gate_proj", "up_proj"), "down_proj")

_BERT: dict[str, Style] = {
    **{f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}


def _by_head(
    attention: tuple[str, tuple[str, ...], str],
    mlp: Mapping[str, Style],
    *counts: str,
    **further: Any,
) -> Variant:
    """Return a variant that splits the heads over the ranks.

    `counts` names the attributes of the attention module that hold a number of heads.
    """
    return Variant({**_split(*attention), **mlp}, counts={attention[0]: counts}, **further)


def _all_heads(
    attention: tuple[str, tuple[str, ...], str], mlp: Mapping[str, Style], **further: Any
) -> Variant:
    """Return a variant in which every rank computes all heads."""
    return Variant({**_gathered(*attention), **mlp}, **further)


_GPT2 = ("h.*.attn", ("c_attn",), "c_proj")
_BLOOM = ("h.*.self_attention", ("query_key_value",), "dense")
_LLAMA = ("layers.*.self_attn", _QKV, "o_proj")
_GPTJ_MLP = _split("h.*.mlp", ("fc_in",), "fc_out")

FAMILIES: dict[str, tuple[Variant, ...]] = {
    "GPT2Model": (_all_heads(_GPT2, _GPT2_MLP),),
    "GPTBigCodeModel": (
        # With one key head the rows are [queries | key | value]. Otherwise the query, key and value
        # of each head are adjacent.
        _all_heads(_GPT2, _GPT2_MLP, when={"multi_query": True}),
        _by_head(_GPT2, _GPT2_MLP, "num_heads", "kv_heads"),
    ),
    "GPTNeoModel": (_by_head(("h.*.attn.attention", _QKV, "out_proj"), _GPT2_MLP, "num_heads"),),
    "GPTJModel": (_by_head(("h.*.attn", _QKV, "out_proj"), _GPTJ_MLP, "num_attention_heads"),),
    # Queries, values and keys are fused in 4 groups, one per core of the original training.
    "CodeGenModel": (_all_heads(("h.*.attn", ("qkv_proj",), "out_proj"), _GPTJ_MLP),),
    "OPTModel": (
        _by_head(
            ("decoder.layers.*.self_attn", _QKV, "out_proj"),
            _split("decoder.layers.*", ("fc1",), "fc2"),
            "num_heads",
            full_sequence_reason=(
                "OPT's blocks flatten batch and sequence into one dimension before the MLP"
            ),
        ),
    ),
    "BloomModel": (
        # This option reads the weights of the row-split layers without calling the layers.
        Variant(
            {
                "h.*.self_attention.query_key_value": "colwise_gather_output",
                "h.*.mlp.dense_h_to_4h": "colwise_gather_output",
            },
            when={"slow_but_exact": True},
        ),
        # Position biases (ALiBi) are computed for all heads, outside the blocks.
        _all_heads(_BLOOM, _4H_MLP),
    ),
    "FalconModel": (
        _all_heads(_BLOOM, _4H_MLP, when={"alibi": True}),
        _by_head(
            _BLOOM, _4H_MLP, "num_heads", "num_kv_heads", when={"new_decoder_architecture": True}
        ),
        _all_heads(_BLOOM, _4H_MLP, when={"multi_query": True}),
        _by_head(_BLOOM, _4H_MLP, "num_heads", "num_kv_heads"),
    ),
    "StableLmModel": (
        # A norm with separate weights for every head.
        _all_heads(_LLAMA, _LLAMA_MLP, when={"qk_layernorm": True}),
        _by_head(_LLAMA, _LLAMA_MLP, "num_heads", "num_key_value_heads", "num_key_value_groups"),
    ),
    "PersimmonModel": (
        _by_head(
            ("layers.*.self_attn", ("query_key_value",), "dense"),
            _split("layers.*.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
            "num_heads",
        ),
    ),
    # The rows are [queries | keys | values], and position biases are computed for all heads.
    "MptModel": (
        _all_heads(
            ("blocks.*.attn", ("Wqkv",), "out_proj"),
            _split("blocks.*.ffn", ("up_proj",), "down_proj"),
        ),
    ),
}
"""Variants by class name of the base model. The first whose `when` holds is used."""

_BERT_FAMILIES = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "Camembert",
    "Electra",
    "Ernie",
    "Data2VecText",
    "XLMRobertaXL",
    "RobertaPreLayerNorm",
)
for _kind in _BERT_FAMILIES:
    FAMILIES[f"{_kind}Model"] = (Variant(_BERT),)


def table_rules(model: nn.Module) -> RuleSet | None:
    """Return the rules for all parts of a model that the table lists, or None if it lists none.

    The table lists base models such as `GPT2Model`. A model may contain several of them.
    """
    rules: list[StyleRule] = []
    counts: list[Counts] = []
    families: dict[str, None] = {}
    full_sequence_reason = None
    for name, family, variant in _matching_variants(model):
        prefix = f"{name}." if name else ""
        rules += [StyleRule(prefix + pattern, style) for pattern, style in variant.rules.items()]
        counts += [
            Counts(prefix + pattern, attributes) for pattern, attributes in variant.counts.items()
        ]
        families[family] = None
        full_sequence_reason = full_sequence_reason or variant.full_sequence_reason
    if not rules:
        return None
    return RuleSet(
        tuple(rules),
        f"plait's plan of {', '.join(families)}",
        tuple(counts),
        optional=True,
        full_sequence_reason=full_sequence_reason,
    )


def _matching_variants(model: nn.Module) -> Iterator[tuple[str, str, Variant]]:
    """Yield (name, family, variant) of every module that is a base model in the table."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None:
            continue
        for variant in FAMILIES.get(type(module).__name__, ()):
            if all(getattr(config, key, None) == value for key, value in variant.when.items()):
                yield name, str(getattr(config, "model_type", type(module).__name__)), variant
                break
