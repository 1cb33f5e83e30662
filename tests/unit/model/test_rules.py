"""Which rules a model gets, and how they are given to modules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.errors import ModelError
from plait.model.layers import RuleSet, StyleRule, assign, matches
from plait.model.sources import rules_for
from tests.unit.model.families import family

SEGMENT = st.text("abc_0", min_size=1, max_size=4)


def stack():
    """Two blocks of an up and a down layer."""
    blocks = [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(4, 9)})


def given_rules(*rules, optional=False):
    styles = tuple(StyleRule(pattern, style) for pattern, style in rules)
    return RuleSet(styles, "parallel.plan", optional=optional)


@given(st.lists(SEGMENT, min_size=1, max_size=5), st.data())
def test_a_star_stands_for_exactly_one_segment(segments, data):
    name = ".".join(segments)
    index = data.draw(st.integers(0, len(segments) - 1))
    starred = [*segments[:index], "*", *segments[index + 1 :]]
    assert matches(name, name)
    assert matches(name, ".".join(starred))
    assert not matches(f"{name}.more", ".".join(starred))
    assert not matches(name, ".".join([*starred, "*"]))


def test_styles_are_in_the_order_of_the_model():
    styles = assign(stack(), given_rules(("layers.*.down", "rowwise"), ("layers.*.up", "colwise")))
    assert list(styles.items()) == [
        ("layers.0.up", "colwise"),
        ("layers.0.down", "rowwise"),
        ("layers.1.up", "colwise"),
        ("layers.1.down", "rowwise"),
    ]


REFUSED = [
    ((("layers.*.up", "colwise"), ("layers.*.dwon", "rowwise")), r"^parallel.plan: 'layers.\*.dwon' names no module; near it are layers.\*.down, layers.\*, "),
    ((("layers.*.up.weight", "colwise"),), r"'layers.\*.up.weight' names no module; it names a parameter; .* owns it, 'layers.\*.up'"),
    ((("layers.*.up", "colwise"), ("layers.0.*", "rowwise")), r"'layers.\*.up' gives layers.0.up the style 'colwise' and 'layers.0.\*' gives it 'rowwise'"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "message"), REFUSED)
def test_rules_that_do_not_fit_are_refused(rules, message):
    with pytest.raises(ModelError, match=message):
        assign(stack(), given_rules(*rules))


def test_a_user_s_plan_without_known_styles_is_refused():
    words = r"parallel.plan: 'head' has the unknown style 'columnwise'; did you mean colwise\?"
    with pytest.raises(ModelError, match=words):
        rules_for(stack(), user={"head": "columnwise"})
    with pytest.raises(ModelError, match=r"parallel.plan is empty; .* leave it out"):
        rules_for(stack(), user={})


def test_a_family_may_name_absent_modules_but_not_only_those():
    absent = ("layers.*.q_norm", "colwise")
    rules = given_rules(("head", "colwise"), absent, optional=True)
    assert set(assign(stack(), rules)) == {"head"}
    with pytest.raises(ModelError, match="names no module"):
        assign(stack(), given_rules(absent, optional=True))


def test_a_user_s_plan_is_used_alone():
    user = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    found = rules_for(family("llama", device="meta"), user=user)
    assert found.source == "parallel.plan" and found.complete
    assert found.rules == (StyleRule("model.layers.*.mlp.up_proj", "colwise_gather_output"),)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("llama", "transformers' plan of llama"), ("gpt2", "plait's plan of gpt2"), ("bitnet", "guessed")],
)  # fmt: skip
def test_sources_in_order(kind, source):
    blocks = ("model.layers.0", "model.layers.1") if kind == "bitnet" else ()
    assert rules_for(family(kind, device="meta"), blocks=blocks).source == source


def test_a_family_s_rules_are_found_inside_a_wrapper():
    for kind in ("llama", "gpt2"):
        inner = family(kind, device="meta")
        wrapped = nn.ModuleDict({"language": inner})
        found = rules_for(wrapped)
        assert found.source == rules_for(inner).source
        patterns = {f"language.{rule.pattern}" for rule in rules_for(inner).rules}
        assert {rule.pattern for rule in found.rules} == patterns


def test_names_of_transformers_4_are_understood():
    model = family("llama", device="meta")
    model._tp_plan = {
        "model.layers.*.mlp.up_proj": "colwise_rep",
        "model.layers.*.mlp.down_proj": "rowwise_rep",
        "model.norm": "replicate",
    }
    styles = [rule.style for rule in rules_for(model).rules]
    assert styles == ["colwise_gather_output", "rowwise_split_input"]


@pytest.mark.parametrize(
    ("kind", "style"), [("olmoe", "moe_tp_experts"), ("deepseek_v2", "mla_kv_a_proj")]
)
def test_unsupported_styles_are_refused_by_family_and_name(kind, style):
    words = rf"Transformers' plan of {kind} has styles that Plait does not apply: .*'{style}'.*parallel.tp = 1"
    with pytest.raises(ModelError, match=words):
        rules_for(family(kind, device="meta"))


def test_experts_are_split_by_their_own_axis():
    """This holds whatever Transformers' plan makes of them, in families that are compared with one process."""
    found = {rule.pattern: rule.style for rule in rules_for(family("mixtral", device="meta")).rules}
    assert found["model.layers.*.self_attn.q_proj"] == "colwise"
    assert not any(pattern.endswith("experts") for pattern in found)


def test_a_strange_style_that_names_nothing_does_no_harm():
    model = family("llama", device="meta")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"}
    assert "model.layers.*.mlp.experts" not in {rule.pattern for rule in rules_for(model).rules}
