"""Workload of every engine: a Llama of Transformers, its weights, batches and optimizer.

Tokens follow a noisy successor rule that a model learns. With random tokens the loss would stay at
ln(vocabulary) even if nothing is updated, and a comparison of losses would prove nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALPHABET = 128
"""Number of different tokens that occur. The loss soon falls below ln(128) = 4.9."""
NOISE = 16
"""Number of equally likely successors of a token. The loss cannot fall below ln(16) = 2.8."""


@dataclass(frozen=True)
class Workload:
    """Sizes and hyperparameters."""

    layers: int = 6
    hidden: int = 512
    intermediate: int = 1408
    heads: int = 8
    vocabulary: int = 5120
    sequence: int = 256
    micro_batch: int = 2
    micro_batches: int = 1
    ranks: int = 2
    ranks_per_slice: int = 1
    """Number of consecutive ranks that work on the same samples (model parallelism)."""
    threads: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0

    @property
    def samples(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one optimizer step over all ranks."""
        return self.samples * (self.sequence - 1) * self.ranks // self.ranks_per_slice

    @property
    def parameters(self) -> int:
        """Number of parameters: attention, gated MLP, norms, embedding and output head (untied)."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def first_stage(self) -> int:
        """Number of blocks in the first of two pipeline stages."""
        return (self.layers + 1) // 2


def build_model(workload: Workload) -> nn.Module:
    """Return a float32 model on the CPU in training mode, with equal weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(workload.seed)
    config = LlamaConfig(
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads,
        vocab_size=workload.vocabulary,
        max_position_embeddings=workload.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def batch(workload: Workload, *, step: int, rank: int) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` [samples, sequence] of one rank at one step."""
    data_rank = rank // workload.ranks_per_slice
    seed = (workload.seed * 1_000_003 + step) * 1_009 + data_rank
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.samples, workload.sequence)
    noise = torch.randint(NOISE, shape, generator=generator)
    ids = torch.empty(shape, dtype=torch.long)
    ids[:, 0] = torch.randint(ALPHABET, shape[:1], generator=generator)
    for position in range(1, workload.sequence):
        ids[:, position] = (ids[:, position - 1] * 31 + 7 + noise[:, position]) % ALPHABET
    return {"input_ids": ids, "labels": ids.clone()}


def optimizer_arguments(workload: Workload) -> dict[str, Any]:
    """Return the hyperparameters of AdamW, as torch and the JSON file name them."""
    return {
        "lr": workload.learning_rate,
        "betas": list(workload.betas),
        "eps": workload.eps,
        "weight_decay": workload.weight_decay,
    }


def configuration(workload: Workload, *, stage: int = 0) -> dict[str, Any]:
    """Return the JSON file that DeepSpeed and Plait read. Other keys have their defaults."""
    return {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.micro_batches,
        "gradient_clipping": workload.clip,
        "optimizer": {"type": "AdamW", "params": optimizer_arguments(workload)},
        "zero_optimization": {"stage": stage},
    }
