"""128 greedy tokens in float32 on a layout: Transformers' tokens on one process and its logits within 1e-5, with and without a cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from plait.inference.decode import TokenSampler
from plait.inference.requests import Generation
from tests.parity import generation
from tests.parity.layouts import FOUR, OFF, TWO

NEW = 128
BAR = 1e-5
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
"""Type, whether its embeddings are tied, and what its configuration has besides."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 3 x 2": (2, TWO["ZeRO 3"]),
    "ZeRO 3 x 4": (4, TWO["ZeRO 3"]),
    "tp 2": (2, TWO["tp"]),
    "tp 4": (4, {"parallel": {"tp": 4, **OFF}}),
    "pp 2": (2, TWO["pp"]),
    "tp 2 x pp 2": (4, FOUR["tp x pp"]),
}


def built(kind):
    name, tied, more = KINDS[kind]
    return generation.built(name, tied=tied, initializer_range=0.1, **more).float()


@cache
def by_transformers(kind, new):
    """New tokens of PROMPTS and the logits [prompts, new tokens, vocabulary] that they were chosen from."""
    settings = {"output_logits": True, "return_dict_in_generate": True}
    made = generation.by_transformers(built(kind).eval(), new, prompts=PROMPTS, **settings)
    return made.sequences[:, -new:].tolist(), torch.stack(made.logits, dim=1)


class SeenLogits:
    """Keeps the logits that tokens are chosen from; on the rank that chooses."""

    def __init__(self, monkeypatch):
        self.logits: list[torch.Tensor] = []
        choose = TokenSampler.__call__

        def keep(chooser, logits, rows):
            self.logits.append(logits.clone())
            return choose(chooser, logits, rows)

        monkeypatch.setattr(TokenSampler, "__call__", keep)

    def take(self):
        """[requests, new tokens, vocabulary]; None on a rank that has none."""
        found, self.logits = self.logits, []
        return torch.stack(found, dim=1) if found else None


Found = list[tuple[list[Generation], torch.Tensor | None]]


def generated(rank, world, kind, config, new, recomputes):
    """What this rank's prompts became, with a cache and without, and their logits. Runs in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        seen = SeenLogits(patch)
        engine = generation.engine_on(config, built(kind))
        try:
            mine = PROMPTS[engine.sharded.mesh.dp_index :: engine.dp_size]
            ways = (True, False) if recomputes else (True,)
            return [
                (engine.generate(mine, max_new_tokens=new, use_cache=way), seen.take())
                for way in ways
            ]
        finally:
            engine.close()


def check(pool, kind, layout, *, new=NEW, recomputes=True):
    """Compare with Transformers; the largest difference of a logit."""
    tokens, logits = by_transformers(kind, new)
    world, config = LAYOUTS[layout]
    differences = []
    for found in pool.run(world, generated, kind, config, new, recomputes):
        for made, chosen_from in found:
            places = [PROMPTS.index(one.prompt_ids) for one in made]
            assert [one.token_ids for one in made] == [tokens[place] for place in places], (
                kind,
                layout,
            )
            assert places or chosen_from is None
            for one, place in zip(made, places, strict=True):
                of_tokens = torch.log_softmax(logits[place], -1).gather(
                    1, torch.tensor(tokens[place]).unsqueeze(1)
                )[:, 0]
                differences.append(float((torch.tensor(one.logprobs) - of_tokens).abs().max()))
            if chosen_from is not None:
                differences.append(float((chosen_from - logits[places]).abs().max()))
    # A logit of each way and a log probability of each request at least.
    assert len(differences) >= (1 + recomputes) * (1 + len(PROMPTS)) and max(differences) <= BAR, (
        kind,
        layout,
        max(differences),
    )
    return max(differences)


def test_a_sample(pool):
    check(pool, "llama, grouped heads", "tp 2", new=24, recomputes=False)


@pytest.mark.proof
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_on_every_layout(pool, kind, record_property):
    for layout in LAYOUTS:
        found = check(pool, kind, layout)
        record_property(layout, found)
        print(f"{kind:24} {layout:12} {found:.1e}")
