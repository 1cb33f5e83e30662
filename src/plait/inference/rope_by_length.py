"""Rotary embeddings whose frequencies follow the length of the input (RoPE types `dynamic` and
`longrope`), and batches of their requests.

Transformers takes one set of frequencies for all of a forward, by its longest row. Up to the
original length they are the same for every input. Past it `longrope` has a second set, and
generation reads a request anew when it gets there, since keys of both do not go together. `dynamic`
has other ones for every length; keys that are kept stay as they are, and a module remembers the
longest input it has seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.errors import InputError

LONGROPE = "longrope"
DYNAMIC = "dynamic"


@dataclass(frozen=True)
class RopeByLength:
    """Of a model."""

    kind: str
    """LONGROPE, DYNAMIC, or `several (...)`."""
    original: int
    """Tokens up to which the frequencies are those of every shorter input."""

    @property
    def is_one(self) -> bool:
        """Whether all layers have the same."""
        return self.kind in (LONGROPE, DYNAMIC)

    @property
    def reads_anew(self) -> bool:
        """Whether a request that gets past the original length is read again."""
        return self.kind == LONGROPE

    def remembers(self, longest: int) -> bool:
        """Whether a forward of so many tokens may use frequencies that an earlier, longer one left;
        one of a single token clears them.
        """
        return self.kind != LONGROPE and longest >= self.original


def rope_by_length(model: nn.Module) -> RopeByLength | None:
    """None for a model whose frequencies are always the same."""
    return rope_of_config(getattr(model, "config", None))


def rope_of_config(config: Any) -> RopeByLength | None:
    """The same. Some have parameters for each type of layer."""
    find = getattr(config, "get_text_config", None)
    config = find(decoder=True) if callable(find) else config
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(given, dict):
        return None
    found = set()
    for one in (given, *given.values()):
        name = str(one.get("rope_type") or one.get("type")) if isinstance(one, dict) else ""
        kind = LONGROPE if name == LONGROPE else DYNAMIC if DYNAMIC in name else None
        if kind is not None:
            own = one.get("original_max_position_embeddings") if kind == LONGROPE else None
            found.add((kind, own or config.max_position_embeddings))
    if not found:
        return None
    kinds = sorted({kind for kind, _ in found})
    several = len(found) > 1
    return RopeByLength(
        f"several ({' and '.join(kinds)})" if several else kinds[0],
        min(original for _, original in found),
    )


def groups(rope: RopeByLength | None, lengths: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Indices of requests that may be in one batch, so that each has the frequencies that it has
    alone. `lengths`: of each the tokens of its prompt, and the tokens that the model sees of it at
    most.
    """
    found: dict[int, list[int]] = {}
    for index, (prompt, most) in enumerate(lengths):
        if rope is None or most <= rope.original:
            key = 0
        elif rope.reads_anew and prompt > rope.original:
            key = -1
        else:
            key = prompt  # those get past the original length together, and have no padding
        found.setdefault(key, []).append(index)
    return list(found.values())


def refuse_past(rope: RopeByLength | None, tokens: int, what: str, remedy: str) -> None:
    """Raise InputError where so many tokens are past the original length. `what`: which cannot do
    that.
    """
    if rope is not None and tokens > rope.original:
        raise InputError(
            f"{what}: the frequencies of the model's rotary embedding (RoPE type {rope.kind})"
            f" follow the length of the input past {rope.original:,} tokens, and a request may have"
            f" {tokens:,}; {remedy}"
        )
