"""Random numbers of tensor parallelism (dropout): one stream for tensors that all ranks of the axis
replicate, one per rank for tensors that they split.

Between a column-split layer and the row-split one behind it, and on sequence shards, a rank has its
own numbers: heads, columns and tokens of different ranks are dropped independently, and however
many numbers a rank's part takes, all ranks continue with the same numbers after it. The same as
Megatron-LM's tracker of model-parallel generators, but without a second state: the seed of a rank's
own stream is derived from the shared one where the split part begins. So restoring the shared
generator (recomputation, a checkpoint) restores the same masks.
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

_WORD = (1 << 64) - 1
_OFFSET = 4
"""The step of a GPU's generator's offset."""


@dataclass
class SplitStream:
    """The generators of one rank of the tp axis."""

    rank: int
    _generator: torch.Generator | None = field(default=None, repr=False)
    """Of the last split part."""
    _own_seed: int | None = None
    """Of that part. That the generator still has this seed means that it draws for this rank alone:
    code that left the region by an exception and restored the generator has left it here too.
    """
    _resume: Callable[[], None] | None = field(default=None, repr=False)
    """Puts the shared stream back."""
    _input: weakref.ref[torch.Tensor] | None = field(default=None, repr=False)
    """What the part reads, if it is known."""
    _began: Any = field(default=None, repr=False)

    def enter(self, like: torch.Tensor, *, read: torch.Tensor | None = None) -> None:
        """A split part begins, on the device of `like`; nothing happens inside of one. `read` is
        what its first layer read.

        Raises ModelError where numbers were drawn in the part for something that another of its
        layers reads in full.
        """
        generator = _generator(like)
        if generator is None:
            return
        if generator.initial_seed() == self._own_seed:
            self._refuse_late_input(generator, read)
            return
        self._generator = generator
        seed, self._resume = _branch(generator)
        self._own_seed = (seed + (self.rank + 1) * 0x9E3779B97F4A7C15) & _WORD
        generator.manual_seed(self._own_seed)
        self._input = weakref.ref(read) if read is not None else None
        self._began = _position(generator) if read is not None else None

    def leave(self) -> None:
        """The region ends: all ranks draw the same numbers again. Nothing happens outside of
        one.
        """
        if (
            self._generator is not None
            and self._resume is not None
            and self._generator.initial_seed() == self._own_seed
        ):
            self._resume()
        self._generator = self._resume = self._input = self._began = None

    def _refuse_late_input(self, generator: torch.Generator, read: torch.Tensor | None) -> None:
        if read is None or self._input is None or self._input() is read:
            return
        if not _same(self._began, _position(generator)):
            raise ModelError(
                "tensor parallelism: between the column-split layers of one part random numbers"
                " were drawn (dropout), and then another of its layers read something else than the"
                " first: what all ranks hold would be dropped differently on each; call the"
                " column-split layers one after the other, or give this one 'colwise_gather_output'"
                " in parallel.plan"
            )


def _generator(like: torch.Tensor) -> torch.Generator | None:
    """What dropout on the device of `like` draws from; None where nothing is computed."""
    if isinstance(like, FakeTensor) or like.is_meta:
        return None
    if accelerator.is_one(like.device):
        return accelerator.generator(like.device)
    return torch.default_generator if like.device.type == "cpu" else None


def _branch(generator: torch.Generator) -> tuple[int, Callable[[], None]]:
    """(a seed that the shared stream has not given before, what goes on with that stream)."""
    if generator.device.type == "cpu":
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        state = generator.get_state()
        return seed, lambda: _set(generator, state)
    # numbers on the host: no kernel, no synchronisation
    shared, offset = (generator.initial_seed(), generator.get_offset())

    def resume() -> None:
        generator.manual_seed(shared)
        generator.set_offset(offset + _OFFSET)

    return _mixed(_mixed(shared) ^ offset), resume


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _mixed(value: int) -> int:
    """A 64-bit number whose every bit depends on all of `value` (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _position(generator: torch.Generator) -> Any:
    return generator.get_state() if generator.device.type == "cpu" else generator.get_offset()


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
