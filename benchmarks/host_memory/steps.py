"""Training steps at ZeRO 2 on two ranks; rank 0 prints the process's seconds, the kernel's seconds and the page faults per step."""

from __future__ import annotations

import json
import resource
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import plait

SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
UNCOUNTED, COUNTED = 3, 9


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 8000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256))
    engine = plait.initialize(model, SETTINGS, loss_fn=plait.causal_lm_loss)
    ids = torch.randint(0, 8000, (4, 128))
    found = []
    for _ in range(UNCOUNTED + COUNTED):
        before = resource.getrusage(resource.RUSAGE_SELF)
        engine.train_batch({"input_ids": ids, "labels": ids})
        after = resource.getrusage(resource.RUSAGE_SELF)
        system = after.ru_stime - before.ru_stime
        found.append(
            (after.ru_utime - before.ru_utime + system, system, after.ru_minflt - before.ru_minflt)
        )
    seconds, system, faults = (median(column) for column in zip(*found[UNCOUNTED:], strict=True))
    if engine.rank == 0:
        print(json.dumps({"seconds": seconds, "system_seconds": system, "page_faults": faults}))
    engine.close()


if __name__ == "__main__":
    main()
