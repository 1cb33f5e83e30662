"""Canonical arithmetic: a generation on one layout and the trainer's scores of the whole sequences on another, in other batches, are the
same bits, for every token of the vocabulary."""

from __future__ import annotations

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
Sequences = dict[tuple[int, ...], tuple[tuple[int, ...], torch.Tensor]]
"""Prompt to (prompt and new tokens, log-probabilities [new tokens, vocabulary])."""


def built(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> torch.nn.Module:
    """With weights, the same on every rank, and without an end."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    if kind == "plain":
        return cases.build("plain", tied=False, dtype=dtype, device="cpu")
    name, _, tied = kind.partition(", ")
    config = cases.transformers_config(name, tied=bool(tied))
    config.update({"eos_token_id": None, "initializer_range": 0.1, "attn_implementation": "sdpa", **more})
    return AutoModelForCausalLM.from_config(config).to(dtype)


def prompts(count: int) -> list[list[int]]:
    """Ragged ones."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(0, cases.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def engine_of(kind: str, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """An engine with the model on a layout."""
    return plait.initialize(built(kind, dtype), {"train_micro_batch_size_per_gpu": 2, **config}, loss_fn=plait.causal_lm_loss)


def generated(rank: int, world: int, kind: str, config: dict[str, Any], dtype: torch.dtype, asked: dict[str, Any]) -> list[Any]:
    """This rank's generations, and, of the rank that chooses, their log-probabilities. Runs in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        seen = SeenLogits(patch)
        engine = engine_of(kind, config, dtype)
        try:
            mine = prompts(asked.pop("count"))[engine.sharded.mesh.dp_index :: engine.dp_size]
            # Rows that end stay in the batch of one call.
            made: list[Generation] = engine.generate(mine, do_sample=True, temperature=1.0, top_k=0, seed=5, **asked)
            logits = seen.take()
            return [made, None if logits is None else log_softmax(logits)]
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
            assert one.logprobs == chosen
            sequences[tuple(one.prompt_ids)] = ((*one.prompt_ids, *one.token_ids), row)
    return sequences


def scored(
    rank: int,
    world: int,
    kind: str,
    config: dict[str, Any],
    dtype: torch.dtype,
    sequences: list[tuple[int, ...]],
    size: int,
) -> dict[tuple[int, ...], torch.Tensor]:
    """Log-probabilities of this rank's sequences. Runs in a worker."""
    engine = engine_of(kind, config, dtype)
    try:
        mine = sequences[engine.sharded.mesh.dp_index :: engine.dp_size]
        found = engine.score([list(one) for one in mine], batch_size=size, canonical=True, vocabulary=True)
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


def check(pool: Pool, kind: str, dtype: torch.dtype, one: str, others: list[tuple[str, int]], **asked: Any) -> int:
    """Generate on `one` and score on `others` (layout, batch size); the number of tokens."""
    world, config = LAYOUTS[one]
    sequences = sequences_of(pool.run(world, generated, kind, config, dtype, {"canonical": True, **asked}))
    assert len(sequences) == len({tuple(prompt) for prompt in prompts(asked["count"])})
    in_order = sorted(sequence for sequence, _ in sequences.values())
    total = 0
    for other, size in others:
        world, config = LAYOUTS[other]
        tokens, different = mismatches(sequences, pool.run(world, scored, kind, config, dtype, in_order, size))
        assert different == 0, (kind, dtype, one, other, f"{different} of {tokens} x vocabulary")
        total += tokens
    return total


def test_a_sample(pool: Pool) -> None:
    check(pool, "llama", torch.float32, "tp 2", [("one process", 3), ("ZeRO 3 x 2", 2), ("pp 2", 5)], count=7, max_new_tokens=6)


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "llama, tied", "gpt2, tied", "mistral", "qwen3"])
def test_every_layout(pool: Pool, kind: str, dtype: torch.dtype) -> None:
    others = [(other, size) for other in LAYOUTS for size in (3,)]
    for one in ("tp 2", "tp 2 x pp 2"):
        check(pool, kind, dtype, one, others, count=9, max_new_tokens=8)
