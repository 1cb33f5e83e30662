"""Prompts that are read in pieces get the tokens of prompts that are read whole, in memory and streamed."""

import pytest
import torch

from plait.errors import InputError
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.score import score
from plait.inference.source import open_source
from plait.inference.streamed_model import load_streamed
from plait.sharded.cache import requires_single_prefill
from tests.unit.inference.models import built, saved
from tests.unit.inference.words import Words

PROMPTS = [[5, 8, 2, 61, 7, 9, 33, 4, 71, 12, 90], [70, 7, 3]]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_pieces(kind, tmp_path):
    """Mistral and Gemma 2 with windows that are shorter than the prompt, and than a piece of it."""
    fields = {"sliding_window": 4} if kind in ("mistral", "gemma2") else {}
    model = saved(tmp_path / "model", kind, **fields)
    source = open_source(tmp_path / "model")
    kept = load_model(source)
    whole = generate(kept, PROMPTS, max_new_tokens=8, temperature=0)
    for pieces in (1, 3, 5, 100):
        found = generate(kept, PROMPTS, max_new_tokens=8, temperature=0, prefill_tokens=pieces)
        for one, other in zip(found, whole, strict=True):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(
                torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5
            )
    kept.close()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    streamed, _ = load_streamed(source, budget_bytes=total - 1, other_bytes=0)
    passes = []
    streamed.model.register_forward_pre_hook(lambda *_: passes.append(1))
    for pieces, expected in (
        (None, 2),
        (4, 4),
    ):  # the longest prompt has 11 tokens; and a pass for the second token
        passes.clear()
        found = generate(streamed, PROMPTS, max_new_tokens=2, temperature=0, prefill_tokens=pieces)
        assert [one.token_ids for one in found] == [one.token_ids[:2] for one in whole] and len(
            passes
        ) == expected
    streamed.close()


@pytest.mark.parametrize(
    ("kind", "is_decoder"), [("bert", False), ("rembert", False), ("bert", True)]
)
def test_a_model_that_attends_in_both_directions(kind, is_decoder, tmp_path):
    """Its prompts are read whole. GPT-NeoX is causal, whatever `is_decoder` says."""
    saved(tmp_path / "model", kind, layers=1, is_decoder=is_decoder, num_key_value_heads=4)
    kept = load_model(open_source(tmp_path / "model"))
    expected, passes = generate(kept, PROMPTS, max_new_tokens=1, temperature=0), list[int]()
    kept.model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = generate(kept, PROMPTS, max_new_tokens=1, temperature=0, prefill_tokens=4)
    assert len(passes) == (3 if is_decoder else 1)
    assert not requires_single_prefill(built("gpt_neox", is_decoder=False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5
        )
    kept.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefill_tokens": 0}, "prefill_tokens = 0 must be a whole number of at least 1"),
        ({"batch_size": 1.5}, "batch_size = 1.5 must be a whole number of at least 1"),
        ({"batch_size": "2"}, "batch_size = '2' must be"),
        ({"on_token": 5}, "on_token = 5 must be a function"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, words, tmp_path):
    saved(tmp_path / "model", layers=1)
    kept = load_model(open_source(tmp_path / "model"))
    with pytest.raises(InputError, match=words):
        generate(kept, PROMPTS, **arguments)
    kept.close()


class Short(Words):
    def __len__(self):
        return 50


def test_a_sequence_that_the_tokenizer_lacks(tmp_path):
    saved(tmp_path / "model", layers=1)
    kept = load_model(open_source(tmp_path / "model"))
    words = "sequence 1 has token 80, but the tokenizer's tokens are 0 to 49"
    with pytest.raises(InputError, match=words):
        score(kept, [[5], [5, 80]], tokenizer=Short())
    with pytest.raises(InputError, match="batch_size = 1.5 must be"):
        score(kept, [[5, 6]], batch_size=1.5)
    kept.close()
