"""Draw docs/figures/zero_memory.svg: model states per rank of Llama-3.1-8B for every ZeRO stage and 1 to 1,024 ranks, from the ledger.

The ledger's figures are the ones that tests/fake/test_bytes.py measures. Run: python tools/plot_zero_memory.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

mpl.use("svg")
import matplotlib.pyplot as plt

from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.sizes import GIB

RANKS = 2 ** np.arange(11)
KINDS = {
    "parameters": ("parameters (float32 master weights)", "tab:blue", "-"),
    "gradients": ("gradients at the optimizer step (float32)", "tab:green", "--"),
    "optimizer": ("AdamW states", "tab:red", "-"),
    "gathered_parameters": ("between micro-batches: bfloat16 copy", "tab:orange", "-"),
    "unsharded_gradients": ("between micro-batches: unsharded gradients", "tab:purple", ":"),
}


def llama_8b() -> ModelFacts:
    """Shapes only: the model is built on meta."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model_facts(model, find_blocks(model))


def main() -> None:
    """Draw the figure."""
    facts = llama_8b()
    mpl.rcParams["svg.hashsalt"] = "plait"  # the same file from the same figures
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.2), sharex=True, sharey=True)
    for stage, axis in enumerate(axes):
        shard = RANKS if stage else np.ones_like(RANKS)
        start = Ledger.start(dp_replicate=RANKS // shard, dp_shard=shard, accumulation=2)
        ledger = account_all(
            (Precision(compute="bfloat16"), DataParallel.sweep(stage=np.full_like(RANKS, stage))),
            start,
            facts,
        )
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
    figure.suptitle(
        f"Model states per rank, Llama-3.1-8B ({facts.numel / 1e9:.2f} B parameters), bfloat16 compute, float32 master weights"
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    target = Path(__file__).parent.parent / "docs" / "figures" / "zero_memory.svg"
    figure.savefig(target, metadata={"Date": None})
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
