"""Which rules a model gets, and how they are given to modules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.errors import ModelError
from plait.model.layers import RuleSet, StyleRule, assign, matches
from plait.model.sources import rules_for
from tests.unit.model.families import family

SEGMENT = st.text("abc_0", min_size=1, max_size=4)


def stack() -> nn.Module:
    """Two blocks of an up and a down layer."""
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)
            ),
            "head": nn.Linear(4, 9),
        }
    )


def given_rules(*rules: tuple[str, str], optional: bool = False) -> RuleSet:
    return RuleSet(
        tuple(StyleRule(pattern, style) for pattern, style in rules),
        "parallel.plan",
        optional=optional,
    )  # type: ignore[arg-type]


@given(st.lists(SEGMENT, min_size=1, max_size=5), st.data())
def test_a_star_stands_for_exactly_one_segment(segments: list[str], data: st.DataObject) -> None:
    name = ".".join(segments)
    index = data.draw(st.integers(0, len(segments) - 1))
    starred = [*segments[:index], "*", *segments[index + 1 :]]
    assert matches(name, name)
    assert matches(name, ".".join(starred))
    assert not matches(f"{name}.more", ".".join(starred))
    assert not matches(name, ".".join([*starred, "*"]))


def test_styles_are_in_the_order_of_the_model() -> None:
    styles = assign(stack(), given_rules(("layers.*.down", "rowwise"), ("layers.*.up", "colwise")))
    assert list(styles.items()) == [
        ("layers.0.up", "colwise"),
        ("layers.0.down", "rowwise"),
        ("layers.1.up", "colwise"),
        ("layers.1.down", "rowwise"),
    ]


def test_a_rule_that_names_nothing_is_refused_with_what_is_near() -> None:
    with pytest.raises(ModelError) as caught:
        assign(stack(), given_rules(("layers.*.up", "colwise"), ("layers.*.dwon", "rowwise")))
    assert str(caught.value).startswith(
        "parallel.plan: 'layers.*.dwon' names no module; near it are layers.*.down, layers.*, "
    )


def test_a_rule_that_names_a_parameter_is_told_its_module() -> None:
    with pytest.raises(
        ModelError,
        match=r"'layers.\*.up.weight' names no module; it names a parameter; .* owns it, 'layers.\*.up'",
    ):
        assign(stack(), given_rules(("layers.*.up.weight", "colwise")))


def test_two_styles_for_one_module_are_refused() -> None:
    with pytest.raises(
        ModelError,
        match=r"'layers.\*.up' gives layers.0.up the style 'colwise' and 'layers.0.\*' gives it 'rowwise'",
    ):
        assign(stack(), given_rules(("layers.*.up", "colwise"), ("layers.0.*", "rowwise")))


def test_a_family_may_name_absent_modules_but_not_only_those() -> None:
    assert set(
        assign(
            stack(), given_rules(("head", "colwise"), ("layers.*.q_norm", "colwise"), optional=True)
        )
    ) == {"head"}
    with pytest.raises(ModelError, match="names no module"):
        assign(stack(), given_rules(("layers.*.q_norm", "colwise"), optional=True))


def test_a_user_s_unknown_style_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ModelError,
        match=r"parallel.plan: 'head' has the unknown style 'columnwise'; did you mean colwise\?",
    ):
        rules_for(stack(), user={"head": "columnwise"})


def test_a_user_s_empty_plan_is_refused() -> None:
    with pytest.raises(ModelError, match=r"parallel.plan is empty; .* leave it out"):
        rules_for(stack(), user={})


def test_a_user_s_plan_is_used_alone() -> None:
    found = rules_for(
        family("llama", device="meta"), user={"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    )
    assert found.source == "parallel.plan" and found.complete
    assert found.rules == (StyleRule("model.layers.*.mlp.up_proj", "colwise_gather_output"),)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("llama", "transformers' plan of llama"),
        ("gpt2", "plait's plan of gpt2"),
        ("bitnet", "guessed"),
    ],
)
def test_sources_in_order(kind: str, source: str) -> None:
    model = family(kind, device="meta")
    assert (
        rules_for(
            model, blocks=("model.layers.0", "model.layers.1") if kind == "bitnet" else ()
        ).source
        == source
    )


def test_a_family_s_rules_are_found_inside_a_wrapper() -> None:
    for kind in ("llama", "gpt2"):
        inner = family(kind, device="meta")
        wrapped = nn.ModuleDict({"language": inner})
        found = rules_for(wrapped)
        assert found.source == rules_for(inner).source
        assert {rule.pattern for rule in found.rules} == {
            f"language.{rule.pattern}" for rule in rules_for(inner).rules
        }


def test_names_of_transformers_4_are_understood() -> None:
    model = family("llama", device="meta")
    model._tp_plan = {
        "model.layers.*.mlp.up_proj": "colwise_rep",
        "model.layers.*.mlp.down_proj": "rowwise_rep",
        "model.norm": "replicate",
    }
    assert [rule.style for rule in rules_for(model).rules] == [
        "colwise_gather_output",
        "rowwise_split_input",
    ]


@pytest.mark.parametrize(
    ("kind", "style"), [("olmoe", "moe_tp_experts"), ("deepseek_v2", "mla_kv_a_proj")]
)
def test_unsupported_styles_are_refused_by_family_and_name(kind: str, style: str) -> None:
    with pytest.raises(
        ModelError,
        match=rf"Transformers' plan of {kind} has styles that Plait does not apply: .*'{style}'.*parallel.tp = 1",
    ):
        rules_for(family(kind, device="meta"))


def test_experts_are_split_by_their_own_axis() -> None:
    """Whatever Transformers' plan makes of them, in families that are compared with one process."""
    found = {rule.pattern: rule.style for rule in rules_for(family("mixtral", device="meta")).rules}
    assert found["model.layers.*.self_attn.q_proj"] == "colwise" and not any(
        pattern.endswith("experts") for pattern in found
    )


def test_a_strange_style_that_names_nothing_does_no_harm() -> None:
    model = family("llama", device="meta")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"}
    assert "model.layers.*.mlp.experts" not in {rule.pattern for rule in rules_for(model).rules}
