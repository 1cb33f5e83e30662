"""Models whose rotary frequencies follow the length give Transformers' tokens of one request alone.

What they cannot give is refused.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

import plait
from plait.errors import InputError
from plait.inference import generate as generate_module
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.rope_by_length import RopeByLength, group_requests, rope_of_config
from plait.inference.score import score
from plait.inference.source import open_source
from tests.unit.inference.models import saved, transformers_tokens
from tests.unit.inference.ropes import KINDS, LONG, NEW, ORIGINAL, PROMPTS, expected_tokens


class Case:
    """A model, its sharded copy, and the expected tokens of all prompts.

    A generation of Transformers changes the frequencies of a model, so each prompt gets a copy.
    """

    def __init__(self, kind, folder):
        name, fields = KINDS[kind]
        self.kind = kind
        self.model = saved(folder, name, layers=2, **fields)
        self.sharded = load_model(open_source(folder))
        self.tokens = [expected_tokens(copy.deepcopy(self.model), prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request, tmp_path_factory):
    case = Case(request.param, tmp_path_factory.mktemp("rope") / "model")
    yield case
    case.sharded.close()


def tokens_of(model, prompts, new=NEW, **options):
    answers = generate(model, prompts, max_new_tokens=new, temperature=0, **options)
    return [answer.token_ids for answer in answers]


def uncached_tokens(model, prompts):
    return [
        transformers_tokens(copy.deepcopy(model), prompt, NEW, use_cache=False)
        for prompt in prompts
    ]


@pytest.mark.parametrize(
    "options", [{}, {"prefill_tokens": 7}, {"batch_size": 3}, {"use_cache": False}], ids=str
)
def test_a_batch_has_the_tokens_of_single_requests(case, options):
    expected = case.tokens
    if "use_cache" in options and case.kind == "dynamic":
        # Transformers computes all keys again with the frequencies of the new length.
        expected = uncached_tokens(case.model, PROMPTS)
        assert expected != case.tokens
    streams = [[] for _ in PROMPTS]

    def on_token(request, token):
        streams[request].append(token)

    assert tokens_of(case.sharded, PROMPTS, on_token=on_token, **options) == expected == streams


def test_requests_within_the_original_length_are_one_batch(case, monkeypatch):
    """The last new token is never read, so 25 tokens and 8 new ones are within 32."""
    passes = []
    handle = case.sharded.model.register_forward_pre_hook(lambda *_: passes.append(1))
    assert tokens_of(case.sharded, PROMPTS[:3]) == case.tokens[:3] and len(passes) <= NEW + 1
    handle.remove()

    # If the cache cannot drop rows, a finished request stays in the batch and must not count.
    monkeypatch.setattr("plait.inference.decode.keep_rows", lambda *_: False)
    options = {"new": None, "max_length": ORIGINAL}
    (_, longest) = tokens_of(case.sharded, [PROMPTS[4], PROMPTS[0]], **options)
    assert longest[:NEW] == case.tokens[0] and len(longest) == ORIGINAL - 5
    assert tokens_of(case.sharded, [PROMPTS[0]], **options) == [longest]


def test_a_model_in_training_that_has_read_longer_inputs(case):
    config = {"train_micro_batch_size_per_gpu": 1}
    model = copy.deepcopy(case.model)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    with torch.no_grad():
        engine.module(torch.tensor([PROMPTS[7]]))
    before = [buffer.clone() for buffer in engine.module.buffers()]
    answers = engine.generate(PROMPTS, max_new_tokens=NEW, temperature=0)
    assert [answer.token_ids for answer in answers] == case.tokens
    assert all(map(torch.equal, engine.module.buffers(), before))
    engine.close()


def test_scores_are_those_of_a_sequence_alone(case):
    for prompt, actual in zip(PROMPTS, score(case.sharded, PROMPTS), strict=True):
        with torch.no_grad():
            logits = copy.deepcopy(case.model)(torch.tensor([prompt])).logits[0, :-1]
        targets = torch.tensor(prompt[1:]).unsqueeze(1)
        expected = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_class_without_a_cache_of_transformers(case, monkeypatch):
    # Classes without one are rare and large.
    monkeypatch.setattr(generate_module, "supports_cache", lambda model: False)
    if case.kind == "longrope":
        # Its keys are the same whether they are cached or computed again.
        assert tokens_of(case.sharded, PROMPTS) == case.tokens
        return
    with pytest.raises(InputError, match="keeps no KV cache here.* may have 67; .*use_cache=False"):
        tokens_of(case.sharded, PROMPTS)
    # The message advises these calls.
    assert tokens_of(case.sharded, PROMPTS[:1], use_cache=False)
    assert tokens_of(case.sharded, [PROMPTS[0][:4]], new=2)


class NestedConfig(SimpleNamespace):
    """A configuration whose text model may have its own."""

    def get_text_config(self, decoder):
        return getattr(self, "text_config", self)


def test_forms_of_a_configuration():
    long = {"rope_type": "longrope", "original_max_position_embeddings": 9}
    per_layer = {"full": long, "sliding": {"rope_type": "default"}}
    inner = NestedConfig(max_position_embeddings=64, rope_parameters=per_layer)
    assert rope_of_config(NestedConfig(text_config=inner)) == RopeByLength("longrope", 9)
    old = SimpleNamespace(max_position_embeddings=64, rope_scaling={"type": "dynamic"})
    assert rope_of_config(old) == RopeByLength("dynamic", 64)

    inner.rope_parameters["sliding"] = {"rope_type": "dynamic"}
    mixed = rope_of_config(inner)
    assert mixed == RopeByLength("several (dynamic and longrope)", 9) and not mixed.is_uniform

    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 9}
    for fixed in (None, object(), SimpleNamespace(rope_parameters=yarn)):
        assert rope_of_config(fixed) is None


def test_several_types_are_refused_past_the_original_length(case, monkeypatch):
    config = case.sharded.model.config
    several = {"a": {"rope_type": "dynamic"}, "b": config.rope_parameters | LONG}
    monkeypatch.setattr(config, "rope_parameters", several)
    monkeypatch.setattr(config, "max_position_embeddings", 40)
    message = r"above 32 tokens, .* \(RoPE type several \(dynamic and longrope\)\) depend on"
    with pytest.raises(InputError, match=message):
        generate(case.sharded, [PROMPTS[5]], max_new_tokens=2)
    with pytest.raises(InputError, match=message):
        score(case.sharded, [PROMPTS[6]])


def test_requests_are_grouped_by_their_frequencies():
    lengths = [(3, 9), (5, 12), (11, 14), (2, 10), (5, 11), (20, 30), (8, 11)]
    assert group_requests(None, lengths) == [[0, 1, 2, 3, 4, 5, 6]]
    assert group_requests(RopeByLength("longrope", 10), lengths) == [[0, 3], [1, 4], [2, 5], [6]]
    assert group_requests(RopeByLength("dynamic", 10), lengths) == [[0, 3], [1, 4], [2], [5], [6]]


def test_longrope_of_a_class_whose_keys_transformers_mixes(tmp_path):
    """The tokens are those without a cache, computed from all tokens at every step."""
    model = saved(tmp_path / "model", layers=2, rope_parameters=LONG)
    sharded = load_model(open_source(tmp_path / "model"))
    assert tokens_of(sharded, PROMPTS[:6]) == uncached_tokens(model, PROMPTS[:6])
    sharded.close()
