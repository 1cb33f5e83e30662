"""Kinds of layers that styles of tensor parallelism can be applied to.

Plait computes a split layer itself, on this rank's part of the weight. A layer must therefore be
known to compute exactly what `nn.Linear`, Transformers' `Conv1D` or `nn.Embedding` computes. A
subclass with its own forward and a wrapped module are not accepted.
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
"""Subclasses of nn.Linear whose own forward also computes x W^T + b."""
_NORMS_OVER_TOKENS = ("batch", "group", "instance")
"""Parts of the class names of norms that do not normalise every token by itself."""


def count_parameters(module: nn.Module) -> int:
    """Return the number of elements of all parameters of a module, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Transformers' `Conv1D`, a linear layer with the weight [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    """Return True if a module computes exactly x W^T + b (`nn.Linear`) or x W + b (`Conv1D`)."""
    # A forward in the instance's dictionary replaces that of the class.
    if "forward" in vars(module) or parametrize.is_parametrized(module):
        return False
    if is_conv1d(module):
        return True
    if not isinstance(module, nn.Linear):
        return False
    if (
        type(module).forward is not nn.Linear.forward
        and type(module).__name__ not in _SAME_AS_LINEAR
    ):
        return False
    return set(own_parameters(module)) == {"weight", "bias"} and module.weight.ndim == 2


def is_embedding(module: nn.Module) -> bool:
    """Return True if a module is exactly a lookup of rows, with an optional constant factor.

    Such a module can be computed from a part of the rows.
    """
    # max_norm changes the weight in the forward; scale_grad_by_freq and sparse change its gradient.
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
    """Return the factor of Transformers' scaled embeddings (Gemma, BART), or None for others."""
    module_class = type(module)
    if not module_class.__name__.endswith("ScaledWordEmbedding"):
        return None
    if not module_class.__module__.startswith("transformers."):
        return None
    scale = getattr(module, "embed_scale", None)
    return scale if isinstance(scale, int | float | torch.Tensor) else None


def is_norm(module: nn.Module) -> bool:
    """Return True if a module normalises every token by itself, judged by its class name."""
    class_name = type(module).__name__.lower()
    return "norm" in class_name and not any(part in class_name for part in _NORMS_OVER_TOKENS)


def in_features(module: nn.Module) -> int:
    """Return the number of inputs of a linear layer."""
    return _features(module)[0]


def out_features(module: nn.Module) -> int:
    """Return the number of outputs of a linear layer."""
    return _features(module)[1]


def _features(module: nn.Module) -> tuple[int, int]:
    first, second = module.get_parameter("weight").shape
    if is_conv1d(module):
        return first, second
    return second, first


def split_dims(module: nn.Module, style: Style) -> Mapping[str, int | None]:
    """Return the dimension along which a style splits each of a module's own parameters.

    None keeps the parameter replicated on every rank.
    """
    output_dim = 1 if is_conv1d(module) else 0
    if style in COLUMN_STYLES:
        return {"weight": output_dim, "bias": 0}
    if style in ROW_STYLES:
        # The bias is added once, after the sum over the ranks.
        return {"weight": 1 - output_dim, "bias": None}
    if style == "embedding_rowwise":
        return {"weight": 0}
    return {name: None for name, _ in module.named_parameters(recurse=False)}


def check_style(model: nn.Module, name: str, style: Style, source: str) -> None:
    """Check that a style can be applied to a module.

    Args:
        model: The model.
        name: Full name of the module.
        style: The style.
        source: Where the style comes from, for the message.

    Raises:
        ModelError: It cannot.
    """
    module = model.get_submodule(name)
    class_name = type(module).__name__
    if style == "replicated_with_grad_allreduce":
        if next(module.parameters(), None) is None:
            raise ModelError(
                f"{source}: {name} ({class_name}) has no parameters, so {style!r} does nothing to"
                " it; leave it out"
            )
        return
    if style == "embedding_rowwise":
        if not is_embedding(module):
            raise ModelError(
                f"{source}: {name} ({class_name}) cannot be {style!r}: it must be an nn.Embedding"
                " with that class's forward and no max_norm, scale_grad_by_freq or sparse; leave"
                " it out, which keeps it replicated on every rank"
            )
        return

    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise ModelError(
            f"{source}: {name} belongs to an nn.MultiheadAttention, which uses the weight without a"
            " call; leave it out"
        )
    if not is_linear(module):
        reason = ""
        if _computes_its_weight(module):
            reason = (
                ", and its weight is computed from other parameters (a parametrization,"
                " weight_norm, spectral_norm or pruning)"
            )
        raise ModelError(
            f"{source}: {name} ({class_name}) cannot be {style!r}: it must be an nn.Linear or"
            f" Transformers' Conv1D with that class's forward{reason}; leave it out, which keeps it"
            " replicated on every rank"
        )


def _computes_its_weight(module: nn.Module) -> bool:
    if parametrize.is_parametrized(module):
        return True
    # The older torch.nn.utils.weight_norm and pruning assign a plain tensor before each forward.
    return "weight" not in own_parameters(module) and isinstance(
        getattr(module, "weight", None), torch.Tensor
    )
