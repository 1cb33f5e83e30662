"""Mixture-of-experts models compute what one process does, with Transformers' eager experts and its own loss: losses with the balance loss,
gradients, the norm, weights and the biases of routers, in float64, wherever experts are and whatever they go with."""

from __future__ import annotations

import re
from contextlib import closing
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
    deepseek_v3 zero3 ep2 dp2 rate0.01
""")
MORE = cases_of("""
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
"""test_combinations.py has what nobody chose."""


@pytest.mark.parametrize(
    "case", proof_after(len(QUICK), [*QUICK, *MORE], name=lambda case: case.name)
)
def test_equals_one_process(pool, case):
    """To 1e-10, two steps of two micro-batches, clipped, of uneven lengths, with padding."""
    assert_equal(case, pool.run(case.world, train, case))


def one_engine(rank, world, case, plain, folder):
    """(bytes, refusals, what checkpoints carried over to a layout without experts' own axes and back). Runs in a worker."""
    model, other = build(case), build(plain)
    plan = make_plan(model, tp=2, blocks=find_blocks(model)) if ("tp", 2) in case.degrees else None
    facts = model_facts(model, find_blocks(model), tensor_plan=plan)
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    refused = []
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        batch = {"input_ids": ids + engine.dp_rank, "labels": ids}
        engine.train_batch(batch)  # after which ranks know which buffers change
        handles = [router.register_forward_hook(balanced) for router in routers(model)]
        with count_traffic() as traffic:
            engine.train_batch(batch)
        for handle in handles:
            handle.remove()
        for call in (lambda: engine(ids), lambda: engine.generate([[1, 2, 3]])):
            with pytest.raises(InputError) as error:
                call()
            refused.append(str(error.value))
        rows = 2 * case.dp // plain.dp
        alone = {**configured(plain), "train_micro_batch_size_per_gpu": rows}
        without = plait.initialize(other, alone, loss_fn=plait.causal_lm_loss)
        mine = {
            name: entry if rows == 2 else entry[without.dp_rank :: 2]
            for name, entry in batch.items()
        }
        carried = carried_over((engine, batch), (without, mine), folder)
    return account_of(engine, facts, traffic.bytes(), rank), refused, carried


@pytest.mark.parametrize(
    ("case", "plain"),
    proof_after(
        2,
        [
            (case_of(text), case_of(plain))
            for text, plain in (
                ("mixtral ep2 dp2", "mixtral zero1 dp2"),
                ("mixtral cp2 ep2", "mixtral zero1 dp2"),
                ("mixtral zero3 ep2 dp4 hybrid", "mixtral zero1 dp4"),
                ("mixtral zero1 ep2 dp2", "mixtral dp2"),
                ("mixtral tp2 ep2", "mixtral zero1 dp2"),
                ("deepseek_v3 cp2 ep2 ring", "deepseek_v3 zero1 dp2"),
                ("deepseek_v3 tp2 ep2 sequence", "deepseek_v3 zero1 dp2"),
            )
        ],
        name=lambda case, plain: case.name,
    ),
)
def test_account_refusals_and_checkpoints(pool, case, plain, tmp_path):
    """An engine sends and holds what the ledger says, refuses what is not tested, and its checkpoint goes on without ep, cp and tp, as
    theirs goes on with them. Hybrid: experts are sharded over all ranks that have the same ones, also those of other replicas."""
    for account, refused, carried in pool.run(case.world, one_engine, case, plain, str(tmp_path)):
        assert account.sent == account.predicted_sent
        assert account.memory == account.predicted_memory
        assert ("cp", 2) in case.degrees or all(
            "is not tested with experts" in message for message in refused
        )
        assert max(map(abs, carried)) < 1e-12


def fast_path(rank, world, kind, dtype):
    """Losses of three steps. Runs in a worker."""
    degrees = (("ep", 2),) if world > 1 else ()
    case = Case("mixtral", 1, degrees, balance=True, dp=world, kind=kind)
    config = {**configured(case), "gradient_accumulation_steps": 4 // world}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    model = build(case, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    return tuple(
        float(engine.train_batch(step[engine.dp_rank * 4 // world :][: 4 // world]))
        for step in steps(case, 4)
    )


@pytest.mark.parametrize(
    ("dtype", "within"), [("bf16", 2e-2), pytest.param("fp32", 2e-6, marks=pytest.mark.proof)]
)
def test_grouped_products(pool, dtype, within):
    """In float32 and in bfloat16, against one process with eager experts."""
    (alone,) = pool.run(1, fast_path, "eager", "fp32")
    for found in pool.run(2, fast_path, "grouped_mm", dtype):
        assert found == pytest.approx(alone, rel=within)


def watched(rank, world, case):
    """(what it has trained, rows of an output that a user's hook saw). Runs in a worker."""
    model = build(case)
    seen: list[torch.Tensor] = []
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_hook(lambda module, args, output: seen.append(output))
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2))
    return (trace, {}), int(seen[-1].ne(0).any(1).sum())


def test_a_hook_is_given_all_tokens(pool):
    """With sequence parallelism each rank needs the results of its own tokens alone, unless someone looks."""
    case = case_of("mixtral tp2 ep2 balance uneven sequence")
    for result, rows in pool.run(2, watched, case):
        assert_equal(case, [result])
        assert rows == 2 * 18


def saved_config(rank, world, case, folder):
    """config.json before and after a step, and with the engine closed. Runs in a worker."""
    model, found = build(case), []

    def save():
        model.config.save_pretrained(f"{folder}/{rank}")
        found.append(Path(folder, str(rank), "config.json").read_text())

    save()
    with (
        keeping_float64(model),
        closing(plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)) as engine,
    ):
        engine.train_batch(steps(case, 2)[0])
        save()
    save()
    return found


@pytest.mark.parametrize("axis", proof_after(1, ["cp2", "pp2"]))
def test_the_models_configuration_is_the_users(pool, axis, tmp_path):
    """Also where the balance loss is not computed by the model: what is saved asks for it as before."""
    case = case_of(f"mixtral {axis} balance unmasked")
    for before, *after in pool.run(2, saved_config, case, str(tmp_path)):
        assert '"output_router_logits": true' in before
        assert after == [before, before]


def page(rank, world):
    """The steps that each block of code of the page has trained. Runs in a worker."""
    text = (Path(__file__).parents[2] / "docs/how-to/mixture-of-experts.md").read_text("utf-8")
    ids = torch.arange(30).view(2, 15)
    found = []
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        names: dict[str, Any] = {"plait": plait, "model": build(Case("mixtral"))}
        names["batches"] = [{"input_ids": ids, "labels": ids}] * 2
        exec(block, names)
        found.append(int(names["engine"].global_steps))
    return found


def test_the_page_runs(pool):
    """On two processes."""
    for found in pool.run(2, page):
        assert found and set(found) == {2}
