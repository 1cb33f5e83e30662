"""Mixture-of-experts models compute on every layout what one process computes, in float64.

The one process has Transformers' eager experts and its loss. Compared are losses with the balance
loss, gradients, the norm, weights and the biases of routers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import InputError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.experts import (
    Case,
    account_of,
    assert_equal,
    balanced,
    build,
    carried_over,
    case_of,
    cases_of,
    configured,
    routers,
    steps,
    train,
)

QUICK = cases_of("""
    mixtral dp2 balance full
    mixtral ep2 balance one dp2 full
    qwen3_moe zero2 tp2 ep2 balance one dp2 selective
    mixtral tp2 ep2 balance z0.01 sequence full
    mixtral balance global z0.01 dp2
    mixtral zero1 ep2 dp2 one balance states
    mixtral zero1 pp2 balance full
    mixtral ep2 balance dp4
    mixtral cp2 balance batched_mm budget ring
    deepseek_v3 zero3 ep2 dp2 rate0.01
""")
LONG = cases_of("""
    mixtral zero3 balance dp2 one chunk7
    qwen3_moe pp2 balance unmasked gpipe
    deepseek_v3 zero3 dp2 rate0.01 full
    deepseek_v3 pp2 rate0.01 selective
    gpt_oss dp2 balance unused selective
    qwen3_moe zero1 ep2 balance dp2 unused unmasked full
    gpt_oss zero2 ep2 dp2 one selective
    mixtral zero1 pp2 ep2 balance dp2 full
    mixtral cp2 ep2 balance ring full
    qwen3_moe cp2 balance unused ulysses
    deepseek_v3 cp2 ep2 rate0.01
    mixtral tp2 ep2 balance unused full
    deepseek_v3 tp2 ep2 rate0.01
    deepseek_v3 tp2 ep2 rate0.01 sequence
    mixtral zero3 cp2 ep2 balance one dp2 ring
    deepseek_v3 pp2 z0.01 unmasked
    qwen3_moe cp2 ep2 balance z0.01 ring
    mixtral zero3 ep2 dp4 one balance hybrid full
    qwen3_moe zero3 ep2 dp2 unused balance both
    mixtral zero3 ep2 dp4 one files
    mixtral zero2 cp2 ep2 balance global z0.02 dp2
    gpt_oss zero1 tp2 balance dp2 sequence
""")
"""test_combinations.py has a random sample of all combinations."""


@pytest.mark.parametrize(
    "case", proof_after(len(QUICK), [*QUICK, *LONG], name=lambda case: case.name)
)
def test_equals_one_process(pool, case):
    """Two clipped steps of two micro-batches of uneven lengths, with padding."""
    assert_equal(case, pool.run(case.world, train, case))


def account_and_refusals(rank, world, case, plain, folder):
    """Return bytes, refusals, and what checkpoints carry over to `plain` and back.

    Runs on every rank.
    """
    model = build(case)
    other_model = build(plain)
    plan = make_plan(model, tp=2, blocks=find_blocks(model)) if ("tp", 2) in case.degrees else None
    facts = model_facts(model, find_blocks(model), tensor_plan=plan)
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        batch = {"input_ids": ids + engine.dp_rank, "labels": ids}
        # Ranks agree in the first step on the buffers that change.
        engine.train_batch(batch)
        handles = [router.register_forward_hook(balanced) for router in routers(model)]
        with count_traffic() as traffic:
            engine.train_batch(batch)
        for handle in handles:
            handle.remove()

        refusals = []
        for call in (lambda: engine(ids), lambda: engine.generate([[1, 2, 3]])):
            with pytest.raises(InputError) as error:
                call()
            refusals.append(str(error.value))

        # Both layouts train on the same global batch.
        rows = 2 * case.dp // plain.dp
        config = {**configured(plain), "train_micro_batch_size_per_gpu": rows}
        other = plait.initialize(other_model, config, loss_fn=plait.causal_lm_loss)
        other_batch = batch
        if rows != 2:
            other_batch = {name: tensor[other.dp_rank :: 2] for name, tensor in batch.items()}
        differences = carried_over((engine, batch), (other, other_batch), folder)
    return account_of(engine, facts, traffic.bytes(), rank), refusals, differences


@pytest.mark.parametrize(
    ("case", "plain"),
    proof_after(
        2,
        [
            (case_of("mixtral ep2 dp2"), case_of("mixtral zero1 dp2")),
            (case_of("mixtral cp2 ep2"), case_of("mixtral zero1 dp2")),
            (case_of("mixtral zero3 ep2 dp4 hybrid"), case_of("mixtral zero1 dp4")),
            (case_of("mixtral zero1 ep2 dp2"), case_of("mixtral dp2")),
            (case_of("mixtral tp2 ep2"), case_of("mixtral zero1 dp2")),
            (case_of("deepseek_v3 cp2 ep2 ring"), case_of("deepseek_v3 zero1 dp2")),
            (case_of("deepseek_v3 tp2 ep2 sequence"), case_of("deepseek_v3 zero1 dp2")),
        ],
        name=lambda case, plain: case.name,
    ),
)
def test_account_refusals_and_checkpoints(pool, case, plain, tmp_path):
    """A checkpoint is resumed without ep, cp and tp, and one without them with them.

    With hybrid sharding, experts are sharded over all ranks that have the same ones, in all
    replicas.
    """
    for account, refusals, differences in pool.run(
        case.world, account_and_refusals, case, plain, str(tmp_path)
    ):
        assert account.sent == account.predicted_sent
        assert account.memory == account.predicted_memory
        if ("cp", 2) not in case.degrees:
            # Context parallelism refuses these calls for a reason of its own.
            assert all("is not tested with experts" in message for message in refusals)
        assert max(map(abs, differences)) < 1e-12


def losses_of_kernel(rank, world, kind, dtype):
    """Return the losses of three steps. Runs on every rank."""
    degrees = (("ep", 2),) if world > 1 else ()
    case = Case("mixtral", 1, degrees, balance=True, dp=world, kind=kind)
    accumulation = 4 // world
    config = {**configured(case), "gradient_accumulation_steps": accumulation}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    model = build(case, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    losses = []
    for step in steps(case, 4):
        micro_batches = step[engine.dp_rank * accumulation :][:accumulation]
        losses.append(float(engine.train_batch(micro_batches)))
    return losses


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bf16", 2e-2), pytest.param("fp32", 2e-6, marks=pytest.mark.proof)]
)
def test_grouped_matrix_products(pool, dtype, tolerance):
    (expected,) = pool.run(1, losses_of_kernel, "eager", "fp32")
    for losses in pool.run(2, losses_of_kernel, "grouped_mm", dtype):
        assert losses == pytest.approx(expected, rel=tolerance)


def train_with_hook(rank, world, case):
    """Return the trace, and rows of the output that a user's hook saw. Runs on every rank."""
    model = build(case)
    outputs = []
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_hook(lambda module, args, output: outputs.append(output))
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2))
    return (trace, {}), int(outputs[-1].ne(0).any(1).sum())


def test_a_hook_is_given_all_tokens(pool):
    """Sequence parallelism computes only the outputs of the rank's tokens if nothing looks."""
    case = case_of("mixtral tp2 ep2 balance uneven sequence")
    for result, rows in pool.run(2, train_with_hook, case):
        assert_equal(case, [result])
        assert rows == 2 * 18


def saved_configs(rank, world, case, folder):
    """Return config.json before a step, after it, and after `close`. Runs on every rank."""
    model = build(case)
    texts = []

    def save():
        model.config.save_pretrained(f"{folder}/{rank}")
        texts.append(Path(folder, str(rank), "config.json").read_text())

    save()
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        engine.train_batch(steps(case, 2)[0])
        save()
        engine.close()
    save()
    return texts


@pytest.mark.parametrize("axis", proof_after(1, ["cp2", "pp2"]))
def test_the_models_configuration_does_not_change(pool, axis, tmp_path):
    """Plait computes the balance loss in place of the model, and the file does not show it."""
    case = case_of(f"mixtral {axis} balance unmasked")
    for before, *after in pool.run(2, saved_configs, case, str(tmp_path)):
        assert '"output_router_logits": true' in before
        assert after == [before, before]


def steps_of_guide(rank, world):
    """Return the steps that each block of code of the guide has trained. Runs on every rank."""
    text = (Path(__file__).parents[2] / "docs/how-to/mixture-of-experts.md").read_text("utf-8")
    ids = torch.arange(30).view(2, 15)
    counts = []
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        variables: dict[str, Any] = {"plait": plait, "model": build(Case("mixtral"))}
        variables["batches"] = [{"input_ids": ids, "labels": ids}] * 2
        exec(block, variables)
        counts.append(int(variables["engine"].global_steps))
    return counts


def test_the_guide_trains(pool):
    for counts in pool.run(2, steps_of_guide):
        assert counts and set(counts) == {2}
