"""The tensor parallel rules of a model come from several sources, and are matched with modules."""

import hypothesis
import pytest
from hypothesis import strategies as st
from torch import nn

from plait.errors import ModelError
from plait.model.layers import RuleSet, StyleRule, assign, matches
from plait.model.sources import rules_for
from tests.unit.model.families import family

SEGMENT = st.text("abc_0", min_size=1, max_size=4)


def two_blocks():
    def block():
        return nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    return nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "head": nn.Linear(4, 9)})


def rule_set(*rules, optional=False):
    styles = tuple(StyleRule(pattern, style) for pattern, style in rules)
    return RuleSet(styles, "parallel.plan", optional=optional)


def patterns_of(rules):
    return {rule.pattern for rule in rules.rules}


@hypothesis.given(st.lists(SEGMENT, min_size=1, max_size=5), st.data())
def test_a_star_stands_for_exactly_one_segment(segments, data):
    name = ".".join(segments)
    index = data.draw(st.integers(0, len(segments) - 1))
    starred = ".".join([*segments[:index], "*", *segments[index + 1 :]])
    assert matches(name, name)
    assert matches(name, starred)
    assert not matches(f"{name}.inner", starred)
    assert not matches(name, f"{starred}.*")


def test_styles_are_in_the_order_of_the_model():
    rules = rule_set(("layers.*.down", "rowwise"), ("layers.*.up", "colwise"))
    assert list(assign(two_blocks(), rules).items()) == [
        ("layers.0.up", "colwise"),
        ("layers.0.down", "rowwise"),
        ("layers.1.up", "colwise"),
        ("layers.1.down", "rowwise"),
    ]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*.dwon", r"'layers.\*.dwon' names no module; near it are layers.\*.down"),
        ("layers.*.up.weight", r"names no module; it names a parameter; .* it, 'layers.\*.up'"),
        ("layers.0.*", r"'layers.\*.up' gives layers.0.up .* 'layers.0.\*' gives it 'rowwise'"),
    ],
)
def test_rules_that_do_not_fit_are_refused(pattern, message):
    with pytest.raises(ModelError, match=f"^parallel.plan: .*{message}"):
        assign(two_blocks(), rule_set(("layers.*.up", "colwise"), (pattern, "rowwise")))


def test_custom_plans_need_known_styles():
    message = r"parallel.plan: 'head' has the unknown style 'columnwise'; did you mean colwise\?"
    with pytest.raises(ModelError, match=message):
        rules_for(two_blocks(), user={"head": "columnwise"})
    with pytest.raises(ModelError, match=r"parallel.plan is empty; .* leave it out"):
        rules_for(two_blocks(), user={})


def test_a_family_may_name_absent_modules_but_not_only_those():
    absent = ("layers.*.q_norm", "colwise")
    rules = rule_set(("head", "colwise"), absent, optional=True)
    assert set(assign(two_blocks(), rules)) == {"head"}
    with pytest.raises(ModelError, match="names no module"):
        assign(two_blocks(), rule_set(absent, optional=True))


def test_a_custom_plan_replaces_that_of_the_family():
    user = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    rules = rules_for(family("llama", device="meta"), user=user)
    assert rules.source == "parallel.plan" and rules.complete
    assert rules.rules == (StyleRule("model.layers.*.mlp.up_proj", "colwise_gather_output"),)


def test_sources_in_order():
    for kind, source in (
        ("llama", "transformers' plan of llama"),
        ("gpt2", "plait's plan of gpt2"),
        ("bitnet", "guessed"),
    ):
        blocks = ("model.layers.0", "model.layers.1") if kind == "bitnet" else ()
        assert rules_for(family(kind, device="meta"), blocks=blocks).source == source


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_wrapper_gets_the_rules_of_the_family_inside(kind):
    inner = family(kind, device="meta")
    expected = rules_for(inner)
    rules = rules_for(nn.ModuleDict({"language": inner}))
    assert rules.source == expected.source
    assert patterns_of(rules) == {f"language.{pattern}" for pattern in patterns_of(expected)}


def test_style_names_of_transformers_4_are_accepted():
    model = family("llama", device="meta")
    model._tp_plan = {
        "model.layers.*.mlp.up_proj": "colwise_rep",
        "model.layers.*.mlp.down_proj": "rowwise_rep",
        "model.norm": "replicate",
    }
    up, down = rules_for(model).rules
    assert (up.style, down.style) == ("colwise_gather_output", "rowwise_split_input")


@pytest.mark.parametrize(
    ("kind", "style"), [("olmoe", "moe_tp_experts"), ("deepseek_v2", "mla_kv_a_proj")]
)
def test_unsupported_styles_are_refused_by_family_and_name(kind, style):
    message = rf"plan of {kind} has styles that Plait does not .*'{style}'.*parallel.tp = 1"
    with pytest.raises(ModelError, match=message):
        rules_for(family(kind, device="meta"))


def test_an_unsupported_style_of_absent_modules_is_ignored():
    model = family("llama", device="meta")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"}
    assert "model.layers.*.mlp.experts" not in patterns_of(rules_for(model))


def test_supported_experts_are_left_to_expert_parallelism():
    rules = rules_for(family("mixtral", device="meta"))
    assert StyleRule("model.layers.*.self_attn.q_proj", "colwise") in rules.rules
    assert not any(pattern.endswith("experts") for pattern in patterns_of(rules))
