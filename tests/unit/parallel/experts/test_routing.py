"""Routers: recognised modules, their balance loss, moving biases, and refused settings."""

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


class UserLoss(CausalLMLoss):
    """Loss of a user, who adds the losses of the routers."""


@pytest.mark.parametrize("family", SIZES)
def test_experts_and_routers_of_a_family(family):
    model = build(Case(family), device="meta")
    experts = find_experts(model)
    assert [module.count for module in experts] == [routers(model)[0].num_experts] * 2
    for module in experts:
        assert {name.rpartition(".")[0] for name in module.parameters} == {module.name}
    recorded = [model.get_submodule(router.name) for router in recorded_routers(model)]
    assert recorded == routers(model)
    assert len(biased_routers(model)) == (2 if family == "deepseek_v3" else 0)


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def _default_dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_default_dtype")
@pytest.mark.parametrize("mask", [False, True])
def test_balance_loss_equals_transformers(mask):
    """The loss has the same bits. Its sums pass through two stages."""
    model = build(replace(Case("mixtral"), balance=True), dtype=torch.float32)
    batch = {"input_ids": torch.arange(24).view(2, 12)}
    if mask:
        batch["attention_mask"] = (torch.arange(12) < torch.tensor([[7], [12]])).long()
    expected = model(**batch).aux_loss

    recorded = recorded_routers(model)
    first, second = (RouterStatistics(model, [each], experts=4, top_k=2) for each in recorded)
    first.begin(True, None)
    second.begin(True, None)
    model(**batch)
    # A pipeline sends the sums of the first stage to the second one.
    _, second._earlier_sums = first.end(None)
    actual = second.losses()[0]
    assert torch.equal(actual, expected)
    weights = [model.get_submodule(router.name).weight for router in recorded]
    gradients = torch.autograd.grad(actual, weights)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, weights), rtol=1e-5, atol=1e-9
    )


def check(model, *, parallel=None, **experts):
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "parallel": parallel or {},
        "experts": experts,
    }
    resolved = resolve(load(file), world_size=1)
    check_all(resolved.context(model=model, blocks=find_blocks(model)))


REFUSED = [
    ("deepseek_v3", {"balance": "global"}, "balance = .global.: DeepseekV3.* has no balance"),
    ("mixtral", {"balance": "global"}, "experts.balance = .global.: Mixtral.* has no balance"),
    ("mixtral", {"balance": "globally"}, "experts.balance"),
    ("mixtral", {"z_loss": -0.1}, "experts.z_loss"),
    ("llama", {"z_loss": 0.1}, "experts.z_loss = 0.1: LlamaForCausalLM has no experts, .*; use 0"),
    ("mixtral", {"bias_update_rate": 0.1}, "no module of Mixtral.* `e_score_correction_bias`"),
]


@pytest.mark.parametrize(("family", "experts", "message"), REFUSED)
def test_refused(family, experts, message):
    is_llama = family == "llama"
    model = cases.build("llama", tied=False) if is_llama else build(Case(family), device="meta")
    with pytest.raises((ConfigError, ModelError), match=message):
        check(model, **experts)


def test_biases_that_cannot_move_are_refused():
    narrow = build(Case("deepseek_v3"), device="meta").bfloat16()
    with pytest.raises(ModelError, match="is bfloat16, in which steps of this size are rounded"):
        check(narrow, bias_update_rate=0.1)
    # A block that recomputes itself would count its tokens twice.
    recomputing = build(Case("deepseek_v3"), device="meta")
    recomputing.model.gradient_checkpointing = True
    with pytest.raises(ModelError, match="recomputes its blocks itself"):
        check(recomputing, bias_update_rate=0.1)


def test_only_plaits_loss_is_balanced():
    model = build(Case("mixtral", balance=True), device="meta")
    for loss in (plait.causal_lm_loss, ChunkedCausalLMLoss(chunk_tokens=4)):
        balanced = with_balance_loss(loss, model)
        assert isinstance(balanced, BalancedLoss)
        assert balanced.coefficient == 0.05
        assert balanced.split_logits
    assert isinstance(with_balance_loss(UserLoss(), model), UserLoss)
    without = build(Case("deepseek_v3"), device="meta")
    assert with_balance_loss(plait.causal_lm_loss, without) is plait.causal_lm_loss


def test_losses_of_routers_with_a_user_loss_are_refused():
    model = build(Case("mixtral"), device="meta")
    statistics = partial(RouterStatistics, model, recorded_routers(model), experts=4, top_k=2)
    z_loss = statistics(balances=False, z_loss=0.1)
    message = "experts.z_loss = 0.1: it is added to plait.causal_lm_loss, and the loss is UserLoss"
    with pytest.raises(ConfigError, match=message):
        with_balance_loss(UserLoss(), model, z_loss)
    message = "experts.balance = .global.: it is added to plait.causal_lm_loss, .* loss is none"
    with pytest.raises(ConfigError, match=message):
        with_balance_loss(None, model, statistics(is_global=True))
    loss = with_balance_loss(plait.causal_lm_loss, model, z_loss)
    assert isinstance(loss, BalancedLoss)
    assert loss.coefficient == 0


@pytest.mark.parametrize(
    ("experts", "parallel", "message"),
    [
        ({"z_loss": 0.1}, {}, "experts.z_loss = 0.1: Plait adds it to plait.causal_lm_loss"),
        ({"balance": "global"}, {}, "experts.balance = .global.: Plait adds it"),
        ({}, {"pp": 2}, "config.output_router_logits = [Tt]rue: with parallel.pp = 2 the balance"),
    ],
)
def test_a_user_loop_that_would_omit_losses_is_refused(experts, parallel, message):
    file = {"train_micro_batch_size_per_gpu": 1, "experts": experts, "parallel": parallel}
    model = build(Case("mixtral", balance=True), device="meta")
    with pytest.raises(ConfigError, match=message):
        plait.parallelize(model, resolve(load(file), world_size=2))


def test_biases_move_towards_the_mean():
    """They move once for all micro-batches, and not in evaluation or for a skipped step."""
    model = build(Case("deepseek_v3"))
    names = biased_routers(model)
    hook = BiasUpdate(model, names, rate=0.5, group=None)
    ids = torch.arange(12).view(1, 12)
    before = biases(model)

    model.eval()(input_ids=ids)
    with torch.no_grad():
        model.train()(input_ids=ids)
    hook.finish_reduction()
    hook.after_step(StepEnd(skipped=False))
    torch.testing.assert_close(biases(model), before, rtol=0, atol=0)

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
            # 2 micro-batches of 12 tokens choose 2 of 8 experts each: 6 tokens per expert.
            change = 0 if skipped else 0.5 * (6 - counts[name]).sign()
            torch.testing.assert_close(biases(model)[bias], before[bias] + change)
    hook.release()
