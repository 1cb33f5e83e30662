"""What the forward of one micro-batch leaves for its backward, block by block and for every way to recompute: figures, no tensors.

`engine.dryrun` measures them, `Recompute` writes them into the ledger and solves a budget from them. Bytes are those of distinct storages
that are neither parameters nor buffers nor the batch itself. A block's input belongs to the block, so blocks in different modes add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BlockMode = Literal["none", "selective", "full"]
"""none: everything that backward needs is kept; selective: the results of chosen operators; full: the input alone."""


@dataclass(frozen=True)
class ModeFacts:
    """One micro-batch with every block in one mode, on one rank."""

    blocks: tuple[int, ...]
    """Bytes that each block keeps, its input included."""
    outside: int
    """Bytes kept by what runs before and beside the blocks (embedding, positions, masks)."""
    logits: int
    """Bytes kept by what follows the last block: final norm, head and loss, the last block's output included."""
    flops: int
    """Floating point operations of forward and backward, what is recomputed included: matrix products and attention."""
    traffic: Mapping[str, int]
    """Bytes that forward and backward send over the tp axis, by collective."""
    peak: int
    """The most that forward and backward hold at once: all of the above, what is recomputed, and temporaries; gradients of parameters are
    counted until they are accumulated."""
    resident: tuple[int, ...] = ()
    """Bytes that each block keeps on the device when what it saves goes to a store; empty where that was not measured."""
    stored: tuple[int, ...] = ()
    """Bytes that each block puts into the store then."""


@dataclass(frozen=True)
class ActivationFacts:
    """The same micro-batch in every mode that was measured."""

    modes: Mapping[BlockMode, ModeFacts]

    def kept(self, assignment: tuple[BlockMode, ...], *, offloaded: int = 0) -> int:
        """Bytes that the blocks keep on the device, and what is beside them, where block i is in mode `assignment[i]` and the first
        `offloaded` blocks use a store."""
        outside = max(self.modes[mode].outside for mode in {"none", *assignment})  # a recomputed block keeps shared arguments too
        kept = (
            self.modes[mode].resident[index] if index < offloaded else self.modes[mode].blocks[index]
            for index, mode in enumerate(assignment)
        )
        return outside + sum(kept)

    def stored(self, assignment: tuple[BlockMode, ...], *, offloaded: int) -> int:
        """Bytes that the first `offloaded` blocks put into a store."""
        return sum(self.modes[mode].stored[index] for index, mode in enumerate(assignment[:offloaded]))

    def returning(self, assignment: tuple[BlockMode, ...], *, offloaded: int = 0) -> int:
        """The most bytes that come back to the device for the backward of one block: from recomputation, and from the store, where the
        block before is on its way too."""
        back = [self.modes["none"].blocks[index] - self.modes[mode].blocks[index] for index, mode in enumerate(assignment)]
        for index, mode in enumerate(assignment[:offloaded]):
            back[index] += self.modes[mode].stored[index] + (self.modes[assignment[index - 1]].stored[index - 1] if index else 0)
        return max((0, *back))

    def total(self, assignment: tuple[BlockMode, ...], *, offloaded: int = 0) -> int:
        """What a budget bounds: kept by the blocks, by head and loss, and what comes back for one block's backward."""
        kept, back = self.kept(assignment, offloaded=offloaded), self.returning(assignment, offloaded=offloaded)
        return kept + self.modes["none"].logits + back

    def extra_traffic(self, assignment: tuple[BlockMode, ...]) -> dict[str, int]:
        """Bytes that recomputation sends over the tp axis in addition, by collective; the blocks are taken to be alike."""
        base, extra = self.modes["none"].traffic, dict.fromkeys(self.modes["none"].traffic, 0)
        for mode in set(assignment) - {"none"}:
            share = assignment.count(mode)
            for collective, sent in self.modes[mode].traffic.items():
                extra[collective] = extra.get(collective, 0) + (sent - base.get(collective, 0)) * share // len(assignment)
        return extra


def alike(mode: BlockMode, count: int) -> tuple[BlockMode, ...]:
    """`count` blocks in one mode."""
    return (mode,) * count


def solve(facts: ActivationFacts, *, budget_bytes: int, offloaded: int = 0) -> tuple[BlockMode, ...] | None:
    """The mode of every block that repeats the fewest operations within the budget; None where even full recompute exceeds it.

    Blocks are taken to be alike, so only how many are in which mode matters. The last blocks keep most: their backward comes first, so that
    what they keep is freed soonest.
    """
    count = len(facts.modes["none"].blocks)
    cost = {mode: facts.modes[mode].flops - facts.modes["none"].flops for mode in facts.modes}
    best: tuple[int, int, tuple[BlockMode, ...]] | None = None
    for full in range(count + 1):
        for selective in range(count - full + 1 if "selective" in facts.modes else 1):
            assignment = (*alike("full", full), *alike("selective", selective), *alike("none", count - full - selective))
            total = facts.total(assignment, offloaded=offloaded)
            if total > budget_bytes:
                continue
            found = (full * cost["full"] + selective * cost.get("selective", 0), total, assignment)
            if best is None or found[:2] < best[:2]:
                best = found
    return best[2] if best else None
