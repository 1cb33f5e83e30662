"""Tensor parallelism of a language model's boundary layers: its embedding and its head.

Both are split along the vocabulary, or both are replicated: tied layers share a weight, which can
only have one split. A split head allows losses to be computed on logits that are split along the
vocabulary.

This module completes the rules of a model family. A user's rules are applied as they are.
"""

from __future__ import annotations

import inspect

from torch import nn

from plait.model.adapters import copied_layers
from plait.model.layers import is_embedding, is_linear, split_dims
from plait.model.rules import RuleSet, Style
from plait.model.sequence import is_inside
from plait.model.tied import tied_names

_BOUNDARY_STYLES: tuple[Style, ...] = ("embedding_rowwise", "vocab_head")


def split_boundary_layers(
    model: nn.Module, styles: dict[str, Style], rule_set: RuleSet
) -> tuple[str | None, str | None]:
    """Give the embedding and the head of a model the styles that split their vocabulary.

    Args:
        model: The model without adapters.
        styles: Style by module name. It is completed in place.
        rule_set: The rules that `styles` come from.

    Returns:
        The names of the split head and of the split embedding. None if it is not split.
    """
    embedding = _boundary_layer(model, "get_input_embeddings")
    head = _boundary_layer(model, "get_output_embeddings")
    # Families gather the logits. With split logits the loss can be computed without gathering.
    if head is not None and styles.get(head) == "colwise_gather_output":
        styles[head] = "vocab_head"
    if not rule_set.complete:
        _complete_styles(model, styles, embedding, head)

    heads = [name for name, style in styles.items() if style == "vocab_head"]
    embeddings = [name for name, style in styles.items() if style == "embedding_rowwise"]
    return _preferred(head, heads), _preferred(embedding, embeddings)


def head_name(model: nn.Module) -> str | None:
    """Return the name of the layer that computes the logits.

    It is None unless the model names that layer (`get_output_embeddings`).
    """
    return _boundary_layer(model, "get_output_embeddings")


def _preferred(candidate: str | None, names: list[str]) -> str | None:
    """Return the candidate if it is one of the names, otherwise the first name."""
    if candidate in names:
        return candidate
    return names[0] if names else None


def _complete_styles(
    model: nn.Module, styles: dict[str, Style], embedding: str | None, head: str | None
) -> None:
    modules = dict(model.named_modules())
    lookups = set()
    for name, module in modules.items():
        if is_embedding(module) and not _weight_is_indexed(model, name):
            lookups.add(name)

    # Transformers marks every input embedding, including those that compute more than a lookup.
    for name, style in list(styles.items()):
        if style == "embedding_rowwise" and name not in lookups:
            del styles[name]

    if embedding is not None and embedding in lookups:
        styles[embedding] = "embedding_rowwise"
    if head is not None and is_linear(modules[head]):
        styles[head] = "vocab_head"
    for name in {embedding, head}.intersection(copied_layers(model)):
        # The wrapper contains the layer and its trained copy. Both are replicated.
        styles.pop(str(name), None)
    _align_tied_layers(model, styles, lookups)


def _align_tied_layers(model: nn.Module, styles: dict[str, Style], lookups: set[str]) -> None:
    """Split all owners of a tied weight along the vocabulary, or none of them.

    Args:
        model: The model.
        styles: Style by module name. It is changed in place.
        lookups: Names of the embeddings that can compute with a part of their rows.
    """
    copied = copied_layers(model)
    for owners in _owners_of_tied_weights(model):
        split_owners = [name for name in owners if styles.get(name) in _BOUNDARY_STYLES]
        if not split_owners:
            continue
        can_split = True
        for name in owners:
            splits_rows = name in lookups or _is_head(model.get_submodule(name))
            if is_inside(name, copied) or not splits_rows:
                can_split = False
        if can_split:
            for name in owners:
                styles[name] = "embedding_rowwise" if name in lookups else "vocab_head"
        else:
            # If a single owner needs the full tensor, it is replicated for all owners.
            for name in split_owners:
                del styles[name]


def _is_head(module: nn.Module) -> bool:
    """Return True for a linear layer whose weight has the vocabulary in its first dimension."""
    return is_linear(module) and split_dims(module, "vocab_head")["weight"] == 0


def _weight_is_indexed(model: nn.Module, name: str) -> bool:
    """Return True if the forward of a module above an embedding indexes the embedding's weight.

    Gemma 4 does so for padding. A rank has only its own rows, so the index would be wrong.
    """
    leaf = name.rpartition(".")[2]
    ancestors = [name[:index] for index, letter in enumerate(name) if letter == "."]
    for ancestor in ("", *ancestors):
        try:
            source = inspect.getsource(type(model.get_submodule(ancestor)).forward)
        except (OSError, TypeError):  # a class without a source file
            continue
        if f"{leaf}.weight[" in source:
            return True
    return False


def _boundary_layer(model: nn.Module, getter: str) -> str | None:
    """Return the name of the module that a Transformers getter returns, or None.

    The getter is called on the outermost module that has it, because a model can be wrapped.
    """
    owner = next((module for module in model.modules() if hasattr(module, getter)), None)
    if owner is None:
        return None
    try:
        layer = getattr(owner, getter)()
    except (AttributeError, NotImplementedError):
        return None  # models of several parts (vision, audio) may have no such layer
    for name, module in model.named_modules():
        if name and module is layer:
            return name
    return None


def _owners_of_tied_weights(model: nn.Module) -> list[list[str]]:
    modules = dict(model.named_modules())
    groups = []
    for names in tied_names(model):
        owners = [name.rpartition(".")[0] for name in names if name.endswith(".weight")]
        groups.append([name for name in owners if name in modules])
    return groups
