"""Canonical arithmetic: a generation on one layout and the trainer's scores of the whole sequences on another, in other batches, are the
same bits, for every token of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from plait.errors import InputError
from plait.inference.canonical import call
from tests.parity.canonical_pairs import LAYOUTS, PAIRS, built, check, engine_of, generated, scored, sequences_of
from tests.parity.layouts import TWO
from tests.pool import Pool


def test_a_sample(pool: Pool) -> None:
    check(pool, "llama", torch.float32, "tp 2", [("one process", 3), ("ZeRO 3 x 2", 2), ("pp 2", 5)], count=7, max_new_tokens=6)
    # Its layers are `addmm`, of weights that are gathered for the call.
    check(pool, "gpt2, tied", torch.float32, "ZeRO 3 x 2", [("pp 2", 3)], count=7, max_new_tokens=6)


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
        sequences = sequences_of(pool.run(world, generated, kind, config, torch.float32, built, asked, False))
        other, size = others[0]
        world, config = LAYOUTS[other]
        in_order = sorted(sequence for sequence, _ in sequences.values())
        found = {
            key: row
            for rank in pool.run(world, scored, kind, config, torch.float32, built, in_order, size, False)
            for key, row in rank.items()
        }
        largest = divergence = 0.0
        for prompt, (sequence, logprobs) in sequences.items():
            away = (logprobs - found[sequence][len(prompt) - 1 :]).double()
            largest = max(largest, float(away.abs().max()))
            divergence = max(divergence, float((logprobs.double().exp() * away).sum(-1).max()))
        record_property(f"{one} to {other}", f"{largest:.1e}, KL {divergence:.1e}")
        print(f"{kind}: {one} to {other}: log-probabilities differ by {largest:.1e}, KL {divergence:.1e}", flush=True)
        assert 0 < largest <= 1e-5 and divergence <= 1e-6
