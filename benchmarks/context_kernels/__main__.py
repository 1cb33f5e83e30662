"""Print the table of docs/how-to/context-parallelism.md.

python -m benchmarks.context_kernels [--quick]
"""

from __future__ import annotations

from typing import get_args

from benchmarks.common.command import command
from benchmarks.context_kernels.counts import LAYERS, kernels_by_hand, kernels_of_layer
from plait.parallel.context.kinds import Kind

if __name__ == "__main__":
    quick = command("context_kernels", __doc__).parse_args().quick
    kinds: tuple[Kind, ...] = get_args(Kind)
    print(
        f"| tokens | cp | ring by hand | {' | '.join(kinds)} | ring, {LAYERS} layers |\n|{'---|' * (len(kinds) + 4)}"
    )
    for tokens, degrees in (
        (8192, (2, 4, 8)),
        (32768, (2, 8, 32)),
        (131072, (8, 32)),
        (1048576, (8, 32)),
    ):
        for ranks in degrees[: 1 if quick else None]:
            counts = [kernels_of_layer(kind, tokens, ranks, 0).total() for kind in kinds]
            by_hand = kernels_by_hand(tokens, ranks, 0).total()
            columns = [
                f"{tokens:,}",
                ranks,
                by_hand,
                *counts,
                f"{counts[kinds.index('ring')] * LAYERS:,}",
            ]
            print(f"| {' | '.join(str(column) for column in columns)} |")
