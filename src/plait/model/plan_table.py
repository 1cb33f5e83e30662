"""Tensor parallel plans for model families that Transformers has none for, or whose plan does not
hold for some configurations.

Data, checked against the modeling code of Transformers 5.23. A family's attention is split between
heads where its code reshapes by head counts that a rank can have its own values of; where queries,
keys and values are fused one after another, or position biases are made for all heads outside, the
layer is split but its output gathered, which is right for any layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plait.model.rules import Counts, Rule, RuleSet, Style


@dataclass(frozen=True)
class Variant:
    """Patterns relative to the base model, for configurations whose attributes equal `when`."""

    rules: Mapping[str, Style]
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    when: Mapping[str, object] = field(default_factory=dict)
    whole_sequence: str | None = None


def _split(prefix: str, columns: tuple[str, ...], row: str) -> dict[str, Style]:
    """Column- and row-split layers that stay split in between."""
    return {**{f"{prefix}.{name}": "colwise" for name in columns}, f"{prefix}.{row}": "rowwise"}


def _gathered(prefix: str, columns: tuple[str, ...], row: str) -> dict[str, Style]:
    """The same with everything between them computed on every rank."""
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
    """Heads are divided over the ranks, with the attributes `counts` of the attention that count
    them.
    """
    return Variant({**_split(*attention), **mlp}, counts={attention[0]: counts}, **further)


def _all_heads(
    attention: tuple[str, tuple[str, ...], str], mlp: Mapping[str, Style], **further: Any
) -> Variant:
    """Every rank computes all heads."""
    return Variant({**_gathered(*attention), **mlp}, **further)


_GPT2 = ("h.*.attn", ("c_attn",), "c_proj")
_BLOOM = ("h.*.self_attention", ("query_key_value",), "dense")
_LLAMA = ("layers.*.self_attn", _QKV, "o_proj")
_GPTJ_MLP = _split("h.*.mlp", ("fc_in",), "fc_out")

FAMILIES: dict[str, tuple[Variant, ...]] = {
    "GPT2Model": (_all_heads(_GPT2, _GPT2_MLP),),
    "GPTBigCodeModel": (
        # One key head: [queries | key | value]. Otherwise each head's query, key and value lie
        # together.
        _all_heads(_GPT2, _GPT2_MLP, when={"multi_query": True}),
        _by_head(_GPT2, _GPT2_MLP, "num_heads", "kv_heads"),
    ),
    "GPTNeoModel": (_by_head(("h.*.attn.attention", _QKV, "out_proj"), _GPT2_MLP, "num_heads"),),
    "GPTJModel": (_by_head(("h.*.attn", _QKV, "out_proj"), _GPTJ_MLP, "num_attention_heads"),),
    # Queries, values and keys are fused in 4 groups, made for the 4 cores it was trained on.
    "CodeGenModel": (_all_heads(("h.*.attn", ("qkv_proj",), "out_proj"), _GPTJ_MLP),),
    "OPTModel": (
        _by_head(
            ("decoder.layers.*.self_attn", _QKV, "out_proj"),
            _split("decoder.layers.*", ("fc1",), "fc2"),
            "num_heads",
            whole_sequence=(
                "OPT's blocks flatten batch and sequence into one dimension before the MLP"
            ),
        ),
    ),
    "BloomModel": (
        # An option that reads the row-split layers' weights without calling them.
        Variant(
            {
                "h.*.self_attention.query_key_value": "colwise_gather_output",
                "h.*.mlp.dense_h_to_4h": "colwise_gather_output",
            },
            when={"slow_but_exact": True},
        ),
        # Its position biases (alibi) are made for all heads, outside the blocks.
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
        # One norm with weights of its own for every head.
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
    # [queries | keys | values], and position biases made for all heads.
    "MptModel": (
        _all_heads(
            ("blocks.*.attn", ("Wqkv",), "out_proj"),
            _split("blocks.*.ffn", ("up_proj",), "down_proj"),
        ),
    ),
}
for _kind in (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "Camembert",
    "Electra",
    "Ernie",
    "Data2VecText",
    "XLMRobertaXL",
    "RobertaPreLayerNorm",
):
    FAMILIES[f"{_kind}Model"] = (Variant(_BERT),)
"""Class of the base model to its variants; the first whose `when` holds is used."""


def table_rules(model: nn.Module) -> RuleSet | None:
    """Rules for every base model of the table inside `model` (a wrapper may hold several), or
    None.
    """
    rules: list[Rule] = []
    counts: list[Counts] = []
    families: list[str] = []
    whole_sequence = None
    for name, family, variant in _found(model):
        prefix = f"{name}." if name else ""
        rules += [Rule(prefix + pattern, style) for pattern, style in variant.rules.items()]
        counts += [
            Counts(prefix + pattern, attributes) for pattern, attributes in variant.counts.items()
        ]
        families.append(family)
        whole_sequence = whole_sequence or variant.whole_sequence
    if not rules:
        return None
    source = f"plait's plan of {', '.join(dict.fromkeys(families))}"
    return RuleSet(
        tuple(rules), source, tuple(counts), optional=True, whole_sequence=whole_sequence
    )


def _found(model: nn.Module) -> Iterator[tuple[str, str, Variant]]:
    for name, module in model.named_modules():
        variants = FAMILIES.get(type(module).__name__, ())
        config = getattr(module, "config", None)
        for variant in variants:
            if config is not None and all(
                getattr(config, key, None) == value for key, value in variant.when.items()
            ):
                yield name, str(getattr(config, "model_type", type(module).__name__)), variant
                break
