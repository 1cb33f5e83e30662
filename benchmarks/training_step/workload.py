"""What every baseline trains: a Llama from Transformers, its initial weights, its batches, its optimizer and its clipping.

A baseline gets all of it from here, so that two baselines can differ only in how the work is distributed. The text is a noisy
successor rule that a model really learns: with random tokens the loss would stay at ln(vocabulary) even where nothing is updated, and
comparing losses would prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALPHABET = 128
"""Only so many tokens occur, so that a few steps teach the model something: the loss soon leaves ln(vocabulary) for ln(128) = 4.9."""
NOISE = 16
"""A token has this many equally likely successors, so the loss goes on falling towards ln(16) = 2.8 and no further."""


@dataclass(frozen=True)
class Workload:
    """Sizes and hyperparameters of the run."""

    layers: int = 6
    hidden: int = 512
    intermediate: int = 1408
    heads: int = 8
    vocabulary: int = 5120
    sequence: int = 256
    micro_batch: int = 2
    ranks: int = 2
    threads: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one optimizer step over all ranks."""
        return self.micro_batch * (self.sequence - 1) * self.ranks

    @property
    def parameters(self) -> int:
        """Number of parameters: attention, gated MLP, norms, embedding and output head (untied)."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden


def model_config(workload: Workload) -> dict[str, Any]:
    """The keyword arguments of `transformers.LlamaConfig`."""
    return {
        "hidden_size": workload.hidden,
        "intermediate_size": workload.intermediate,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.heads,
        "num_key_value_heads": workload.heads,
        "vocab_size": workload.vocabulary,
        "max_position_embeddings": workload.sequence,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def build_model(workload: Workload) -> nn.Module:
    """A float32 model on the CPU in train mode. The same seed gives the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(workload.seed)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**model_config(workload)))
    return model.train()


def batch(workload: Workload, *, step: int, rank: int) -> dict[str, Tensor]:
    """`input_ids` and `labels` [micro_batch, sequence] of one rank at one step: a function of (seed, step, rank) and of nothing else."""
    generator = torch.Generator().manual_seed((workload.seed * 1_000_003 + step) * 1_009 + rank)
    shape = (workload.micro_batch, workload.sequence)
    noise = torch.randint(NOISE, shape, generator=generator)
    ids = torch.empty(shape, dtype=torch.long)
    ids[:, 0] = torch.randint(ALPHABET, shape[:1], generator=generator)
    for position in range(1, workload.sequence):
        ids[:, position] = (ids[:, position - 1] * 31 + 7 + noise[:, position]) % ALPHABET
    return {"input_ids": ids, "labels": ids.clone()}


def adamw_arguments(workload: Workload) -> dict[str, Any]:
    """The keyword arguments of `torch.optim.AdamW`, with the fused kernel."""
    return {
        "lr": workload.learning_rate,
        "betas": workload.betas,
        "eps": workload.eps,
        "weight_decay": workload.weight_decay,
        "fused": True,
    }
