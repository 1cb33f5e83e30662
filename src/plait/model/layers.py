"""What kinds of modules a style can be applied to, and which dimension of their parameters it
splits.

Plait computes a split layer itself, on this rank's part of the weight. So a layer must be known to
compute what `nn.Linear`, Transformers' `Conv1D` or `nn.Embedding` computes: a subclass with a
forward of its own, or a wrapped module, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize

from plait._torch.modules import own_parameters
from plait.errors import ModelError
from plait.model.rules import COLUMN_STYLES, ROW_STYLES, Style

_SAME_AS_LINEAR = frozenset({"FalconLinear"})
"""Subclasses of nn.Linear whose own forward computes x W^T + b all the same."""
_NOT_A_TOKEN_NORM = ("batch", "group", "instance")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Transformers' `Conv1D`: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    """Whether this computes x W^T + b (`nn.Linear`) or x W + b (`Conv1D`), and nothing else."""
    if "forward" in vars(module) or parametrize.is_parametrized(module):
        return False
    if is_conv1d(module):
        return True
    plain = type(module).forward is nn.Linear.forward or type(module).__name__ in _SAME_AS_LINEAR
    return (
        isinstance(module, nn.Linear)
        and plain
        and set(own_parameters(module)) == {"weight", "bias"}
        and module.weight.ndim == 2
    )


def is_embedding(module: nn.Module) -> bool:
    """Whether this is a lookup of rows, perhaps times a constant, and nothing else: it can then be
    computed from a part of the rows.
    """
    return (
        isinstance(module, nn.Embedding)
        and "forward" not in vars(module)
        and not parametrize.is_parametrized(module)
        and (type(module).forward is nn.Embedding.forward or embedding_scale(module) is not None)
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def embedding_scale(module: nn.Module) -> float | torch.Tensor | None:
    """The constant that Transformers' scaled embeddings (Gemma, BART, ...) multiply what they look
    up with; None for others.
    """
    if not type(module).__name__.endswith("ScaledWordEmbedding") or not type(
        module
    ).__module__.startswith("transformers."):
        return None
    scale = getattr(module, "embed_scale", None)
    return scale if isinstance(scale, int | float | torch.Tensor) else None


def is_norm(module: nn.Module) -> bool:
    """Whether this normalises every token by itself, by its class's name."""
    kind = type(module).__name__.lower()
    return "norm" in kind and not any(word in kind for word in _NOT_A_TOKEN_NORM)


def in_features(module: nn.Module) -> int:
    """Inputs of a linear layer."""
    return int(module.get_parameter("weight").shape[0 if is_conv1d(module) else 1])


def out_features(module: nn.Module) -> int:
    """Outputs of a linear layer."""
    return int(module.get_parameter("weight").shape[1 if is_conv1d(module) else 0])


def split_dims(module: nn.Module, style: Style) -> Mapping[str, int | None]:
    """Own parameter to the dimension that `style` splits; None keeps it replicated on every
    rank.
    """
    transposed = is_conv1d(module)
    if style in COLUMN_STYLES:
        return {"weight": 1 if transposed else 0, "bias": 0}
    if style in ROW_STYLES:
        return {"weight": 0 if transposed else 1, "bias": None}
    if style == "embedding_rowwise":
        return {"weight": 0}
    return {name: None for name, _ in module.named_parameters(recurse=False)}


def check_style(model: nn.Module, name: str, style: Style, source: str) -> None:
    """Raise ModelError unless `style` can be applied to the module `name`."""
    module = model.get_submodule(name)
    kind = type(module).__name__
    if style == "replicated_with_grad_allreduce":
        if next(module.parameters(), None) is None:
            raise ModelError(
                f"{source}: {name} ({kind}) has no parameters, so {style!r} does nothing to it;"
                " leave it out"
            )
        return
    if style == "embedding_rowwise":
        if not is_embedding(module):
            raise ModelError(
                f"{source}: {name} ({kind}) cannot be {style!r}: it must be an nn.Embedding with"
                " that class's forward and no max_norm, scale_grad_by_freq or sparse; leave it"
                " out, which keeps it replicated on every rank"
            )
        return
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise ModelError(
            f"{source}: {name} belongs to an nn.MultiheadAttention, which uses the weight without a"
            " call; leave it out"
        )
    if not is_linear(module):
        why = ""
        if _computes_its_weight(module):
            why = (
                ", and its weight is computed from other parameters (a parametrization,"
                " weight_norm, spectral_norm or pruning)"
            )
        raise ModelError(
            f"{source}: {name} ({kind}) cannot be {style!r}: it must be an nn.Linear or"
            f" Transformers' Conv1D with that class's forward{why}; leave it out, which keeps it"
            " replicated on every rank"
        )


def _computes_its_weight(module: nn.Module) -> bool:
    if parametrize.is_parametrized(module):
        return True
    return "weight" not in own_parameters(module) and isinstance(
        getattr(module, "weight", None), torch.Tensor
    )
