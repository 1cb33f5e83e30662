"""Canonical arithmetic: a generation on one layout and the trainer's scores of the whole sequences on another, in other batches, are the
same bits, for every token of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.errors import InputError
from plait.inference.canonical import call
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
SECONDS = 900
"""For one call of all ranks."""
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


def engine_of(kind: str, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """An engine with the model on a layout."""
    return plait.initialize(built(kind, dtype), {"train_micro_batch_size_per_gpu": 2, **config}, loss_fn=plait.causal_lm_loss)


def generated(
    rank: int, world: int, kind: str, config: dict[str, Any], dtype: torch.dtype, asked: dict[str, Any], canonical: bool
) -> list[Any]:
    """This rank's generations, and, of the rank that chooses, their log-probabilities. Runs in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        seen = SeenLogits(patch)
        engine = engine_of(kind, config, dtype)
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
    sequences: list[tuple[int, ...]],
    size: int,
    canonical: bool,
) -> dict[tuple[int, ...], torch.Tensor]:
    """Log-probabilities of this rank's sequences. Runs in a worker."""
    engine = engine_of(kind, config, dtype)
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


def check(pool: Pool, kind: str, dtype: torch.dtype, one: str, others: list[tuple[str, int]], **asked: Any) -> int:
    """Generate on `one` and score on `others` (layout, batch size); the number of tokens."""
    world, config = LAYOUTS[one]
    sequences = sequences_of(pool.run(world, generated, kind, config, dtype, asked, True, timeout=SECONDS))
    assert len(sequences) == asked["count"]
    in_order = sorted(sequence for sequence, _ in sequences.values())
    total = 0
    for other, size in others:
        world, config = LAYOUTS[other]
        tokens, different = mismatches(sequences, pool.run(world, scored, kind, config, dtype, in_order, size, True, timeout=SECONDS))
        assert different == 0, (kind, dtype, one, other, f"{different} of {tokens} x vocabulary")
        total += tokens
    return total


def test_a_sample(pool: Pool) -> None:
    check(pool, "llama", torch.float32, "tp 2", [("one process", 3), ("ZeRO 3 x 2", 2), ("pp 2", 5)], count=7, max_new_tokens=6)


def refused(rank: int, world: int) -> list[str]:
    """What both ranks hear of what one of them finds. Runs in a worker."""
    engine = engine_of("llama", TWO["pp"], torch.float32)
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(call, "self_test", lambda dtype: b"other")
        with pytest.raises(InputError) as found:
            engine.score([[1, 2, 3]], canonical=True)
        heard.append(str(found.value))
    if rank == 0:  # the first stage, for which the second one waits
        engine.module.model.layers[0].mlp.register_forward_hook(lambda *args: args[-1].cumsum(-1))
    for ask in (engine.score, engine.generate):
        with pytest.raises(InputError) as found:
            ask([[1, 2, 3]], canonical=True)
        heard.append(str(found.value))
    engine.close()
    return heard


def test_all_ranks_hear_what_one_finds(pool: Pool) -> None:
    one, other = pool.run(2, refused)
    assert one == other
    assert "ranks 0 and 1 computed different bits" in one[0] and all("aten.cumsum.default" in heard for heard in one[1:])


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "llama, tied", "gpt2, tied", "mistral", "qwen3"])
def test_every_layout(pool: Pool, kind: str, dtype: torch.dtype) -> None:
    for one in ("tp 2", "tp 2 x pp 2"):
        check(pool, kind, dtype, one, [(other, 3) for other in LAYOUTS], count=9, max_new_tokens=8)


PAIRS: dict[str, list[tuple[str, int]]] = {
    "ZeRO 3 x 2": [("tp 2", 7), ("pp 2", 40), ("tp 4", 16), ("one process", 11)],
    "tp 2": [("ZeRO 1 x 2", 16), ("ZeRO 3 x 2", 5), ("tp 2 x pp 2", 30), ("tp 2", 13)],
    "tp 4": [("ZeRO 2 x 2", 9), ("sequence parallel", 24), ("pp 2 x ZeRO 3", 15), ("one process", 40)],
    "pp 2": [("ZeRO 3 x 2", 20), ("tp 2", 17), ("tp 2 x ZeRO 3", 8), ("pp 2", 25)],
    "sequence parallel": [("one process", 19), ("tp 4", 33), ("ZeRO 3 x 2", 12), ("pp 2", 6)],
    "tp 2 x pp 2": [("tp 2 x ZeRO 3", 10), ("ZeRO 1 x 2", 40), ("tp 4", 14), ("pp 2 x ZeRO 3", 22)],
}
"""Layout of the generation to those of the scores, with batch sizes."""


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("one", list(PAIRS))
@pytest.mark.parametrize("kind", ["llama, large", "gpt2, large, tied"])
def test_a_hundred_thousand_tokens(pool: Pool, kind: str, one: str, record_property: pytest.RecordProperty) -> None:
    """That many of each kind are generated, and each is scored on four layouts."""
    requests, new = 280, 60
    assert len(PAIRS) * requests * new >= 100_000 and sum(map(len, PAIRS.values())) >= 20
    compared = check(pool, kind, torch.float32, one, PAIRS[one], count=requests, max_new_tokens=new)
    record_property("tokens compared", compared)
    print(f"{kind}: {one} to {', '.join(other for other, _ in PAIRS[one])}: {compared:,} tokens, 0 mismatches", flush=True)


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["llama, large", "gpt2, large, tied"])
def test_without_it(pool: Pool, kind: str, record_property: pytest.RecordProperty) -> None:
    """In float32 ordinary kernels stay within 1e-5; the KL divergence is that of the scores from the generator's distributions."""
    for one, others in PAIRS.items():
        world, config = LAYOUTS[one]
        asked = {"count": 24, "max_new_tokens": 100}
        sequences = sequences_of(pool.run(world, generated, kind, config, torch.float32, asked, False))
        other, size = others[0]
        world, config = LAYOUTS[other]
        in_order = sorted(sequence for sequence, _ in sequences.values())
        found = {
            key: row for rank in pool.run(world, scored, kind, config, torch.float32, in_order, size, False) for key, row in rank.items()
        }
        largest = divergence = 0.0
        for prompt, (sequence, logprobs) in sequences.items():
            away = (logprobs - found[sequence][len(prompt) - 1 :]).double()
            largest = max(largest, float(away.abs().max()))
            divergence = max(divergence, float((logprobs.double().exp() * away).sum(-1).max()))
        record_property(f"{one} to {other}", f"{largest:.1e}, KL {divergence:.1e}")
        print(f"{kind}: {one} to {other}: log-probabilities differ by {largest:.1e}, KL {divergence:.1e}", flush=True)
        assert 0 < largest <= 1e-5 and divergence <= 1e-6
