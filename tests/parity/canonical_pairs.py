"""Generations on one layout and scores of the same sequences on another, canonical, compared bit by bit. Imported by workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.inference.canonical.arithmetic import log_softmax
from plait.inference.requests import Generation
from tests.parity import cases
from tests.parity.layouts import FOUR, OFF, TWO
from tests.parity.seen_logits import SeenLogits
from tests.pool import Pool

ONE: dict[str, Any] = {}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, ONE),
    "ZeRO 1 x 2": (2, TWO["ZeRO 1"]),
    "ZeRO 2 x 2": (2, {"zero_optimization": {"stage": 2}}),
    "ZeRO 3 x 2": (2, TWO["ZeRO 3"]),
    "tp 2": (2, TWO["tp"]),
    "sequence parallel": (2, TWO["sequence parallel"]),
    "pp 2": (2, TWO["pp"]),
    "tp 4": (4, {"parallel": {"tp": 4, **OFF}}),
    "tp 2 x pp 2": (4, FOUR["tp x pp"]),
    "tp 2 x ZeRO 3": (4, {"parallel": {"tp": 2, **OFF}, "zero_optimization": {"stage": 3}}),
    "pp 2 x ZeRO 3": (4, FOUR["pp x ZeRO 3"]),
}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 204, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 96, "n_positions": 256},
}
PAIRS: dict[str, list[tuple[str, int]]] = {
    "ZeRO 3 x 2": [("tp 2", 7), ("pp 2", 40), ("tp 4", 16), ("one process", 11)],
    "tp 2": [("ZeRO 1 x 2", 16), ("ZeRO 3 x 2", 5), ("tp 2 x pp 2", 30), ("tp 2", 13)],
    "tp 4": [("ZeRO 2 x 2", 9), ("sequence parallel", 24), ("pp 2 x ZeRO 3", 15), ("one process", 40)],
    "pp 2": [("ZeRO 3 x 2", 20), ("tp 2", 17), ("tp 2 x ZeRO 3", 8), ("pp 2", 25)],
    "sequence parallel": [("one process", 19), ("tp 4", 33), ("ZeRO 3 x 2", 12), ("pp 2", 6)],
    "tp 2 x pp 2": [("tp 2 x ZeRO 3", 10), ("ZeRO 1 x 2", 40), ("tp 4", 14), ("pp 2 x ZeRO 3", 22)],
}
"""Layout of the generation to those of the scores, with batch sizes."""
SECONDS = 900
"""For one call of all ranks."""
Build = Callable[[str, torch.dtype], torch.nn.Module]
Sequences = dict[tuple[int, ...], tuple[tuple[int, ...], torch.Tensor]]
"""Prompt to (prompt and new tokens, log-probabilities [new tokens, vocabulary])."""


def built(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """With weights, the same on every rank, and without an end."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    name, *more = kind.split(", ")
    config = cases.transformers_config(name, tied="tied" in more, layers=3 if "large" in more else None)
    config.update({"eos_token_id": None, "initializer_range": 0.05 if "large" in more else 0.1, **(LARGE[name] if "large" in more else {})})
    return AutoModelForCausalLM.from_config(config).to(dtype)


def prompts(count: int) -> list[list[int]]:
    """Ragged ones, each another."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 14, (count,), generator=generator).tolist()
    return [torch.randint(0, cases.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def engine_of(kind: str, config: dict[str, Any], dtype: torch.dtype, build: Build = built) -> Any:
    """An engine with the model on a layout."""
    return plait.initialize(build(kind, dtype), {"train_micro_batch_size_per_gpu": 2, **config}, loss_fn=plait.causal_lm_loss)


def generated(
    rank: int, world: int, kind: str, config: dict[str, Any], dtype: torch.dtype, build: Build, asked: dict[str, Any], canonical: bool
) -> list[Any]:
    """This rank's generations, and, of the rank that chooses, their log-probabilities. Runs in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        seen = SeenLogits(patch)
        engine = engine_of(kind, config, dtype, build)
        try:
            asked = dict(asked)
            mine = prompts(asked.pop("count"))[engine.sharded.mesh.dp_index :: engine.dp_size]
            made: list[Generation] = engine.generate(mine, do_sample=True, top_k=0, seed=5, canonical=canonical, **asked)
            logits = seen.take()
            return [made, None if logits is None else log_softmax(logits) if canonical else torch.log_softmax(logits.float(), -1)]
        finally:
            engine.close()


def sequences_of(found: list[list[Any]]) -> Sequences:
    """Of all ranks."""
    sequences: Sequences = {}
    for made, logprobs in found:
        if logprobs is None:
            continue
        for one, row in zip(made, logprobs, strict=True):
            chosen = row.gather(1, torch.tensor(one.token_ids).unsqueeze(1))[:, 0].double().tolist()
            assert one.logprobs == chosen and one.finish_reason == "length"
            sequences[tuple(one.prompt_ids)] = ((*one.prompt_ids, *one.token_ids), row)
    return sequences


def scored(
    rank: int,
    world: int,
    kind: str,
    config: dict[str, Any],
    dtype: torch.dtype,
    build: Build,
    sequences: list[tuple[int, ...]],
    size: int,
    canonical: bool,
) -> dict[tuple[int, ...], torch.Tensor]:
    """Log-probabilities of this rank's sequences. Runs in a worker."""
    engine = engine_of(kind, config, dtype, build)
    try:
        mine = sequences[engine.sharded.mesh.dp_index :: engine.dp_size]
        found = engine.score([list(one) for one in mine], batch_size=size, canonical=canonical, vocabulary=True)
        return dict(zip(mine, found, strict=True))
    finally:
        engine.close()


def mismatches(sequences: Sequences, scores: list[dict[tuple[int, ...], torch.Tensor]]) -> tuple[int, int]:
    """(tokens, log-probabilities that differ in a bit)."""
    tokens = different = 0
    of_all = {sequence: found for one in scores for sequence, found in one.items()}
    for prompt, (sequence, logprobs) in sequences.items():
        found = of_all[sequence][len(prompt) - 1 :]
        assert found.dtype == logprobs.dtype and found.shape == logprobs.shape and bool(found.isfinite().all())
        integers = torch.int64 if found.dtype == torch.float64 else torch.int32
        tokens += len(found)
        different += int((found.view(integers) != logprobs.view(integers)).sum())
    return tokens, different


def check(pool: Pool, kind: str, dtype: torch.dtype, one: str, others: list[tuple[str, int]], *, build: Build = built, **asked: Any) -> int:
    """Generate on `one` and score on `others` (layout, batch size); the number of tokens."""
    world, config = LAYOUTS[one]
    sequences = sequences_of(pool.run(world, generated, kind, config, dtype, build, asked, True, timeout=SECONDS))
    assert len(sequences) == asked["count"]
    in_order = sorted(sequence for sequence, _ in sequences.values())
    total = 0
    for other, size in others:
        world, config = LAYOUTS[other]
        tokens, different = mismatches(
            sequences, pool.run(world, scored, kind, config, dtype, build, in_order, size, True, timeout=SECONDS)
        )
        assert different == 0, (kind, dtype, one, other, f"{different} of {tokens} x vocabulary")
        total += tokens
    return total
