"""Restrictions of tensor, context and pipeline parallelism per model family.

The engine decides from the model itself (`model.plans`); tests build every family named here and
compare. For other families no tensor parallelism is planned, and the plan prints the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.model.experts import SPLIT_FAMILIES
from plait.parallel.context.families import FAMILIES
from plait.planner.architecture import Architecture

WHOLE_ATTENTION = ("gpt2", "gpt_bigcode", "codegen", "bloom", "mpt", "phi3", "olmo2", "glm", "glm4")
"""Families with fused or jointly normalized queries, keys and values.

Their projections are split and the outputs gathered, so that every rank computes all heads.
"""
SPLIT = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "olmo",
    "granite",
    "cohere",
    "cohere2",
    "starcoder2",
    "gptj",
    "stablelm",
    "gpt_neox",
    "smollm3",
    "persimmon",
    "nemotron",
    "exaone4",
    "helium",
    "opt",
    *WHOLE_ATTENTION,
)
"""Families whose layers are known to split."""
_NO_SEQUENCE = {"opt": "OPT's blocks flatten batch and sequence into one dimension before the MLP"}


@dataclass(frozen=True)
class Split:
    """Restrictions for a model. Each is a reason why a technique is not planned, or None."""

    tensor: str | None = None
    sequence: str | None = None
    whole_attention: bool = False
    context: str | None = None
    """Reason against context parallelism."""
    pipeline: str | None = None
    with_experts: bool = False
    """True if tensor parallelism requires that ep splits the experts over its ranks.

    Otherwise each of these ranks would compute all experts.
    """


def split_of(model: Architecture) -> Split:
    """Return the restrictions for a model."""
    return replace(_split_of(model), pipeline=str(model.uncut) or None)


def _split_of(model: Architecture) -> Split:
    kind = str(model.model_type)
    context = None
    if kind not in FAMILIES:
        context = f"{kind} is not among the families whose sequences are cut: {', '.join(FAMILIES)}"
    if model.experts and (kind not in SPLIT_FAMILIES or model.latent_rank):
        rule = f"{kind} has experts, beside which the planner splits no attention of its kind"
        return Split(tensor=rule, sequence="no tensor parallelism", context=context)
    if model.experts:
        return Split(context=context, with_experts=True)
    if kind not in SPLIT:
        rule = (
            f"how {kind} splits is not known to the planner; `plait layout` asks the model itself"
        )
        return Split(tensor=rule, sequence="no tensor parallelism", context=context)

    dropout = bool(model.dropout or model.attention_dropout or model.embedding_dropout)
    sequence = _NO_SEQUENCE.get(kind)
    if sequence is None and dropout and kind in WHOLE_ATTENTION:
        sequence = (
            "dropout is on, and every rank computes all of attention, of which each would drop"
            " other places"
        )

    if context is None and dropout:
        context = "dropout is on, which parts of a sequence do not draw as one process does"
    return Split(sequence=sequence, whole_attention=kind in WHOLE_ATTENTION, context=context)
