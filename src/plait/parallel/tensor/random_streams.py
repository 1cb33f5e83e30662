"""Random numbers of tensor parallelism (dropout).

Note [Random streams of tensor parallelism]
    Tensors that all tp ranks replicate need the same random numbers on all of them. Tensors that
    are split over the ranks need different numbers on each rank, so that heads, columns and tokens
    of different ranks are dropped independently. Such split parts lie between a column-parallel
    layer and the row-parallel layer after it, and on sequence shards. Ranks may draw any number of
    random numbers in a split part, and all continue with the same shared stream after it.

    Megatron-LM's `CudaRNGStatesTracker` does the same with a second generator state. Here the seed
    of a rank's stream is derived from the shared stream at the beginning of the split part, so
    restoring the shared generator (recomputation, a checkpoint) restores the same masks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from plait._torch.operators import FakeTensor
from plait.cluster import accelerator
from plait.errors import ModelError
from plait.hashing import GOLDEN_RATIO, WORD_MASK, mix_bits

_OFFSET = 4
"""Step of the offset of a GPU's generator."""


@dataclass
class SplitStream:
    """Random streams of one rank of tp. See Note [Random streams of tensor parallelism]."""

    rank: int
    _generator: torch.Generator | None = field(default=None, repr=False)
    """Generator of the last split part."""
    _own_seed: int | None = None
    """Seed of the last split part.

    While the generator has this seed, it is in a split part. After an exception `leave` may not
    have been called. If the generator was restored since, its seed shows that the part has ended.
    """
    _resume: Callable[[], None] | None = field(default=None, repr=False)
    """Returns the generator to the shared stream."""
    _input: weakref.ref[torch.Tensor] | None = field(default=None, repr=False)
    """Input of the split part, if it is known."""
    _start_position: Any = field(default=None, repr=False)
    """Position of the generator at the beginning of the part."""

    def enter(self, like: torch.Tensor, *, read: torch.Tensor | None = None) -> None:
        """Begin a split part. This does nothing if one has begun already.

        Args:
            like: A tensor on the device of the part.
            read: The input of its first layer, if it is known.

        Raises:
            ModelError: Random numbers were drawn in the part, and then another of its layers reads
                a replicated tensor, which each rank would have dropped differently.
        """
        generator = _generator(like)
        if generator is None:
            return
        if generator.initial_seed() == self._own_seed:
            self._refuse_late_input(generator, read)
            return
        self._generator = generator
        seed, self._resume = _branch(generator)
        self._own_seed = (seed + (self.rank + 1) * GOLDEN_RATIO) & WORD_MASK
        generator.manual_seed(self._own_seed)
        self._input = None
        self._start_position = None
        if read is not None:
            self._input = weakref.ref(read)
            self._start_position = _position(generator)

    def leave(self) -> None:
        """End a split part, after which all ranks draw the same numbers again.

        Nothing happens outside of a part.
        """
        if (
            self._generator is not None
            and self._resume is not None
            and self._generator.initial_seed() == self._own_seed
        ):
            self._resume()
        self._generator = None
        self._resume = None
        self._input = None
        self._start_position = None

    def _refuse_late_input(self, generator: torch.Generator, read: torch.Tensor | None) -> None:
        if read is None or self._input is None or self._input() is read:
            return
        if not _is_same_position(self._start_position, _position(generator)):
            raise ModelError(
                "tensor parallelism: random numbers were drawn (dropout) after a column-parallel"
                " layer, and then another column-parallel layer read a different input: every rank"
                " would drop other elements of a replicated tensor; call the column-parallel layers"
                " one after the other, or use the style 'colwise_gather_output' for this one in"
                " parallel.plan"
            )


def _generator(like: torch.Tensor) -> torch.Generator | None:
    """Return the generator of dropout on the device of `like`, or None if nothing is computed."""
    if isinstance(like, FakeTensor) or like.is_meta:
        return None
    if accelerator.is_accelerator(like.device):
        return accelerator.generator(like.device)
    if like.device.type == "cpu":
        return torch.default_generator
    return None


def _branch(generator: torch.Generator) -> tuple[int, Callable[[], None]]:
    """Return an unused seed of the shared stream, and a function that resumes the stream."""
    if generator.device.type == "cpu":
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        state = generator.get_state()

        def restore() -> None:
            generator.set_state(state)

        return seed, restore
    # Seed and offset are numbers on the host: no kernel runs, and nothing waits for the device.
    shared_seed = generator.initial_seed()
    offset = generator.get_offset()

    def resume() -> None:
        generator.manual_seed(shared_seed)
        # Another offset, so that the next part gets another seed.
        generator.set_offset(offset + _OFFSET)

    return _mixed(_mixed(shared_seed) ^ offset), resume


def _mixed(value: int) -> int:
    return mix_bits((value + GOLDEN_RATIO) & WORD_MASK)


def _position(generator: torch.Generator) -> Any:
    """Return the state of a CPU's generator, or the offset of a GPU's."""
    if generator.device.type == "cpu":
        return generator.get_state()
    return generator.get_offset()


def _is_same_position(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)
