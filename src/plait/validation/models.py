"""Models, batches and configurations that the checks share.

Models are built from configurations, so nothing needs a network. On a GPU they are built on the
device itself: drawing the weights of a model of 2 B parameters on the host takes half a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plait.config.resolving.resolve import Resolved, load, resolve
from plait.verify.model_under_test import transformers_model

OPTIMIZER: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-4}}


@dataclass(frozen=True)
class Workload:
    """A Llama and the batch of a rank's step."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    length: int
    samples: int = 1
    """Sequences of a micro-batch."""
    accumulation: int = 1
    """Micro-batches of a step."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a rank's step."""
        return self.length * self.samples * self.accumulation

    @property
    def layer_parameters(self) -> int:
        """Parameters of the products of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """All parameters of products, and the embedding."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden

    @property
    def layer_flops(self) -> float:
        """Model FLOPs of one layer in a step: products, and causal attention counted by half."""
        products = 6.0 * self.layer_parameters * self.tokens
        attention = 6.0 * self.heads * self.head_dim * self.length * self.tokens
        return products + attention

    @property
    def flops(self) -> float:
        """Model FLOPs of a rank's step, without recomputation."""
        return self.layers * self.layer_flops + 6.0 * self.vocabulary * self.hidden * self.tokens

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the Transformers configuration."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }

    def with_layers(self, layers: int) -> Workload:
        """Return the same workload with another number of layers."""
        return replace(self, layers=layers)

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes for the document."""
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**sizes, "parameters": self.parameters, "flops": self.flops}


WIDE = Workload(4096, 14336, 32, 8, 128256, layers=8, length=8192)
"""Width of Llama-3-8B."""
MEDIUM = Workload(2048, 5632, 16, 16, 32000, layers=12, length=2048)
STRUCTURE = Workload(512, 1408, 8, 4, 8192, layers=4, length=512, samples=2)
"""Workload of checks that do not measure time."""
TINY = Workload(64, 128, 4, 2, 256, layers=2, length=32)
"""Workload on a simulated device and on a CPU."""


def on_device(
    workload: Workload, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a Transformers Llama with weights that are drawn on `device`."""
    torch.manual_seed(0)
    return transformers_model(workload.fields, dtype=dtype, device=str(device)).train()


def on_meta(workload: Workload) -> nn.Module:
    """Return a Transformers Llama without weights."""
    return transformers_model(workload.fields, dtype=torch.float32).train()


def step_settings(config: Mapping[str, Any], workload: Workload, *, world: int) -> Resolved:
    """Return `config` with the batch, the optimizer and the clipping of these checks."""
    tree = {
        "train_micro_batch_size_per_gpu": workload.samples,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": dict(OPTIMIZER),
        **config,
    }
    return resolve(load(tree), world_size=world)


def random_batch(workload: Workload, device: torch.device, *, seed: int) -> dict[str, torch.Tensor]:
    """Return a rank's batch: `input_ids` and `labels` [samples x accumulation, length] int64."""
    shape = (workload.samples * workload.accumulation, workload.length)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, workload.vocabulary, shape, generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}
