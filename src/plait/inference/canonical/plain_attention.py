"""Attention that a model computes in plain operators (Transformers' "eager"): which batched products are scores of queries and keys, and
which sum values by weights that a softmax gave. Any other is not known: which of its terms are masked cannot be seen."""

from __future__ import annotations

import torch
from torch import nn

from plait.inference.canonical.batched import in_parts, with_keys, with_values
from plait.inference.canonical.exact_products import slices_of
from plait.model.facts import attention_facts
from plait.model.heads import WIDTHS


class PlainAttention:
    """Of one call; of this rank."""

    def __init__(self, model: nn.Module) -> None:
        self._widths = _widths(model)
        self._weights: list[torch.Tensor] = []
        """What the last softmax gave, and copies of it: held, so that no other tensor has their memory."""
        self._unused = 0
        """Terms of a sum by those weights, as long as there was none: a product of as many terms may be by something made of them."""

    def softmax(self, weights: torch.Tensor) -> None:
        """Know what a softmax gave."""
        self._weights, self._unused = [weights], weights.shape[-1]

    def copied(self, source: torch.Tensor, found: torch.Tensor) -> None:
        """Know a copy, perhaps in another dtype, of what a softmax gave."""
        if self._has(source):
            self._weights.append(found)

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        """[batch, queries, columns] in float64 of `left` [batch, queries, terms] and `right` [batch, terms, columns]; None where it is
        neither of the two."""
        slices, terms = slices_of(left.dtype), left.shape[-1]
        if self._has(left):
            of, self._unused = with_values(right.double(), slices=slices), 0
        elif terms == self._unused:
            return None
        elif terms in self._widths:
            of = with_keys(right.mT.double(), slices=slices)
        elif terms == 1:
            return left.double() * right.double()
        else:
            return None
        queries = left.shape[-2]
        found = in_parts(lambda rows: of(left[..., rows, :].double()), left.shape[:-2], queries, max(terms, right.shape[-1]))
        return torch.cat(found, dim=-2) if found else right.new_zeros(*left.shape[:-1], right.shape[-1], dtype=torch.float64)

    def _has(self, tensor: torch.Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == place for one in self._weights)


def _widths(model: nn.Module) -> frozenset[int]:
    """Of a head: what queries and keys have in common. 1 could be a number of keys."""
    own = (getattr(module, name, None) for module in model.modules() for name in WIDTHS)
    facts = attention_facts(model)
    found = {width for width in own if isinstance(width, int)} | ({facts.head_dim} if facts is not None else set())
    return frozenset(found - {1})
