"""Models whose rotary frequencies follow the length give the tokens of Transformers' generate of one request alone, or are refused."""

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
from tests.unit.inference.models import built
from tests.unit.inference.ropes import (
    KINDS,
    LONG,
    NEW,
    ORIGINAL,
    PROMPTS,
    expected_tokens,
    transformers_tokens,
)


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request, tmp_path_factory):
    found = Case(request.param, tmp_path_factory.mktemp("rope") / "model")
    yield found
    found.sharded.close()


def tokens_of(model, prompts, new=NEW, **options):
    answers = generate(model, prompts, max_new_tokens=new, temperature=0, **options)
    return [answer.token_ids for answer in answers]


class Case:
    def __init__(self, kind, folder):
        name, fields = KINDS[kind]
        self.kind, self.model = kind, built(name, layers=2, **fields)
        self.model.save_pretrained(folder)
        self.sharded = load_model(open_source(folder))
        self.tokens = [expected_tokens(copy.deepcopy(self.model), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "ways", [{}, {"prefill_tokens": 7}, {"batch_size": 3}, {"use_cache": False}], ids=str
)
def test_a_batch_has_the_tokens_of_transformers_alone(case, ways):
    expected = case.tokens
    if "use_cache" in ways and case.kind == "dynamic":
        expected = []
        for prompt in PROMPTS:
            model = copy.deepcopy(case.model)
            expected.append(transformers_tokens(model, prompt, use_cache=False))
        assert expected != case.tokens
    streams = [[] for _ in PROMPTS]

    def on_token(request, token):
        streams[request].append(token)

    assert tokens_of(case.sharded, PROMPTS, on_token=on_token, **ways) == expected == streams


def test_requests_within_the_original_length_are_one_batch(case, monkeypatch):
    """The last new token is never seen: 25 and 8 are within. A finished request stays if the cache keeps all rows."""
    passes = []
    handle = case.sharded.model.register_forward_pre_hook(lambda *_: passes.append(1))
    assert tokens_of(case.sharded, PROMPTS[:3]) == case.tokens[:3] and len(passes) <= NEW + 1
    handle.remove()
    monkeypatch.setattr("plait.inference.decode.keep_rows", lambda *_: False)
    options = {"new": None, "max_length": ORIGINAL}
    (_, longest) = tokens_of(case.sharded, [PROMPTS[4], PROMPTS[0]], **options)
    assert longest[:NEW] == case.tokens[0] and len(longest) == ORIGINAL - 5
    assert tokens_of(case.sharded, [PROMPTS[0]], **options) == [longest]


def test_a_model_in_training_that_has_seen_longer_inputs(case):
    config = {"train_micro_batch_size_per_gpu": 1}
    model = copy.deepcopy(case.model)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    with torch.no_grad():
        engine.module(torch.tensor([PROMPTS[7]]))
    before = [buffer.clone() for buffer in engine.module.buffers()]
    made = engine.generate(PROMPTS, max_new_tokens=NEW, temperature=0)
    assert [one.token_ids for one in made] == case.tokens
    assert all(map(torch.equal, engine.module.buffers(), before))
    engine.close()


def test_scores_are_those_of_a_sequence_alone(case):
    together = score(case.sharded, PROMPTS)
    for prompt, found in zip(PROMPTS, together, strict=True):
        with torch.no_grad():
            logits = copy.deepcopy(case.model)(torch.tensor([prompt])).logits[0, :-1]
        targets = torch.tensor(prompt[1:]).unsqueeze(1)
        expected = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_without_a_cache_that_transformers_has(case, monkeypatch):
    monkeypatch.setattr(generate_module, "supports_cache", lambda model: False)
    if case.kind == "longrope":  # computed again or kept, the numbers are the same
        assert tokens_of(case.sharded, PROMPTS) == case.tokens
        return
    with pytest.raises(InputError, match="keeps no KV cache here.* may have 67; .*use_cache=False"):
        tokens_of(case.sharded, PROMPTS)
    # The message advises these calls.
    assert tokens_of(case.sharded, PROMPTS[:1], use_cache=False)
    assert tokens_of(case.sharded, [PROMPTS[0][:4]], new=2)


def test_what_a_configuration_says():
    class Given(SimpleNamespace):
        def get_text_config(self, decoder):
            return getattr(self, "text_config", self)

    long = {"rope_type": "longrope", "original_max_position_embeddings": 9}
    full = {"full": long, "sliding": {"rope_type": "default"}}
    inner = Given(max_position_embeddings=64, rope_parameters=full)
    assert rope_of_config(Given(text_config=inner)) == RopeByLength("longrope", 9)
    old = SimpleNamespace(max_position_embeddings=64, rope_scaling={"type": "dynamic"})
    assert rope_of_config(old) == RopeByLength("dynamic", 64)
    inner.rope_parameters["sliding"] = {"rope_type": "dynamic"}
    found = rope_of_config(inner)
    assert found == RopeByLength("several (dynamic and longrope)", 9) and not found.is_uniform
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 9}
    for other in (None, object(), SimpleNamespace(rope_parameters=yarn)):
        assert rope_of_config(other) is None


def test_several_types_are_refused_past_the_original_length(case, monkeypatch):
    config = case.sharded.model.config
    several = {"a": {"rope_type": "dynamic"}, "b": config.rope_parameters | LONG}
    monkeypatch.setattr(config, "rope_parameters", several)
    monkeypatch.setattr(config, "max_position_embeddings", 40)
    words = r"above 32 tokens, .* \(RoPE type several \(dynamic and longrope\)\) depend on"
    for call in (
        lambda: generate(case.sharded, [PROMPTS[5]], max_new_tokens=2),
        lambda: score(case.sharded, [PROMPTS[6]]),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_groups():
    lengths = [(3, 9), (5, 12), (11, 14), (2, 10), (5, 11), (20, 30), (8, 11)]
    assert group_requests(None, lengths) == [[0, 1, 2, 3, 4, 5, 6]]
    assert group_requests(RopeByLength("longrope", 10), lengths) == [[0, 3], [1, 4], [2, 5], [6]]
    assert group_requests(RopeByLength("dynamic", 10), lengths) == [[0, 3], [1, 4], [2], [5], [6]]


def test_longrope_of_a_class_whose_keys_transformers_mixes(tmp_path):
    """Its tokens are those without a cache, computed from all tokens together."""
    model = built("llama", layers=2, rope_parameters=LONG)
    model.save_pretrained(tmp_path / "model")
    sharded = load_model(open_source(tmp_path / "model"))
    expected = [transformers_tokens(model, prompt, use_cache=False) for prompt in PROMPTS[:6]]
    assert tokens_of(sharded, PROMPTS[:6]) == expected
    sharded.close()
