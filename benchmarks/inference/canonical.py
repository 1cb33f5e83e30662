"""What canonical arithmetic costs: generations and scores with it and without, in turn, in time of one core; float32 and bfloat16.

    python -m benchmarks.inference.canonical        some minutes

Also printed: how far log-probabilities of the generator and the trainer are from each other without it, and that none differs with it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import plait
from benchmarks.common.machine import facts
from plait.inference.requests import Generation

RESULT = Path(__file__).parents[2] / "benchmarks/results/canonical.json"
ROUNDS, REQUESTS, PROMPT, NEW = 2, 8, 32, 24
SIZES: dict[str, dict[str, int]] = {
    "0.9 M parameters": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "45 M parameters": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12},
}


def engine_of(size: str, dtype: torch.dtype) -> Any:
    """Of random weights, in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_key_value_heads=4, eos_token_id=None, **SIZES[size])).to(dtype)
    return plait.initialize(model, {"train_micro_batch_size_per_gpu": 1}, loss_fn=plait.causal_lm_loss)


def measured(size: str, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds and ratios of one model."""
    engine = engine_of(size, dtype)
    prompts = torch.randint(0, 1024, (REQUESTS, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    times: dict[tuple[str, bool], list[float]] = {(what, canonical): [] for what in ("generate", "score") for canonical in (False, True)}
    made: dict[bool, list[Generation]] = {}
    scores: dict[bool, list[torch.Tensor]] = {}
    for turn in range(ROUNDS + 1):
        for canonical in (False, True):
            began = time.process_time()
            made[canonical] = engine.generate(prompts, max_new_tokens=NEW, do_sample=True, top_k=0, seed=0, canonical=canonical)
            between = time.process_time()
            sequences = [one.prompt_ids + one.token_ids for one in made[canonical]]
            scores[canonical] = engine.score(sequences, batch_size=3, canonical=canonical)
            if turn:
                times["generate", canonical].append(between - began)
                times["score", canonical].append(time.process_time() - between)
    away = {
        canonical: torch.cat(
            [found[-NEW:].double() - torch.tensor(one.logprobs) for found, one in zip(scores[canonical], made[canonical], strict=True)]
        )
        for canonical in (False, True)
    }
    engine.close()
    seconds = {f"{what}{', canonical' if canonical else ''}": median(found) for (what, canonical), found in times.items()}
    return {
        "seconds": seconds,
        "slowdown": {what: round(seconds[f"{what}, canonical"] / seconds[what], 1) for what in ("generate", "score")},
        "default": {"largest": float(away[False].abs().max()), "tokens": away[False].numel(), "different": int((away[False] != 0).sum())},
        "canonical": {"tokens": away[True].numel(), "different": int((away[True] != 0).sum())},
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = {}
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{size}, {str(dtype).removeprefix('torch.')}"
            rows[name] = row = measured(size, dtype)
            print(f"{name:30} {row['slowdown']}  without it {row['default']}, with it {row['canonical']}", flush=True)
            assert not row["canonical"]["different"]
            RESULT.write_text(json.dumps({"machine": facts("torch", "transformers"), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
