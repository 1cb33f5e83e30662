"""The text of a run's end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.config.schema.sections import SampleSection
from plait.engine.engine import Engine
from plait.train.session import sample


class Next(nn.Module):
    """Predicts the number after the last token, modulo 300."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(300, 320)
        table[torch.arange(300), (torch.arange(300) + 1) % 300] = 10.0
        table[:, 300:] = 99.0  # rows that pad the embedding have no token
        self.table = nn.Parameter(table)
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.shape[1])
        return self.table[input_ids]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = plait.initialize(Next(), {"train_micro_batch_size_per_gpu": 1})
    yield made
    made.close()


def test_the_text_goes_on_from_the_prompt(engine: Engine, tokenizer: Any) -> None:
    first = tokenizer("a")["input_ids"][0]
    text = sample(engine, tokenizer, SampleSection(prompt="a", tokens=5, temperature=0), seed=0)
    assert text == tokenizer.decode([first + n for n in range(6)])


def test_it_stops_at_the_end_of_the_text_and_of_the_positions(
    engine: Engine, tokenizer: Any
) -> None:
    (made,) = engine.generate(
        [[298]], max_new_tokens=9, eos_token_id=tokenizer.eos_token_id, tokenizer=tokenizer
    )
    assert (made.token_ids, made.finish_reason) == ([299, 0], "stop")
    model: Any = engine.model
    model.config, model.seen = (
        SimpleNamespace(max_position_embeddings=4, get_text_config=lambda **_: model.config),
        [],
    )
    sample(engine, tokenizer, SampleSection(prompt="a", tokens=50, temperature=0), seed=0)
    assert model.seen == [1, 2, 3]


def test_a_seed_repeats(engine: Engine, tokenizer: Any) -> None:
    section = SampleSection(prompt="a", tokens=9, temperature=60.0, top_k=0)
    texts = [sample(engine, tokenizer, section, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
