"""Routers: where their balance loss is added, how biases move, and what is refused by name."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, ModelError
from plait.losses.balance_loss import BalancedLoss, with_balance_loss
from plait.losses.chunked_loss import ChunkedCausalLMLoss
from plait.losses.loss import CausalLMLoss
from plait.model.blocks import find_blocks
from plait.model.experts import biased_routers, find_experts, recorded_routers
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import StepEnd
from plait.parallel.order import check_all
from plait.parallel.techniques.experts import BiasUpdate
from tests.parity import cases
from tests.parity.experts import SIZES, Case, biases, build, routers


@pytest.mark.parametrize("family", SIZES)
def test_what_is_found_in_a_model(family):
    model = build(Case(family), device="meta")
    layers = 2
    found = find_experts(model)
    assert [experts.count for experts in found] == [routers(model)[0].num_experts] * layers
    names = {name.rpartition(".")[0] for experts in found for name in experts.parameters}
    assert names == {experts.name for experts in found}
    recorded = [model.get_submodule(router.name) for router in recorded_routers(model)]
    assert recorded == routers(model)
    assert len(biased_routers(model)) == (layers if family == "deepseek_v3" else 0)


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
def test_statistics_where_another_dtype_is_the_default():
    test_statistics_are_transformers(mask=True)


@pytest.mark.parametrize("mask", [False, True])
def test_statistics_are_transformers(mask):
    """The bits are those of the model's balance loss, and so is the gradient. The sums pass through two stages."""
    model = build(replace(Case("mixtral"), balance=True), dtype=torch.float32)
    batch = {"input_ids": torch.arange(24).view(2, 12)}
    if mask:
        batch["attention_mask"] = (torch.arange(12) < torch.tensor([[7], [12]])).long()
    expected = model(**batch).aux_loss
    first, second = recorded_routers(model)
    stages = [RouterStatistics(model, [router], experts=4, top_k=2) for router in (first, second)]
    for stage in stages:
        stage.begin(True, None)
    model(**batch)
    _, stages[1]._earlier_sums = stages[0].end(None)
    loss = stages[1].losses()[0]
    assert torch.equal(loss, expected)
    weights = [model.get_submodule(router.name).weight for router in (first, second)]
    gradients = (torch.autograd.grad(each, weights) for each in (expected, stages[1].losses()[0]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


LOSSES_REFUSED = [
    ("deepseek_v3", {"balance": "global"}, "experts.balance = .global.: DeepseekV3ForCausalLM has no balance loss, which"),
    ("mixtral", {"balance": "global"}, "experts.balance = .global.: MixtralForCausalLM has no balance loss, which"),
    ("mixtral", {"balance": "globally"}, "experts.balance"),
    ("mixtral", {"z_loss": -0.1}, "experts.z_loss"),
    ("llama", {"z_loss": 0.1}, "experts.z_loss = 0.1: LlamaForCausalLM has no experts, or does not declare which modules are its routers; use 0"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "experts", "message"), LOSSES_REFUSED)
def test_losses_of_routers_that_are_refused(family, experts, message):
    is_llama = family == "llama"
    model = cases.build("llama", tied=False) if is_llama else build(Case(family), device="meta")
    file = {"train_micro_batch_size_per_gpu": 1, "experts": experts}

    def checked():
        resolved = resolve(load(file), world_size=2)
        check_all(resolved.context(model=model, blocks=find_blocks(model)))

    with pytest.raises(ConfigError, match=message):
        checked()


def test_losses_of_routers_beside_a_loss_of_your_own():
    model = build(Case("mixtral"), device="meta")
    recorded = partial(RouterStatistics, model, recorded_routers(model), experts=4, top_k=2)
    statistics = recorded(balances=False, z_loss=0.1)
    words = "experts.z_loss = 0.1: it is added to plait.causal_lm_loss, and the loss is OwnLoss"
    with pytest.raises(ConfigError, match=words):
        with_balance_loss(OwnLoss(), model, statistics)
    words = "experts.balance = .global.: it is added to plait.causal_lm_loss, and the loss is none"
    with pytest.raises(ConfigError, match=words):
        with_balance_loss(None, model, recorded(is_global=True))
    made = with_balance_loss(plait.causal_lm_loss, model, statistics)
    assert isinstance(made, BalancedLoss) and made.coefficient == 0


class OwnLoss(CausalLMLoss):
    """Loss of a user, who adds the other losses."""


def test_whose_loss_is_balanced():
    model = build(Case("mixtral", balance=True), device="meta")
    for loss in (plait.causal_lm_loss, ChunkedCausalLMLoss(chunk_tokens=4)):
        made = with_balance_loss(loss, model)
        assert isinstance(made, BalancedLoss) and made.coefficient == 0.05 and made.split_logits
    assert isinstance(with_balance_loss(OwnLoss(), model), OwnLoss)
    without = build(Case("deepseek_v3"), device="meta")
    assert with_balance_loss(plait.causal_lm_loss, without) is plait.causal_lm_loss


def test_biases_move_towards_the_mean():
    """Biases do not move in evaluation or for a skipped step. They move once for all micro-batches."""
    model = build(Case("deepseek_v3"))
    names = biased_routers(model)
    hook, ids = BiasUpdate(model, names, rate=0.5, group=None), torch.arange(12).view(1, 12)
    before = biases(model)
    model.eval()(input_ids=ids)
    with torch.no_grad():
        model.train()(input_ids=ids)
    hook.finish_reduction()
    hook.after_step(StepEnd(skipped=False))
    assert all(torch.equal(before[name], bias) for name, bias in biases(model).items())
    counts = {}

    def count(name, module, args, output):
        counts[name] = counts.get(name, 0) + torch.bincount(output[2].flatten(), minlength=8)

    for name in names:
        model.get_submodule(name).register_forward_hook(partial(count, name))
    for skipped, tokens in ((True, torch.zeros(1, 60, dtype=torch.int64)), (False, ids)):
        counts.clear()
        for _ in range(2):
            model(input_ids=tokens).logits.sum().backward()
        hook.finish_reduction()
        hook.after_step(StepEnd(skipped=skipped))
        for name in names:
            bias = f"{name}.e_score_correction_bias"
            change = 0 if skipped else 0.5 * (6 - counts[name]).sign()
            torch.testing.assert_close(biases(model)[bias], before[bias] + change)
    hook.release()


def check(case, parallel, rate, **changes):
    model = build(case, device="meta")
    for name, value in changes.items():
        if name == "dtype":
            model.to(value)
        if name == "gradient_checkpointing":
            model.model.gradient_checkpointing = value
    world = 1
    for axis in ("pp", "tp", "dp_replicate", "dp_shard"):
        world *= parallel.get(axis, 1)
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    file = {**sizes, "parallel": parallel, "experts": {"bias_update_rate": rate}}
    resolved = resolve(load(file), world_size=world)
    check_all(resolved.context(model=model, blocks=find_blocks(model)))


REFUSED = [
    (Case("mixtral"), {}, 0.1, {}, "no module of MixtralForCausalLM has a buffer `e_score_correction_bias`"),
    (Case("deepseek_v3"), {}, 0.1, {"dtype": torch.bfloat16}, "is bfloat16, in which steps of this size are rounded away"),
    (Case("deepseek_v3"), {}, 0.1, {"gradient_checkpointing": True}, "recomputes its blocks itself"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "parallel", "rate", "changes", "message"), REFUSED)
def test_refused(case, parallel, rate, changes, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        check(case, parallel, rate, **changes)


@pytest.mark.parametrize(
    ("experts", "parallel", "message"),
    [
        ({"z_loss": 0.1}, {}, "experts.z_loss = 0.1: Plait adds it to plait.causal_lm_loss"),
        ({"balance": "global"}, {}, "experts.balance = .global.: Plait adds it"),
        ({}, {"pp": 2}, "model.config.output_router_logits = [Tt]rue: with parallel.pp = 2 the balance loss is a sum over the stages"),
    ],
)  # fmt: skip
def test_an_own_loop_is_refused_losses_that_it_would_leave_out(experts, parallel, message):
    file = {"train_micro_batch_size_per_gpu": 1, "experts": experts, "parallel": parallel}
    model, resolved = build(Case("mixtral", balance=True), device="meta"), resolve(load(file), world_size=2)  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        plait.parallelize(model, resolved)
