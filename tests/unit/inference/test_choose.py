"""One token of every request, from logits."""

import json
from typing import ClassVar

import pytest
import torch

from plait.errors import InputError
from plait.inference.decode import LENGTH, STOP, UNFINISHED, TokenSampler
from plait.inference.generation_settings import GenerationSettings, tokens_of_tokenizer
from plait.inference.requests import GenerationRequest, TextStream, text_of


def requests(*prompts, new=4, seed=None):
    return [
        GenerationRequest(prompt, new, None if seed is None else seed + index)
        for index, prompt in enumerate(prompts)
    ]


def logits(rows, vocabulary=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 3


def sampler(*prompts, new=4, seed=None, tokenizer=None, **settings):
    settings = GenerationSettings(**settings)
    return TokenSampler(requests(*prompts, new=new, seed=seed), settings, tokenizer)


NO_TOKEN = "request {} has no token left to choose, or its logits are not finite"


def test_greedy_with_its_probability():
    scores = logits(2)
    tokens, logprobs, last = sampler((1,), (2,))(scores, [0, 1])
    assert tokens.tolist() == scores.argmax(1).tolist() and not last.any()
    expected = torch.log_softmax(scores, 1).max(1).values
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_a_request_ends_at_its_token_its_limit_or_never_again():
    scores = torch.zeros(2, 8)
    scores[0, 3], scores[1, 5] = 1, 1
    limits = [GenerationRequest((1,), 9, None), GenerationRequest((1,), 2, None)]
    settings = GenerationSettings(eos_token_id=(3, 4), pad_token_id=7)
    chooser = TokenSampler(limits, settings, None)
    assert chooser(scores, [0, 1])[2].tolist() == [STOP, UNFINISHED]
    tokens, logprobs, last = chooser(scores, [0, 1])
    assert tokens.tolist() == [7, 5] and last.tolist() == [STOP, LENGTH] and logprobs[0] == 0


def test_draws_depend_on_the_seed_alone():
    settings = {"do_sample": True, "top_k": 0}
    together = sampler((1,), (2,), (3,), seed=10, **settings)
    alone = sampler((2,), seed=11, **settings)
    state = torch.random.get_rng_state()
    for step in range(4):
        scores = logits(3, seed=step)
        rows = [0, 1, 2] if step < 2 else [1, 2]
        assert together(scores[rows], rows)[0, rows.index(1)] == alone(scores[1:2], [0])[0, 0]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_draws_have_the_distribution():
    scores = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]]))
    drawn = torch.zeros(4)
    for seed in range(2000):
        chooser = sampler((1,), new=1, seed=seed, do_sample=True, top_k=0)
        drawn[int(chooser(scores, [0])[0, 0])] += 1
    assert drawn[1] == 0 and (drawn / 2000 - scores.exp()[0]).abs().max() < 0.04


@pytest.mark.parametrize(
    "chosen",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": (4, 5, 6)},
        {"min_new_tokens": 3, "eos_token_id": (2,)},
        {"bad_words_ids": ((9,),)},
        {"min_length": 6, "eos_token_id": (2, 4)},
        {"encoder_repetition_penalty": 3.0},
        {"encoder_no_repeat_ngram_size": 2},
    ],
)
def test_penalties_and_bans_are_transformers_own(chosen):
    """The fake model's logits follow from the last token. Its greedy tokens are compared."""
    transformers = pytest.importorskip("transformers")
    table = logits(12, 12, seed=4)
    prompt = (2, 9, 2)
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes, **layers)
    config.eos_token_id = None

    class Table(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **_):
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=table[input_ids])

    options = {"max_new_tokens": 6, "use_cache": False, "do_sample": False, "pad_token_id": 0}
    lists = json.loads(json.dumps(chosen))  # tuples become lists
    expected = Table(config).generate(torch.tensor([prompt]), **options, **lists)
    chooser, tokens = sampler(prompt, new=6, **chosen), [prompt[-1]]
    while not all(chooser.ends):
        tokens.append(int(chooser(table[tokens[-1]][None], [0])[0, 0]))
    assert tokens[1:] == expected[0, len(prompt) :].tolist()


def test_not_a_number():
    with pytest.raises(InputError, match=NO_TOKEN.format(0)):
        sampler((1,), seed=1, do_sample=True)(torch.full((1, 60), torch.nan), [0])


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_no_number_is_the_likeliest(value):
    """Greedy decoding refuses it as well: token 0 would be a random choice."""
    scores = logits(2)
    scores[1] = value
    with pytest.raises(InputError, match=NO_TOKEN.format(1)):
        sampler((1,), (2,))(scores, [0, 1])
    ended = sampler((1,), (2,), eos_token_id=(3,))
    first = logits(2)
    first[1, 3] = 100
    ended(first, [0, 1])
    assert ended(scores, [0, 1])[2].tolist() == [UNFINISHED, STOP]


class Sparse:
    """A tokenizer of three tokens, of which one is number 9. Like slow ones of Transformers, it has no text for other numbers."""

    letters: ClassVar = {0: "a", 5: "b", 9: "c"}

    def __len__(self):
        return 3

    def get_vocab(self):
        return {letter: token for token, letter in self.letters.items()}

    def decode(self, ids, **_):
        return "".join(self.letters[token] for token in ids)


def test_a_vocabulary_with_gaps():
    """All of its tokens can be chosen, and numbers between them have no text."""
    chooser = sampler((1,), new=9, stop_strings=("bc",), tokenizer=Sparse())
    scores = torch.zeros(1, 12)
    scores[0, 11] = 99  # pads the embedding
    for step, (token, ends) in enumerate(((5, UNFINISHED), (7, UNFINISHED), (9, STOP)), 1):
        scores[0, token] = step
        assert chooser(scores, [0])[:, 0].tolist()[::2] == [token, ends]
    assert text_of(Sparse(), [0, 3, 9]) == "ac"
    stream = TextStream(Sparse())
    stream = TextStream(Sparse())
    assert [stream.add(token) for token in (5, 3, 0)] == ["b", "", "a"] and stream.remainder() == ""
    assert [tokens_of_tokenizer(each) for each in (Sparse(), Words(), None)] == [10, 26, None]


@pytest.mark.parametrize(
    "chosen",
    [
        {"encoder_repetition_penalty": 1.3},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": ((11,), (3, 11), (4,))},
        {"suppress_tokens": (11, 3), "begin_suppress_tokens": (10,)},
        {"min_new_tokens": 3, "min_length": 8, "eos_token_id": (11, 3)},
        *(
            {"do_sample": True, "temperature": 5.0, **more}
            for more in ({"top_k": 11}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9})
        ),
        *(
            {"do_sample": True, "top_k": 0, **more}
            for more in ({"epsilon_cutoff": 0.01}, {"eta_cutoff": 0.01})
        ),
    ],
)
def test_a_prompt_of_tokens_that_the_tokenizer_lacks(chosen):
    """The model has 12 tokens and the tokenizer 10: none of the others is chosen."""
    prompts = requests((3, 11, 5, 11), new=30, seed=1)
    chooser = TokenSampler(prompts, GenerationSettings(**chosen), None, tokens=10)
    for step in range(30):
        scores = logits(1, 12, seed=step)
        scores[0, 10:] = 9
        if not all(chooser.ends):
            assert chooser(scores, [0])[0, 0] < 10


class Words:
    def __len__(self):
        return 26

    def decode(self, ids, **_):
        return "".join(chr(97 + token) for token in ids)


def test_a_stop_string_ends_a_request():
    chooser = sampler((1,), new=9, stop_strings=("bc",), tokenizer=Words())
    scores = torch.zeros(1, 40)
    scores[0, 39] = 9
    for token, ends in ((1, UNFINISHED), (2, STOP)):
        scores[0, token] = token
        assert chooser(scores, [0])[:, 0].tolist()[::2] == [token, ends]
