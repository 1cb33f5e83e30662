"""Prompts that are prefilled in chunks give the tokens of prompts that are read at once."""

from contextlib import closing

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

# The longest has 11 tokens.
PROMPTS = [[5, 8, 2, 61, 7, 9, 33, 4, 71, 12, 90], [70, 7, 3]]


def greedy(sharded, new_tokens, prefill_tokens=None):
    options = {"max_new_tokens": new_tokens, "temperature": 0, "prefill_tokens": prefill_tokens}
    return generate(sharded, PROMPTS, **options)


def tokens_of(answers):
    return [answer.token_ids for answer in answers]


def check_logprobs(answers, expected):
    for answer, reference in zip(answers, expected, strict=True):
        actual = torch.tensor(answer.logprobs)
        torch.testing.assert_close(actual, torch.tensor(reference.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_chunks_give_the_same_tokens(kind, tmp_path):
    # Windows that are shorter than the prompt, and than some chunks of it.
    fields = {"sliding_window": 4} if kind in ("mistral", "gemma2") else {}
    model = saved(tmp_path / "model", kind, **fields)
    source = open_source(tmp_path / "model")
    with closing(load_model(source)) as resident:
        expected = greedy(resident, 8)
        for prefill_tokens in (1, 3, 5, 100):
            answers = greedy(resident, 8, prefill_tokens)
            assert tokens_of(answers) == tokens_of(expected)
            check_logprobs(answers, expected)

    total_bytes = sum(parameter.nbytes for parameter in model.parameters())
    streamed, _ = load_streamed(source, budget_bytes=total_bytes - 1, other_bytes=0)
    passes = []
    streamed.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with closing(streamed):
        # Each chunk is a pass over the weights, and the second token needs another one.
        for prefill_tokens, expected_passes in ((None, 2), (4, 4)):
            passes.clear()
            answers = greedy(streamed, 2, prefill_tokens)
            assert tokens_of(answers) == [tokens[:2] for tokens in tokens_of(expected)]
            assert len(passes) == expected_passes


@pytest.mark.parametrize(
    ("kind", "is_decoder"), [("bert", False), ("rembert", False), ("bert", True)]
)
def test_bidirectional_models_read_prompts_at_once(kind, is_decoder, tmp_path):
    saved(tmp_path / "model", kind, layers=1, is_decoder=is_decoder, num_key_value_heads=4)
    with closing(load_model(open_source(tmp_path / "model"))) as sharded:
        expected = greedy(sharded, 1)
        passes = []
        sharded.model.register_forward_pre_hook(lambda *_: passes.append(1))
        check_logprobs(greedy(sharded, 1, prefill_tokens=4), expected)
    assert len(passes) == (3 if is_decoder else 1)


def test_gpt_neox_is_causal_whatever_is_decoder_says():
    assert not requires_single_prefill(built("gpt_neox", is_decoder=False))


class ShortTokenizer:
    """A tokenizer with fewer tokens than the model."""

    def __len__(self):
        return 50


def test_wrong_arguments_are_refused(tmp_path):
    saved(tmp_path / "model", layers=1)
    with closing(load_model(open_source(tmp_path / "model"))) as sharded:
        for arguments, message in (
            ({"prefill_tokens": 0}, "prefill_tokens = 0 must be a whole number of at least 1"),
            ({"batch_size": 1.5}, "batch_size = 1.5 must be a whole number of at least 1"),
            ({"batch_size": "2"}, "batch_size = '2' must be"),
            ({"on_token": 5}, "on_token = 5 must be a function"),
        ):
            with pytest.raises(InputError, match=message):
                generate(sharded, PROMPTS, **arguments)

        message = "sequence 1 has token 80, but the tokenizer's tokens are 0 to 49"
        with pytest.raises(InputError, match=message):
            score(sharded, [[5], [5, 80]], tokenizer=ShortTokenizer())
        with pytest.raises(InputError, match="batch_size = 1.5 must be"):
            score(sharded, [[5, 6]], batch_size=1.5)
