"""The next token of every request, chosen from logits."""

import json
from typing import ClassVar

import pytest
import torch

from plait.errors import InputError
from plait.inference.decode import LENGTH, STOP, UNFINISHED, TokenSampler
from plait.inference.generation_settings import GenerationSettings, tokens_of_tokenizer
from plait.inference.requests import GenerationRequest, TextStream, text_of

NO_TOKEN = "request {} has no token left to choose, or its logits are not finite"


def random_logits(rows, vocabulary=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 3


def sampler(*prompts, new=4, seeds=None, tokenizer=None, tokens=None, **settings):
    requests = [
        GenerationRequest(prompt, new, seed)
        for prompt, seed in zip(prompts, seeds or [None] * len(prompts), strict=True)
    ]
    return TokenSampler(requests, GenerationSettings(**settings), tokenizer, tokens=tokens)


def test_greedy_tokens_with_their_log_probabilities():
    logits = random_logits(2)
    tokens, logprobs, ends = sampler((1,), (2,))(logits, [0, 1])
    assert tokens.tolist() == logits.argmax(1).tolist() and not ends.any()
    expected = torch.log_softmax(logits, 1).max(1).values
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_a_request_ends_at_a_stop_token_or_at_its_limit():
    logits = torch.zeros(2, 8)
    logits[0, 3] = 1
    logits[1, 5] = 1
    requests = [GenerationRequest((1,), 9, None), GenerationRequest((1,), 2, None)]
    settings = GenerationSettings(eos_token_id=(3, 4), pad_token_id=7)
    choose = TokenSampler(requests, settings, None)
    assert choose(logits, [0, 1])[2].tolist() == [STOP, UNFINISHED]
    # A request that has ended gets padding.
    tokens, logprobs, ends = choose(logits, [0, 1])
    assert tokens.tolist() == [7, 5] and ends.tolist() == [STOP, LENGTH] and logprobs[0] == 0


def test_draws_depend_only_on_the_seed_of_the_request():
    settings = {"do_sample": True, "top_k": 0}
    together = sampler((1,), (2,), (3,), seeds=(10, 11, 12), **settings)
    alone = sampler((2,), seeds=(11,), **settings)
    random_state = torch.random.get_rng_state()
    for step in range(4):
        logits = random_logits(3, seed=step)
        rows = [0, 1, 2] if step < 2 else [1, 2]
        assert together(logits[rows], rows)[0, rows.index(1)] == alone(logits[1:2], [0])[0, 0]
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_draws_follow_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]]))
    counts = torch.zeros(4)
    for seed in range(2000):
        choose = sampler((1,), new=1, seeds=(seed,), do_sample=True, top_k=0)
        counts[int(choose(logits, [0])[0, 0])] += 1
    # 3.6 standard deviations of the largest frequency.
    assert counts[1] == 0 and (counts / 2000 - logits.exp()[0]).abs().max() < 0.04


@pytest.mark.parametrize(
    "settings",
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
def test_penalties_and_bans_are_those_of_transformers(settings):
    """Greedy tokens of a fake model, whose logits follow from the last token, are compared."""
    transformers = pytest.importorskip("transformers")
    table = random_logits(12, 12, seed=4)
    prompt = (2, 9, 2)
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes, **layers)
    config.eos_token_id = None

    class TableModel(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **_):
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=table[input_ids])

    options = {"max_new_tokens": 6, "use_cache": False, "do_sample": False, "pad_token_id": 0}
    lists = json.loads(json.dumps(settings))  # Transformers takes lists, and no tuples
    expected = TableModel(config).generate(torch.tensor([prompt]), **options, **lists)
    choose = sampler(prompt, new=6, **settings)
    tokens = [prompt[-1]]
    while not all(choose.ends):
        tokens.append(int(choose(table[tokens[-1]][None], [0])[0, 0]))
    assert tokens[1:] == expected[0, len(prompt) :].tolist()


def test_logits_that_are_not_finite_are_refused():
    """Greedy decoding refuses them as well: token 0 would be an arbitrary choice."""
    with pytest.raises(InputError, match=NO_TOKEN.format(0)):
        sampler((1,), seeds=(1,), do_sample=True)(torch.full((1, 60), torch.nan), [0])

    for value in (torch.nan, -torch.inf, torch.inf):
        logits = random_logits(2)
        logits[1] = value
        with pytest.raises(InputError, match=NO_TOKEN.format(1)):
            sampler((1,), (2,))(logits, [0, 1])

        # The logits of a request that has ended do not count.
        choose = sampler((1,), (2,), eos_token_id=(3,))
        first = random_logits(2)
        first[1, 3] = 100
        choose(first, [0, 1])
        assert choose(logits, [0, 1])[2].tolist() == [UNFINISHED, STOP]


class SparseLetters:
    """A tokenizer of three tokens, the last of which is number 9.

    It has no text for other numbers, like slow tokenizers of Transformers.
    """

    letters: ClassVar = {0: "a", 5: "b", 9: "c"}

    def __len__(self):
        return 3

    def get_vocab(self):
        return {letter: token for token, letter in self.letters.items()}

    def decode(self, ids, **_):
        return "".join(self.letters[token] for token in ids)


def test_a_vocabulary_with_gaps():
    """All of its tokens can be chosen, and numbers between them have no text."""
    tokenizer = SparseLetters()
    choose = sampler((1,), new=9, stop_strings=("bc",), tokenizer=tokenizer)
    logits = torch.zeros(1, 12)
    logits[0, 11] = 99  # pads the embedding
    for step, (token, ends) in enumerate(((5, UNFINISHED), (7, UNFINISHED), (9, STOP)), 1):
        logits[0, token] = step
        assert choose(logits, [0])[:, 0].tolist()[::2] == [token, ends]

    assert text_of(tokenizer, [0, 3, 9]) == "ac"
    stream = TextStream(tokenizer)
    assert list(map(stream.add, (5, 3, 0))) == ["b", "", "a"] and stream.remainder() == ""
    assert list(map(tokens_of_tokenizer, (tokenizer, None))) == [10, None]


SAMPLED = {"do_sample": True, "temperature": 5.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"encoder_repetition_penalty": 1.3},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": ((11,), (3, 11), (4,))},
        {"suppress_tokens": (11, 3), "begin_suppress_tokens": (10,)},
        {"min_new_tokens": 3, "min_length": 8, "eos_token_id": (11, 3)},
        {**SAMPLED, "top_k": 11},
        {**SAMPLED, "top_p": 0.9},
        {**SAMPLED, "min_p": 0.1},
        {**SAMPLED, "typical_p": 0.9},
        {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.01},
        {"do_sample": True, "top_k": 0, "eta_cutoff": 0.01},
    ],
)
def test_tokens_that_the_tokenizer_lacks_are_not_chosen(settings):
    """The model has 12 tokens, the tokenizer 10, and the prompt has one of the others."""
    choose = sampler((3, 11, 5, 11), new=30, seeds=(1,), tokens=10, **settings)
    for step in range(30):
        logits = random_logits(1, 12, seed=step)
        logits[0, 10:] = 9
        if not all(choose.ends):
            assert choose(logits, [0])[0, 0] < 10
