"""Time and memory in closed form: identities, directions and published figures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planner_accuracy.frameworks import datasheet_priors as unlearned_of_all
from benchmarks.planner_accuracy.frameworks import framework
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.model.blocks import find_blocks
from plait.parallel.parts import Parts
from plait.parallel.techniques.recompute import Recompute
from plait.planner.compute import layer_cost
from plait.planner.constants import Rates, datasheet_priors, fitted_priors
from plait.planner.hardware import PRECISIONS, cluster, device
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, Layouts, plait, stage_layers
from plait.planner.memory import MEMORY_TERMS as MEMORY_TERMS
from plait.planner.models import Model, from_config, named
from plait.planner.request import Request, estimate, job_of
from plait.planner.step_time import (
    STEP_TERMS,
    collective_seconds,
    expert_seconds,
    group,
    layer_traffic,
    send_seconds,
)
from plait.sizes import GIB

ONE_PROCESS = Mesh(Layout(), torch.device("cpu"), 0, None, None)


def one(value):
    return float(np.ravel(value)[0])


def layouts(**fields):
    return Layouts(**{name: np.array([value]) for name, value in fields.items()})


def job(model="llama-3-8b", gpu="h100", gpus=64, sequence=4096, precision="bf16", **fields):
    found = Request(Model(named(model), {}), cluster(gpu, gpus), 64, sequence, precision)
    return job_of(found, layouts(**fields))


LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp_shard": st.sampled_from([1, 2, 8]),
        "dp_replicate": st.sampled_from([1, 4]),
        "stage": st.sampled_from([0, 1, 2, 3]),
        "recompute": st.sampled_from([0, 1, 2, 3]),
        "micro_batch": st.sampled_from([1, 3]),
        "accumulation": st.sampled_from([4, 16]),
        "sp": st.sampled_from([0, 1]),
    }
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_terms_are_named_nonnegative_and_sum(fields):
    found = estimate(job(schedule=SCHEDULES.index("1f1b") if fields["pp"] > 1 else 0, **fields))
    assert set(found.step.terms) == set(STEP_TERMS) and set(found.memory.terms) == set(MEMORY_TERMS)
    for value in (*found.step.terms.values(), *found.memory.terms.values()):
        assert one(value) >= 0
    assert one(found.seconds) == pytest.approx(sum(map(one, found.step.terms.values())))
    assert one(found.memory.allocated) <= one(found.memory.reserved) <= one(found.memory.total)


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, st.sampled_from(["link_bandwidth", "nic_bandwidth", "memory_bandwidth"]))
def test_a_faster_machine_is_not_slower(fields, figure):
    before = job(schedule=SCHEDULES.index("1f1b") if fields["pp"] > 1 else 0, **fields)
    faster = {figure: getattr(before.device, figure) * 2}
    after = replace(before, device=replace(before.device, **faster))
    assert one(estimate(after).seconds) <= one(estimate(before).seconds) * (1 + 1e-12)


def test_recomputing_costs_time_and_saves_memory():
    results = [
        estimate(job(recompute=RECOMPUTE.index(kind), accumulation=4))
        for kind in ("none", "operators", "full")
    ]
    seconds = [one(result.seconds) for result in results]
    kept = [one(result.memory.terms["activations"]) for result in results]
    assert seconds == sorted(seconds) and seconds[0] < seconds[2] < 1.4 * seconds[0]
    assert kept == sorted(kept, reverse=True) and kept[2] < 0.1 * kept[0]


GATED = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "num_key_value_heads": 1}  # fmt: skip
BLOCKS = {
    "llama": GATED,
    "olmo2": GATED,
    "phi3": GATED,
    "gpt2": {"n_embd": 128, "n_head": 4, "n_inner": 512},
    "gpt2 without dropout": {"n_embd": 128, "n_head": 4, "n_inner": 512, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"hidden_size": 128, "ffn_dim": 512, "num_attention_heads": 4, "word_embed_proj_dim": 128},
    "opt without dropout": {"hidden_size": 128, "ffn_dim": 512, "num_attention_heads": 4, "word_embed_proj_dim": 128, "dropout": 0.0},
    "gpt_neox with dropout": {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "hidden_dropout": 0.1},
    "mixtral": {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **GATED, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
}  # fmt: skip
"""Fields of small configurations, by family."""
_WIDTHS = ("hidden_size", "intermediate_size", "n_embd", "n_inner", "ffn_dim", "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank")  # fmt: skip
_WIDE = (*_WIDTHS, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_products_are_those_of_the_engine(mode, name):
    """The planner's share of repeated FLOPs is that of the engine.

    The share is that of products with weights, relative to a forward's. The planner's block is 32 times as wide. Experts are computed by
    `bmm` here, which torch counts; Plait keeps as little of it as of the grouped product.
    """
    kind = name.split()[0]
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    tokens = {"vocab_size": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    fields = {**BLOCKS[name], layers: 2, **tokens}
    with_weights = [torch.ops.aten.mm, torch.ops.aten.addmm]
    options = {}
    if kind == "mixtral":
        with_weights.append(torch.ops.aten.bmm)
        options["experts_implementation"] = "batched_mm"

    def flops(recompute):
        config = AutoConfig.for_model(kind, **fields)
        model = AutoModelForCausalLM.from_config(config, **options).train()
        Recompute(mode=recompute).apply(Parts(model, tuple(find_blocks(model))), ONE_PROCESS)
        ids = torch.zeros(1, 16, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, use_cache=False).logits.sum().backward()
        counts = counter.get_flop_counts()["Global"]
        return sum(counts.get(operator, 0) for operator in with_weights)

    once = flops("none")
    repeated = (flops(mode) - once) / (once / 3)
    wide = {key: value * 32 if key in _WIDE else value for key, value in fields.items()}
    model = Model(from_config({"model_type": kind, **wide}), {})
    request = Request(model, cluster("h100", 8), 64, 4096)
    recompute = RECOMPUTE.index({"full": "full", "selective": "operators"}[mode])
    cost = layer_cost(job_of(request, layouts(recompute=recompute, micro_batch=8)), no_starts())
    again = cost.again - cost.elementwise - (cost.attention if mode == "full" else 0)
    assert 0.05 < repeated < 1.01
    assert one(again / cost.products) == pytest.approx(repeated, rel=0.05)


def traffic(job, axis):
    rates = fitted_priors().rates
    return one(layer_traffic(job, rates, layer_cost(job, rates))[axis])


def test_recomputed_collectives_are_those_of_the_engine():
    """The last of a forward's two all-reduces, or of its two gathers and two reduce-scatters, is not needed by the backward."""

    def tensor(**fields):
        return traffic(job(tp=8, **fields), "tp")

    full = RECOMPUTE.index("full")
    assert tensor(recompute=full) / tensor() == pytest.approx((4 + 1) / 4)
    assert tensor(recompute=full, sp=1) / tensor(sp=1) == pytest.approx((9 + 3) / 9)
    operators = RECOMPUTE.index("operators")  # keeps results of operators, and of no collective
    for sp in (0, 1):
        assert tensor(recompute=operators, sp=sp) == tensor(recompute=full, sp=sp)


def test_recomputed_experts_receive_their_tokens_again():
    def exchange(recompute):
        fields = {"gpus": 8, "dp_shard": 8, "stage": 1, "ep": 8}
        return traffic(job("mixtral-8x7b", recompute=RECOMPUTE.index(recompute), **fields), "ep")

    assert exchange("full") == exchange("operators") == pytest.approx(1.5 * exchange("none"))


def test_attention_with_narrow_values_costs_what_its_products_do():
    """A forward takes 2 s (k + v) per token and head. A backward takes three products of the keys' width and two of the values'."""
    found = job("deepseek-v3", gpus=8)
    equal_widths = replace(found, model=replace(found.model, value_dim=found.model.head_dim))
    narrow, equal = layer_cost(found, no_starts()), layer_cost(equal_widths, no_starts())
    assert one(narrow.attention / equal.attention) == pytest.approx((192 + 128) / (2 * 192))
    assert one(equal.attention_backward / equal.attention) == pytest.approx(2.5)
    ratio = (3 * 192 + 2 * 128) / (192 + 128)
    assert one(narrow.attention_backward / narrow.attention) == pytest.approx(ratio)


def test_attention_of_cut_sequences_is_kernel_and_combination():
    """Narrow values are padded, the backward computes capped scores again, and larger rings merge more."""

    def attention(name="llama-3-8b", family=None, **fields):
        found = job(name, gpus=8, **fields)
        model = found.model if family is None else replace(found.model, model_type=family)
        cost = layer_cost(replace(found, model=model, sequence=131072), no_starts())
        return np.array([one(cost.attention), one(cost.attention_backward)])

    uncut = attention()
    shares = {
        (kind, cp): attention(cp=cp, context=kind) * cp / uncut
        for kind in (0, 1, 2)
        for cp in (2, 8)
    }
    assert all(1 < share < 1.25 for pair in shares.values() for share in pair), shares
    assert shares[1, 8][0] - 1 > 2 * (shares[1, 2][0] - 1)
    padded, padded_backward = attention("deepseek-v3", cp=2, context=2)
    narrow, _ = attention("deepseek-v3")
    assert padded * 2 / narrow == pytest.approx(2 * 192 / (192 + 128), rel=0.05)
    assert padded_backward / padded == pytest.approx(2.5, rel=0.05)
    plain, capped = attention(cp=2, context=2), attention(family="gemma2", cp=2, context=2)
    assert capped[0] == plain[0]
    assert capped[1] - plain[1] == pytest.approx(uncut[0] / 2, rel=0.01)


def no_starts():
    """Rates of a device whose kernels take no time to start, so that products take what their FLOPs say."""
    return Rates({**fitted_priors().rates.values, "ramp": 1e-12})


def test_one_rank_sends_nothing():
    found = estimate(job(gpus=1)).step.terms
    terms = ("tp", "dp", "p2p", "idle", "cp", "ep", "contention")
    assert {name: one(found[name]) for name in terms} == dict.fromkeys(terms, 0)


@pytest.mark.parametrize(
    ("nodes", "microseconds", "gb_s"),
    # all-gather of 8 H100 a node: NCCL's own tuning, `src/graph/tuning.cc`
    [(2, 70, 410), (4, 146, 396), (8, 297, 390)],
)
def test_gathering_between_nodes_is_near_nccls_own_model(nodes, microseconds, gb_s):
    found = job(gpus=8 * nodes, dp_shard=8 * nodes)
    size = 2e9
    exact = {"link": 1.0, "nic": 1.0, "latency": 1.0, "congestion": 0.0}
    ideal = Rates(datasheet_priors().rates.values | exact)
    shards = group(found, "shard")
    seconds = one(collective_seconds(found, ideal, shards, size, "one_way"))
    expected = microseconds * 1e-6 + size * (1 - 1 / (8 * nodes)) / gb_s / 1e9
    assert seconds == pytest.approx(expected, rel=0.1)
    latency = one(collective_seconds(found, ideal, shards, 0.0, "one_way"))
    assert latency == pytest.approx(microseconds * 1e-6, rel=0.35)


def test_replicas_reduce_a_shard_each_over_their_own_ring():
    """8 billion float32 gradients on 8 x 8 H100, sharded inside a node, send 2 x 7/8 x 4 GB per rank."""
    rates = fitted_priors().rates

    def exposed(**fields):
        found = job(dp_shard=8, stage=3, **fields)
        found = replace(found, framework=replace(plait(), hidden_dp=0.0))
        return one(estimate(found).step.terms["dp"])

    reached = 50e9 * rates["nic"] / 8 ** rates["congestion"]
    expected = 2 * 7 / 8 * 4 * float(named("llama-3-8b").parameters) / 8 / reached
    assert expected > 0.1
    difference = exposed(gpus=64, dp_replicate=8) - exposed(gpus=8)
    assert difference == pytest.approx(expected * rates["dp"], rel=0.05)


def test_stages_send_what_a_rank_has():
    """A rank sends the full hidden state without sequence parallelism, and its share with it."""
    fields = {"pp": 2, "tp": 4, "dp_replicate": 8, "schedule": SCHEDULES.index("1f1b")}
    full, share = (
        send_seconds(job(sp=sp, accumulation=8, **fields), fitted_priors().rates) for sp in (0, 1)
    )
    start = one(plait().send_seconds)
    assert one(full) - start == pytest.approx(4 * (one(share) - start))


def test_a_token_goes_once_to_a_node_with_several_of_its_experts():
    """The expected number of nodes is counted in draws of 8 of 32 experts on 4 nodes."""
    drawn = np.random.default_rng(0).integers(0, 4, (100_000, 8))
    nodes = np.mean([len(set(row)) for row in drawn[:20_000].tolist()])
    slow = {name: constant.median for name, constant in datasheet_priors().constants.items()}
    rates = Rates(slow | {"latency": 1e-9})

    def megatrons_share(gpus):
        fields = {"gpus": gpus, "dp_shard": gpus, "ep": gpus, "stage": 1, "micro_batch": 1}
        ours = job("qwen3-235b-a22b", **fields)
        theirs = replace(ours, framework=framework("megatron-core"))
        return one(expert_seconds(theirs, rates, 0.0)) / one(expert_seconds(ours, rates, 0.0))

    assert megatrons_share(32) == pytest.approx(nodes / 8, rel=0.01)
    assert megatrons_share(8) == pytest.approx(1)


def test_wide_experts_reach_what_dense_layers_do():
    def products(expert_ffn):
        found = job("mixtral-8x7b", gpus=8, dp_shard=8, stage=1, micro_batch=1)
        found = replace(found, model=replace(found.model, expert_ffn=expert_ffn))
        return one(layer_cost(found, datasheet_priors().rates).products)

    narrow, wide = products(2000) - products(1000), products(29000) - products(28000)
    assert wide / narrow == pytest.approx(0.55, rel=0.01)


def korthikanti(model, tp, pp, vpp, micro_batch, **fields):
    """Activations of the first stage in GiB as arXiv 2205.05198 counts them: fp16, dropout, unfused attention."""
    schedule = 0
    if pp > 1:
        schedule = SCHEDULES.index("interleaved" if vpp > 1 else "1f1b")
    fields |= {"tp": tp, "pp": pp, "vpp": vpp, "schedule": schedule, "micro_batch": micro_batch}
    layout = layouts(accumulation=64, **fields)
    precision = PRECISIONS.index("fp16")
    found = Job(named(model), device("a100"), framework("Megatron-LM"), layout, 2048, precision)
    return one(estimate(found, unlearned_of_all().rates).memory.terms["activations"]) / GIB


@pytest.mark.parametrize(
    ("model", "tp", "pp", "vpp", "micro_batch", "plain", "selective"),
    # none, and selective recomputation with sequence parallelism: figures 1 and 7 of arXiv 2205.05198, in GiB
    [
        ("megatron-22b", 8, 1, 1, 4, 59.25, 9.56),
        ("gpt3-175b", 8, 8, 3, 1, 66.84, 12.35),
        ("megatron-530b", 8, 35, 3, 1, 114.0, 23.08),
        ("megatron-1t", 8, 64, 1, 1, 131.25, 26.56),
    ],
)  # fmt: skip
def test_activations_of_the_megatron_paper(model, tp, pp, vpp, micro_batch, plain, selective):
    degrees = (model, tp, pp, vpp, micro_batch)
    assert korthikanti(*degrees) == pytest.approx(plain, rel=0.1)
    recompute = RECOMPUTE.index("selective")
    assert korthikanti(*degrees, sp=1, recompute=recompute) == pytest.approx(selective, rel=0.1)


def test_every_zero_stage_updates_the_shards_alone():
    seconds = [
        one(estimate(job(gpus=8, dp_shard=8, stage=stage)).step.terms["optimizer"])
        for stage in (0, 1, 2, 3)
    ]
    assert seconds[1:] == [pytest.approx(seconds[0] / 8, rel=0.01)] * 3


def test_stages_are_cut_evenly_or_with_the_ends_counted():
    """Llama 3 405B has 126 layers."""

    def cut(pp, vpp):
        return tuple(int(one(x)) for x in stage_layers(job("llama-3-405b", pp=pp, vpp=vpp)))

    assert named("llama-3-405b").layers == 126
    assert cut(8, 8) == (16, 15, 15)  # 126 + 2 divide into 64 chunks
    assert cut(9, 1) == (14, 14, 14)
    assert cut(4, 1) == (32, 31, 31)
    assert cut(5, 1) == (26, 26, 25)


def test_attention_that_stays_whole_is_dearer():
    job_split = replace(job("gpt3-13b", tp=8), replicates_attention=False)
    split, full = estimate(job_split), estimate(replace(job_split, replicates_attention=True))
    attention = one(split.step.terms["attention"])
    assert one(full.step.terms["attention"]) == pytest.approx(8 * attention)
    assert one(full.step.terms["tp"]) > one(split.step.terms["tp"])
    assert one(full.memory.allocated) > one(split.memory.allocated)
