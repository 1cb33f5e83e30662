"""Which token is chosen, and that every rank does the same number of forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config.schema.sections import SampleSection
from plait.train.sample import chosen, sample

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def _draws(section: SampleSection, *, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return [int(chosen(LOGITS, section, random)) for _ in range(4000)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(_draws(SampleSection(temperature=0))) == {1}


def test_draws_follow_the_distribution() -> None:
    drawn = torch.bincount(torch.tensor(_draws(SampleSection(temperature=2.0, top_k=0)))) / 4000
    torch.testing.assert_close(drawn, torch.softmax(LOGITS / 2.0, dim=0), atol=0.03, rtol=0)


def test_only_the_likeliest_are_drawn() -> None:
    assert set(_draws(SampleSection(temperature=5.0, top_k=2))) == {1, 3}


def test_a_seed_repeats() -> None:
    assert _draws(SampleSection(), seed=1) == _draws(SampleSection(), seed=1) != _draws(SampleSection(), seed=2)


class Counting:
    """Predicts the number after the last token, modulo 300, and counts its calls."""

    def __init__(self, rows: int) -> None:
        self.rows, self.calls = rows, 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = torch.zeros(self.rows)
        logits[(int(tokens[0, -1]) + 1) % 300] = 10.0
        logits[300:] = 99.0  # rows that pad the embedding have no token
        return logits


def test_the_text_goes_on_from_the_prompt(tokenizer: Any) -> None:
    section = SampleSection(prompt="a", tokens=5, temperature=0)
    first = tokenizer("a")["input_ids"][0]
    model = Counting(rows=320)
    text = sample(model, tokenizer, section, seed=0, device=torch.device("cpu"))
    assert text == tokenizer.decode([first + n for n in range(6)])
    assert model.calls == 5


def test_a_text_that_ends_early_costs_every_rank_the_same(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == 0
    section = SampleSection(prompt=tokenizer.decode([298]), tokens=9, temperature=0)
    if tokenizer(section.prompt)["input_ids"] != [298]:
        pytest.skip("the token 298 of this tokenizer is not a text of its own")
    model = Counting(rows=300)
    assert sample(model, tokenizer, section, seed=0, device=torch.device("cpu")) == tokenizer.decode([298, 299])
    assert model.calls == 9
