"""Layers outside the blocks, mainly embedding and head: how they are split and sharded.

Tensor parallelism either splits both embedding and head along the vocabulary or replicates both,
because tied layers share a weight, which can only have one split. A split head allows losses to be
computed on logits that are split along the vocabulary.

`split_boundary_layers` completes the rules of a model family. A user's rules are applied as they
are.

`outer_units` chooses the layers that are separate sharding units. Embeddings and the head can be
outer units. The backward of an embedding does not read its weight, so its parameters can be freed
after the forward. The parameters of a head are needed only from its forward to its backward. All
other parameters outside the blocks form one unit, the root.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from plait.model.adapters import copied_layers
from plait.model.layers import (
    RuleSet,
    Style,
    count_parameters,
    first_names,
    is_embedding,
    is_linear,
    split_dims,
    tied_names,
)
from plait.model.sequence import is_inside

_BOUNDARY_STYLES: tuple[Style, ...] = ("embedding_rowwise", "vocab_head")


def split_boundary_layers(
    model: nn.Module, styles: dict[str, Style], rule_set: RuleSet
) -> tuple[str | None, str | None]:
    """Assign the styles that split the vocabulary to the embedding and the head of a model.

    Args:
        model: The model without adapters.
        styles: Style by module name. It is completed in place.
        rule_set: The rules that `styles` come from.

    Returns:
        (name of the head, name of the embedding), with None in place of a layer that is not split.
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
    """Split either all owners of a tied weight along the vocabulary or none of them.

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
            module = model.get_submodule(name)
            # The weight of a head has the vocabulary in its first dimension.
            splits_rows = name in lookups or (
                is_linear(module) and split_dims(module, "vocab_head")["weight"] == 0
            )
            if is_inside(name, copied) or not splits_rows:
                can_split = False
        if can_split:
            for name in owners:
                styles[name] = "embedding_rowwise" if name in lookups else "vocab_head"
        else:
            # If a single owner needs the full tensor, it is replicated for all owners.
            for name in split_owners:
                del styles[name]


def _weight_is_indexed(model: nn.Module, name: str) -> bool:
    """Return True if code outside of an embedding indexes the embedding's weight.

    The forward of a parent module in Gemma 4 does so for padding. A rank has only its own rows, so
    the index would be wrong.
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


LEAST_SHARE = 0.1
"""Smallest share of the parameters outside the blocks for which a layer becomes a unit.

Each unit costs one more all-gather and one more reduce-scatter.
"""


@dataclass(frozen=True)
class OuterUnits:
    """Names of the layers outside the blocks that are sharding units."""

    embeddings: tuple[str, ...] = ()
    head: str | None = None

    def without(self, names: Collection[str]) -> OuterUnits:
        """Return the units that are neither in `names` nor inside modules in `names`."""
        prefixes = tuple(f"{name}." for name in names)
        embeddings = tuple(name for name in self.embeddings if not f"{name}.".startswith(prefixes))
        head = self.head
        if head is not None and f"{head}.".startswith(prefixes):
            head = None
        return OuterUnits(embeddings, head)

    def unit_of(self, parameter: str) -> str:
        """Return the name of the outer unit that contains a parameter, or an empty string."""
        module = parameter.rpartition(".")[0]
        if module in self.embeddings or module == self.head:
            return module
        return ""


def outer_units(model: nn.Module, blocks: Sequence[str]) -> OuterUnits:
    """Return the outer units of a model.

    An outer unit is a plain embedding or linear layer. Other layers are excluded, because it is not
    known what their backward reads. An outer unit shares no parameter with another layer: tied
    weights stay in the root unit. The head is the layer that the model names
    (`get_output_embeddings`), or otherwise the last linear layer outside the blocks.

    Args:
        model: The model before it is sharded.
        blocks: Names of its repeated blocks. A model without blocks has no outer units.
    """
    if not blocks:
        return OuterUnits()

    layers = _large_untied_layers(model, blocks)
    linear = [name for name, module in layers.items() if is_linear(module)]
    head = head_name(model)
    if head is not None:
        # Inside an adapter, the layer with the weight is below the named head.
        linear = [name for name in linear if f"{name}.".startswith(f"{head}.")]
    embeddings = tuple(name for name, module in layers.items() if is_embedding(module))
    return OuterUnits(embeddings, linear[-1] if linear else None)


def _large_untied_layers(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """Return the embeddings and linear layers outside the blocks that should be units."""
    prefixes = tuple(f"{block}." for block in blocks)
    outside = 0
    for name, parameter in model.named_parameters():
        if not name.startswith(prefixes):
            outside += parameter.numel()

    tied = first_names(model).keys()
    layers = {}
    for name, module in model.named_modules():
        if f"{name}.".startswith(prefixes) or not (is_embedding(module) or is_linear(module)):
            continue
        # Smaller layers are not worth the additional collectives and stay in the root unit.
        size = count_parameters(module)
        is_large = size > 0 and size >= LEAST_SHARE * outside
        if is_large and tied.isdisjoint(f"{name}.{leaf}" for leaf, _ in module.named_parameters()):
            layers[name] = module
    return layers
