"""Rotary embeddings whose frequencies depend on the length of the input.

Note [Rotary frequencies by length]
    These are the RoPE types `dynamic` and `longrope`. Transformers uses one set of frequencies for
    a forward, chosen by its longest row. Up to the original length, the frequencies are the same
    for every input. Beyond it:

    - `longrope` has a second set. When a request exceeds the original length, the model reads all
      of its tokens again, because keys of both sets cannot be combined.
    - `dynamic` has other frequencies for every length. Cached keys are not changed, and a module
      remembers the longest input that it has seen.

    Requests are therefore decoded in batches in which each of them has the frequencies that it
    would have if it were decoded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.errors import InputError

LONGROPE = "longrope"
DYNAMIC = "dynamic"


@dataclass(frozen=True)
class RopeByLength:
    """Rotary embedding of a model, of the type `dynamic` or `longrope`.

    See Note [Rotary frequencies by length].
    """

    kind: str
    """RoPE type: LONGROPE, DYNAMIC, or `several (...)`."""
    original: int
    """Original length: the number of tokens up to which frequencies do not change."""

    @property
    def is_uniform(self) -> bool:
        """True if all layers have the same RoPE type and original length."""
        return self.kind in (LONGROPE, DYNAMIC)

    @property
    def rereads_tokens(self) -> bool:
        """True if a request is prefilled again when it exceeds the model's original length."""
        return self.kind == LONGROPE

    def remembers(self, longest: int) -> bool:
        """Return True if a forward may use the frequencies of an earlier, longer forward.

        A forward over a single token resets the frequencies.

        Args:
            longest: Number of tokens of the forward's longest row.
        """
        return self.kind != LONGROPE and longest >= self.original


def rope_by_length(model: nn.Module) -> RopeByLength | None:
    """Return a model's rotary embedding, or None if its frequencies do not depend on the length."""
    return rope_of_config(getattr(model, "config", None))


def rope_of_config(config: Any) -> RopeByLength | None:
    """Return a configuration's rotary embedding, or None if no frequency depends on the length."""
    get_text_config = getattr(config, "get_text_config", None)
    if callable(get_text_config):
        config = get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return None

    ropes = set()
    # Some configurations have parameters for each type of layer.
    for entry in (parameters, *parameters.values()):
        if not isinstance(entry, dict):
            continue
        name = str(entry.get("rope_type") or entry.get("type"))
        if name == LONGROPE:
            original = entry.get("original_max_position_embeddings")
            ropes.add((LONGROPE, original or config.max_position_embeddings))
        elif DYNAMIC in name:
            ropes.add((DYNAMIC, config.max_position_embeddings))
    if not ropes:
        return None

    kinds = sorted({kind for kind, _ in ropes})
    kind = kinds[0]
    if len(ropes) > 1:
        kind = f"several ({' and '.join(kinds)})"
    return RopeByLength(kind, min(original for _, original in ropes))


def group_requests(
    rope: RopeByLength | None,
    lengths: Sequence[tuple[int, int]],
    batch_size: int | None = None,
) -> list[list[int]]:
    """Group requests into batches in which each keeps the rotary frequencies that it has alone.

    Args:
        rope: Rotary embedding of the model.
        lengths: (number of tokens of the prompt, largest number of tokens that the model reads) of
            each request.
        batch_size: Largest number of requests per batch. None means no limit.

    Returns:
        Indices of the requests of each batch.
    """
    requests: dict[int, list[int]] = {}
    for index, (prompt, most) in enumerate(lengths):
        if rope is None or most <= rope.original:
            group = 0
        elif rope.rereads_tokens and prompt > rope.original:
            # They have the second set from the start, with or without padding.
            group = -1
        else:
            # Prompts of one length have no padding, and exceed the original length together.
            group = prompt
        requests.setdefault(group, []).append(index)
    size = batch_size or len(lengths)
    batches = []
    for indices in requests.values():
        batches += [indices[first : first + size] for first in range(0, len(indices), size)]
    return batches


def refuse_above_original(rope: RopeByLength | None, tokens: int, what: str, remedy: str) -> None:
    """Raise InputError if a request may exceed the original length.

    Args:
        rope: Rotary embedding of the model.
        tokens: Number of tokens of the longest request.
        what: Description of what is not supported above the original length, for the message.
        remedy: Remedy, for the message.
    """
    if rope is not None and tokens > rope.original:
        raise InputError(
            f"{what}: above {rope.original:,} tokens, the frequencies of the model's rotary"
            f" embedding (RoPE type {rope.kind}) depend on the length of the input, and a request"
            f" may have {tokens:,}; {remedy}"
        )
