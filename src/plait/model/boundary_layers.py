"""Embedding and head of a language model under tensor parallelism: both are split along the
vocabulary, or both are replicated.

Tied layers share a weight, so they must have the same split; and a loss can compute on logits that
are split along the vocabulary. This module completes the rules of a model family; a user's rules
are used as they are.
"""

from __future__ import annotations

import inspect

from torch import nn

from plait.model.adapters import copied_layers
from plait.model.layers import is_embedding, is_linear, split_dims
from plait.model.rules import RuleSet, Style
from plait.model.tied import tied_names


def split_boundary_layers(
    model: nn.Module, styles: dict[str, Style], rule_set: RuleSet
) -> tuple[str | None, str | None]:
    """Names of the split head and of the split embedding, None where there is none. Changes
    `styles` in place.
    """
    embedding = _end(model, "get_input_embeddings")
    head = _end(model, "get_output_embeddings")
    if head is not None and styles.get(head) == "colwise_gather_output":
        styles[head] = "vocab_head"
    if not rule_set.complete:
        _complete(model, styles, embedding, head)
    heads = [name for name, style in styles.items() if style == "vocab_head"]
    embeddings = [name for name, style in styles.items() if style == "embedding_rowwise"]
    return _preferred(head, heads), _preferred(embedding, embeddings)


def head_name(model: nn.Module) -> str | None:
    """Name of the layer that makes the logits, where the model names it
    (`get_output_embeddings`).
    """
    return _end(model, "get_output_embeddings")


def _preferred(first: str | None, names: list[str]) -> str | None:
    return first if first in names else (names[0] if names else None)


def _complete(
    model: nn.Module, styles: dict[str, Style], embedding: str | None, head: str | None
) -> None:
    modules = dict(model.named_modules())
    read = {
        name
        for name in modules
        if name and is_embedding(modules[name]) and _weight_is_read(model, name)
    }
    for name, style in list(styles.items()):
        if style == "embedding_rowwise" and (not is_embedding(modules[name]) or name in read):
            # Transformers marks every input embedding, also those that compute more than a
            # lookup
            del styles[name]
    if embedding is not None and is_embedding(modules[embedding]) and embedding not in read:
        styles[embedding] = "embedding_rowwise"
    if head is not None and is_linear(modules[head]):
        styles[head] = "vocab_head"
    copied = copied_layers(model)
    for end in {embedding, head} & set(copied):
        # The layer and its trained copy are inside. Both are replicated.
        styles.pop(str(end), None)
    for owners in _sharing_a_weight(model):
        ends = [name for name in owners if styles.get(name) in ("embedding_rowwise", "vocab_head")]
        if not ends:
            continue
        is_copied = any(name.startswith(f"{wrapper}.") for name in owners for wrapper in copied)
        if not is_copied and all(
            _splits_rows(modules[name]) and name not in read for name in owners
        ):
            styles.update(
                {
                    name: "embedding_rowwise" if is_embedding(modules[name]) else "vocab_head"
                    for name in owners
                }
            )
        else:
            for name in ends:  # a tensor that one owner needs unsharded is unsharded for all
                del styles[name]


def _weight_is_read(model: nn.Module, name: str) -> bool:
    """Whether the forward of a module above the embedding `name` takes rows of its weight itself,
    as Gemma 4 does for padding: a rank would have its own rows only.
    """
    leaf = name.rpartition(".")[2]
    above = [name[:index] for index, letter in enumerate(name) if letter == "."]
    for owner in ("", *above):
        try:
            source = inspect.getsource(type(model.get_submodule(owner)).forward)
        except (OSError, TypeError):  # no file has it
            continue
        if f"{leaf}.weight[" in source:
            return True
    return False


def _end(model: nn.Module, getter: str) -> str | None:
    """Name of the module that Transformers' `getter` returns, asked of the model or, in a wrapper,
    of the outermost part that has it.
    """
    owner = next((module for module in model.modules() if hasattr(module, getter)), None)
    if owner is None:
        return None
    try:
        module = getattr(owner, getter)()
    except (AttributeError, NotImplementedError):
        return None  # models of several parts (vision, audio) may have no such layer
    return next((name for name, other in model.named_modules() if name and other is module), None)


def _sharing_a_weight(model: nn.Module) -> list[list[str]]:
    modules = dict(model.named_modules())
    groups = [
        [name.rpartition(".")[0] for name in names if name.endswith(".weight")]
        for names in tied_names(model)
    ]
    return [[name for name in owners if name in modules] for owners in groups]


def _splits_rows(module: nn.Module) -> bool:
    return is_embedding(module) or (
        is_linear(module) and split_dims(module, "vocab_head")["weight"] == 0
    )
