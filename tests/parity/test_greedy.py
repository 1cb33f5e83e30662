"""128 greedy tokens in float32 on a layout equal those of Transformers, and logits within 1e-5."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from plait.inference.decode import TokenSampler
from tests.parity import generation
from tests.parity.layouts import FOUR, OFF, TWO

NEW_TOKENS = 128
TOLERANCE = 1e-5
PROMPTS = [
    [5, 17, 33, 2, 90, 41, 7, 11, 64],
    [8, 3],
    [71, 12, 12, 12, 99],
    [55],
    [4, 9, 16, 25, 36, 49, 64, 81, 100, 21, 44, 69],
]
KINDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("llama", False, {"num_key_value_heads": 4}),
    "llama, grouped heads": ("llama", False, {"num_key_value_heads": 2}),
    "llama, tied": ("llama", True, {}),
    "gpt2": ("gpt2", True, {"n_positions": 256}),
    "mistral, sliding window": ("mistral", False, {"sliding_window": 16}),
    "gemma2": ("gemma2", True, {"sliding_window": 16}),
}
"""Model type, whether its embeddings are tied, and fields of its configuration."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 3 x 2": (2, TWO["ZeRO 3"]),
    "ZeRO 3 x 4": (4, TWO["ZeRO 3"]),
    "tp 2": (2, TWO["tp"]),
    "tp 4": (4, {"parallel": {"tp": 4, **OFF}}),
    "pp 2": (2, TWO["pp"]),
    "tp 2 x pp 2": (4, FOUR["tp x pp"]),
}


def build(kind):
    model_type, tied, fields = KINDS[kind]
    return generation.built(model_type, tied=tied, initializer_range=0.1, **fields).float()


@cache
def by_transformers(kind, count):
    """Return new tokens of PROMPTS and their logits [prompts, new tokens, vocabulary]."""
    settings = {"output_logits": True, "return_dict_in_generate": True}
    output = generation.by_transformers(build(kind).eval(), count, prompts=PROMPTS, **settings)
    return output.sequences[:, -count:].tolist(), torch.stack(output.logits, dim=1)


def generate_with_logits(rank, world, kind, config, count, cache_settings):
    """Return results and logits for each value of `use_cache`. Runs on every rank.

    The logits are None on ranks that choose no tokens.
    """
    logits: list[torch.Tensor] = []
    choose = TokenSampler.__call__

    def record(sampler, step_logits, rows):
        logits.append(step_logits.clone())
        return choose(sampler, step_logits, rows)

    results = []
    with pytest.MonkeyPatch.context() as patch:
        # No public call returns the logits that tokens are chosen from.
        patch.setattr(TokenSampler, "__call__", record)
        engine = generation.engine_on(config, build(kind))
        try:
            prompts = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
            for use_cache in cache_settings:
                logits.clear()
                generations = engine.generate(prompts, max_new_tokens=count, use_cache=use_cache)
                results.append((generations, torch.stack(logits, dim=1) if logits else None))
        finally:
            engine.close()
    return results


def largest_difference(pool, kind, layout, *, count=NEW_TOKENS, cache_settings=(True, False)):
    """Compare tokens and logits with Transformers, and return the largest difference."""
    tokens, logits = by_transformers(kind, count)
    world, config = LAYOUTS[layout]
    differences = []
    for results in pool.run(world, generate_with_logits, kind, config, count, cache_settings):
        for generations, chosen_from in results:
            places = [PROMPTS.index(result.prompt_ids) for result in generations]
            for place, result in zip(places, generations, strict=True):
                assert result.token_ids == tokens[place], (kind, layout, place)
                chosen = torch.tensor(tokens[place]).unsqueeze(1)
                logprobs = logits[place].log_softmax(-1).gather(1, chosen)[:, 0]
                differences.append(float((torch.tensor(result.logprobs) - logprobs).abs().max()))
            assert places or chosen_from is None, "a rank without prompts has no logits"
            if chosen_from is not None:
                differences.append(float((chosen_from - logits[places]).abs().max()))
    # At least one logit, and one log probability of each request.
    assert len(differences) >= len(cache_settings) * (1 + len(PROMPTS))
    assert max(differences) <= TOLERANCE, (kind, layout, max(differences))
    return max(differences)


def test_a_sample(pool):
    largest_difference(pool, "llama, grouped heads", "tp 2", count=24, cache_settings=(True,))


@pytest.mark.proof
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_on_every_layout(pool, kind, record_property):
    for layout in LAYOUTS:
        difference = largest_difference(pool, kind, layout)
        record_property(layout, difference)
        print(f"{kind:24} {layout:12} {difference:.1e}")
