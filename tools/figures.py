"""Draw the figures of docs/figures.

python -m tools.figures zero_memory         model states per rank for every ZeRO stage
python -m tools.figures compression_loss    losses through compressed gradients; minutes
"""

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

mpl.use("svg")
import matplotlib.pyplot as plt

from benchmarks.common.report import markdown

FIGURES = Path(__file__).parents[1] / "docs" / "figures"

RANKS = 2 ** np.arange(11)
KINDS = {
    "parameters": ("parameters (float32 master weights)", "tab:blue", "-"),
    "gradients": ("gradients at the optimizer step (float32)", "tab:green", "--"),
    "optimizer": ("AdamW states", "tab:red", "-"),
    "gathered_parameters": ("between micro-batches: bfloat16 copy", "tab:orange", "-"),
    "unsharded_gradients": ("between micro-batches: unsharded gradients", "tab:purple", ":"),
}

STEPS, MEAN_OF, BIGRAM_STEPS = 240, 20, 150
INT8 = {"compress_gradients": "int8"}
BOTH_INT8 = {**INT8, "compress_weights": "int8"}
INT4 = {"compress_gradients": "int4"}
# Name, ZeRO stage, section `parallel`, color, and whether the table of bigrams is trained, too.
RUNS: tuple[tuple[str, int, dict[str, Any], str, bool], ...] = (
    ("uncompressed", 0, {}, "black", True),
    ("int8, stage 0", 0, INT8, "tab:blue", True),
    ("int8 gradients and weights, stage 2", 2, BOTH_INT8, "tab:cyan", False),
    ("int4 with error feedback, stage 0", 0, {**INT4, "error_feedback": True}, "tab:green", True),
    ("int4 without, stage 0", 0, {**INT4, "error_feedback": False}, "tab:red", True),
    ("PowerSGD, rank 4", 0, {"compress_gradients": "powersgd"}, "tab:orange", False),
)


def zero_memory() -> Any:
    """Draw the ledger's bytes of Llama-3.1-8B on 1 to 1,024 ranks.

    tests/fake/test_bytes.py measures that the ledger is right.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    from plait.model.blocks import find_blocks
    from plait.model.facts import model_facts
    from plait.parallel.accounting.ledger import Ledger
    from plait.parallel.order import account_all
    from plait.parallel.techniques.data_parallel import DataParallel
    from plait.parallel.techniques.mixed_precision import Precision
    from plait.sizes import GIB

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    facts = model_facts(model, find_blocks(model))
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.2), sharex=True, sharey=True)
    for stage, axis in enumerate(axes):
        shard = np.where(stage > 0, RANKS, 1)
        start = Ledger.start(dp_replicate=RANKS // shard, dp_shard=shard, accumulation=2)
        sweep = DataParallel.sweep(stage=np.full_like(RANKS, stage))
        ledger = account_all((Precision(compute="bfloat16"), sweep), start, facts)
        for kind, (label, color, style) in KINDS.items():
            values = ledger.memory[kind] / GIB
            if values.any():
                axis.plot(RANKS, values, style, color=color, marker="o", markersize=3, label=label)
        axis.set(title=f"ZeRO stage {stage}", yscale="log", xlabel="ranks")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GiB per rank")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
    title = f"Model states per rank, Llama-3.1-8B ({facts.numel / 1e9:.2f} B parameters)"
    figure.suptitle(f"{title}, bfloat16 compute, float32 master weights")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def compression_loss() -> Any:
    """Train the models of tests/parity/test_convergence.py on two ranks, and print the losses."""
    from tests.parity.language import bigram_losses, losses
    from tests.pool import Pool

    pool = Pool()
    trained, bigrams = {}, {}
    try:
        for name, stage, parallel, _, both in RUNS:
            trained[name] = pool.run(2, losses, parallel, stage, STEPS)[0]
            if both:
                bigrams[name] = pool.run(2, bigram_losses, parallel, BIGRAM_STEPS)[0]
    finally:
        pool.close()

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, *_, color, _ in RUNS:
        values = trained[name]
        smooth = [mean(values[start : start + MEAN_OF]) for start in range(STEPS - MEAN_OF + 1)]
        left.plot(smooth, color=color, label=name, linewidth=1.2)
        if name in bigrams:
            right.plot(bigrams[name], color=color, label=name, linewidth=1.2)
    last = bigrams["uncompressed"][-1]
    label = f"loss, mean of {MEAN_OF} steps"
    left.set(title="Llama of 0.15 M parameters, AdamW", xlabel="step", ylabel=label, ylim=(1.9, 4))
    title = "a table of bigrams, gradient descent, nothing random"
    right.set(title=title, xlabel="step", ylabel="loss", ylim=(last - 0.02, last + 0.3))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()

    starts = range(0, STEPS, 40)
    rows = []
    for name, values in trained.items():
        means = [mean(values[start : start + MEAN_OF]) for start in starts]
        rows.append([name, *(f"{value:.3f}" for value in [*means, mean(values[-40:])])])
    print(markdown(("", *map(str, starts), "last 40"), rows))
    print(", ".join(f"{name} {values[-1]:.4f}" for name, values in bigrams.items()))
    return figure


def main(name: str) -> None:
    mpl.rcParams["svg.hashsalt"] = "plait"  # the same file from the same numbers
    figure = {"zero_memory": zero_memory, "compression_loss": compression_loss}[name]()
    target = FIGURES / f"{name}.svg"
    figure.savefig(target, metadata={"Date": None})
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1])
