"""Draw docs/figures/compression_loss.svg and print its table: the loss of small models that train through compressed gradients, equal data.

The models are those of tests/parity/test_convergence.py, on 2 gloo ranks. Minutes.
Run: PYTHONPATH=src python -m tools.plot_compression_loss (not as a file: tools/tests.py would hide the package tests)
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from benchmarks.common.report import markdown
from tests.parity.language import bigram_losses, losses
from tests.pool import Pool

STEPS, MEAN_OF, BIGRAM_STEPS = 240, 20, 150
RUNS: tuple[tuple[str, int, dict[str, Any], str], ...] = (
    ("uncompressed", 0, {}, "black"),
    ("int8, stage 0", 0, {"compress_gradients": "int8"}, "tab:blue"),
    (
        "int8 gradients and weights, stage 2",
        2,
        {"compress_gradients": "int8", "compress_weights": "int8"},
        "tab:cyan",
    ),
    (
        "int4 with error feedback, stage 0",
        0,
        {"compress_gradients": "int4", "error_feedback": True},
        "tab:green",
    ),
    (
        "int4 without, stage 0",
        0,
        {"compress_gradients": "int4", "error_feedback": False},
        "tab:red",
    ),
    ("PowerSGD, rank 4", 0, {"compress_gradients": "powersgd"}, "tab:orange"),
)
BIGRAMS = (
    "uncompressed",
    "int8, stage 0",
    "int4 with error feedback, stage 0",
    "int4 without, stage 0",
)
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "compression_loss.svg"


def main() -> None:
    """Train, draw and print."""
    pool = Pool()
    try:
        found = {
            name: pool.run(2, losses, parallel, stage, STEPS)[0]
            for name, stage, parallel, _ in RUNS
        }
        bigrams = {
            name: pool.run(2, bigram_losses, parallel, BIGRAM_STEPS)[0]
            for name, _, parallel, _ in RUNS
            if name in BIGRAMS
        }
    finally:
        pool.close()
    colors = {name: color for name, *_, color in RUNS}
    mpl.rcParams["svg.hashsalt"] = "plait"  # the same file from the same figures
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, values in found.items():
        smooth = [mean(values[start : start + MEAN_OF]) for start in range(STEPS - MEAN_OF + 1)]
        left.plot(smooth, color=colors[name], label=name, linewidth=1.2)
    left.set(
        title="Llama of 0.15 M parameters, AdamW",
        xlabel="step",
        ylabel=f"loss, mean of {MEAN_OF} steps",
        ylim=(1.9, 4.0),
    )
    for name, values in bigrams.items():
        right.plot(values, color=colors[name], label=name, linewidth=1.2)
    last = bigrams["uncompressed"][-1]
    right.set(
        title="a table of bigrams, gradient descent, nothing random",
        xlabel="step",
        ylabel="loss",
        ylim=(last - 0.02, last + 0.3),
    )
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    starts = range(0, STEPS, 40)
    rows = [
        (
            name,
            *(f"{mean(values[start : start + MEAN_OF]):.3f}" for start in starts),
            f"{mean(values[-40:]):.3f}",
        )
        for name, values in found.items()
    ]
    print(markdown(("", *map(str, starts), "last 40"), rows))
    print(", ".join(f"{name} {values[-1]:.4f}" for name, values in bigrams.items()))


if __name__ == "__main__":
    main()
