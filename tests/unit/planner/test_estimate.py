"""Time and memory in closed form: identities, directions and published figures."""

from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planner_accuracy import frameworks
from benchmarks.planner_accuracy.frameworks import framework
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.model.blocks import find_blocks
from plait.parallel.parts import Parts
from plait.parallel.techniques.recompute import Recompute
from plait.planner.compute import layer_cost
from plait.planner.constants import Rates, datasheet_priors, fitted_priors
from plait.planner.hardware import PRECISIONS, cluster, device, only
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, plait, stage_layers
from plait.planner.memory import MEMORY_TERMS
from plait.planner.models import named
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
from tests.unit.planner.jobs import job, layouts, model_of

ONE_PROCESS = Mesh(Layout(), torch.device("cpu"), 0, None, None)
NO_STARTUP = Rates({**fitted_priors().rates.values, "ramp": 1e-12})
"""Rates of a device whose kernels start in no time, so that time is proportional to FLOPs."""

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


def job_with_schedule(fields):
    """Return a job with 1F1B if it has a pipeline."""
    schedule = "1f1b" if fields["pp"] > 1 else "none"
    return job(schedule=SCHEDULES.index(schedule), **fields)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(LAYOUTS)
def test_terms_are_named_nonnegative_and_sum(fields):
    result = estimate(job_with_schedule(fields))
    step, memory = result.step, result.memory
    assert set(step.terms) == set(STEP_TERMS) and set(memory.terms) == set(MEMORY_TERMS)
    for value in (*step.terms.values(), *memory.terms.values()):
        assert only(value) >= 0
    assert only(result.seconds) == pytest.approx(sum(map(only, step.terms.values())))
    assert only(memory.allocated) <= only(memory.reserved) <= only(memory.total)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(LAYOUTS, st.sampled_from(["link_bandwidth", "nic_bandwidth", "memory_bandwidth"]))
def test_a_faster_machine_is_not_slower(fields, figure):
    before = job_with_schedule(fields)
    faster = replace(before.device, **{figure: getattr(before.device, figure) * 2})
    after = replace(before, device=faster)
    assert only(estimate(after).seconds) <= only(estimate(before).seconds) * (1 + 1e-12)


def test_recomputing_costs_time_and_saves_memory():
    seconds, activations = [], []
    for kind in ("none", "operators", "full"):
        result = estimate(job(recompute=RECOMPUTE.index(kind), accumulation=4))
        seconds.append(only(result.seconds))
        activations.append(only(result.memory.terms["activations"]))
    assert seconds == sorted(seconds) and seconds[0] < seconds[2] < 1.4 * seconds[0]
    assert activations == sorted(activations, reverse=True)
    assert activations[2] < 0.1 * activations[0]


GATED = {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
GPT2 = {"n_embd": 128, "n_head": 4, "n_inner": 512}
OPT = {"hidden_size": 128, "ffn_dim": 512, "num_attention_heads": 4, "word_embed_proj_dim": 128}
BLOCKS = {
    "llama": GATED,
    "olmo2": GATED,
    "phi3": GATED,
    "gpt2": GPT2,
    "gpt2 without dropout": {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": OPT,
    "opt without dropout": {**OPT, "dropout": 0.0},
    "gpt_neox with dropout": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "hidden_dropout": 0.1,
    },
    "mixtral": {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **GATED,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}
"""Small configurations. The first word of a name is the family."""
WIDTHS = (
    *("hidden_size", "intermediate_size", "n_embd", "n_inner", "ffn_dim", "word_embed_proj_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_products_are_those_of_the_engine(mode, name):
    """The FLOPs of products with weights that the backward repeats, relative to a forward."""
    kind = name.split()[0]
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    tokens = {"vocab_size": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    fields = {**BLOCKS[name], layers: 2, **tokens}
    products = [torch.ops.aten.mm, torch.ops.aten.addmm]
    options = {}
    if kind == "mixtral":
        # torch counts `bmm`, and Plait recomputes as little of it as of the grouped product.
        products.append(torch.ops.aten.bmm)
        options["experts_implementation"] = "batched_mm"

    def flops(recompute):
        config = AutoConfig.for_model(kind, **fields)
        model = AutoModelForCausalLM.from_config(config, **options).train()
        Recompute(mode=recompute).apply(Parts(model, tuple(find_blocks(model))), ONE_PROCESS)
        ids = torch.zeros(1, 16, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, use_cache=False).logits.sum().backward()
        counts = counter.get_flop_counts()["Global"]
        return sum(counts.get(operator, 0) for operator in products)

    without = flops("none")
    # A forward is a third of a step.
    expected = (flops(mode) - without) / (without / 3)
    assert 0.05 < expected < 1.01

    # Wide blocks, because the planner also prices what does not grow with the square of widths.
    wide = {key: value * 32 if key in WIDTHS else value for key, value in fields.items()}
    request = Request(model_of({"model_type": kind, **wide}), cluster("h100", 8), 64, 4096)
    recompute = RECOMPUTE.index({"full": "full", "selective": "operators"}[mode])
    cost = layer_cost(job_of(request, layouts(recompute=recompute, micro_batch=8)), NO_STARTUP)
    recomputed = cost.again - cost.elementwise
    if mode == "full":
        recomputed = recomputed - cost.attention
    assert only(recomputed / cost.products) == pytest.approx(expected, rel=0.05)


def traffic(job, axis):
    rates = fitted_priors().rates
    return only(layer_traffic(job, rates, layer_cost(job, rates))[axis])


def test_recomputed_collectives_are_those_of_the_engine():
    """The backward does not need the last collective of a forward.

    A forward has two all-reduces, or two all-gathers and two reduce-scatters.
    """

    def tensor(recompute, **fields):
        return traffic(job(tp=8, recompute=RECOMPUTE.index(recompute), **fields), "tp")

    assert tensor("full") / tensor("none") == pytest.approx((4 + 1) / 4)
    assert tensor("full", sp=1) / tensor("none", sp=1) == pytest.approx((9 + 3) / 9)
    # Results of operators are kept, but not those of collectives.
    for sp in (0, 1):
        assert tensor("operators", sp=sp) == tensor("full", sp=sp)


def test_recomputed_experts_receive_their_tokens_again():
    def exchange(recompute):
        fields = {"gpus": 8, "dp_shard": 8, "stage": 1, "ep": 8}
        return traffic(job("mixtral-8x7b", recompute=RECOMPUTE.index(recompute), **fields), "ep")

    assert exchange("full") == exchange("operators") == pytest.approx(1.5 * exchange("none"))


def test_attention_with_narrow_values_costs_its_products():
    """A forward takes 2 s (k + v) FLOPs per token and head.

    A backward has three products of the keys' width and two of the values' width.
    """
    latent = job("deepseek-v3", gpus=8)
    equal_widths = replace(latent, model=replace(latent.model, value_dim=latent.model.head_dim))
    narrow = layer_cost(latent, NO_STARTUP)
    equal = layer_cost(equal_widths, NO_STARTUP)
    assert only(narrow.attention / equal.attention) == pytest.approx((192 + 128) / (2 * 192))
    assert only(equal.attention_backward / equal.attention) == pytest.approx(2.5)
    ratio = (3 * 192 + 2 * 128) / (192 + 128)
    assert only(narrow.attention_backward / narrow.attention) == pytest.approx(ratio)


def attention_seconds(name="llama-3-8b", family=None, **fields):
    """Return the seconds of attention over 131,072 tokens, of forward and backward."""
    base = job(name, gpus=8, sequence=131072, **fields)
    model = replace(base.model, model_type=family or base.model.model_type)
    cost = layer_cost(replace(base, model=model), NO_STARTUP)
    return np.array([only(cost.attention), only(cost.attention_backward)])


def test_context_parallel_attention_adds_the_combination():
    full = attention_seconds()
    shares = {}
    for kind in (0, 1, 2):
        for cp in (2, 8):
            shares[kind, cp] = attention_seconds(cp=cp, context=kind) * cp / full
            assert np.all((shares[kind, cp] > 1) & (shares[kind, cp] < 1.25)), (kind, cp)
    # A larger ring merges more partial results.
    assert shares[1, 8][0] - 1 > 2 * (shares[1, 2][0] - 1)


def test_context_parallel_attention_pads_narrow_values():
    padded, padded_backward = attention_seconds("deepseek-v3", cp=2, context=2)
    narrow, _ = attention_seconds("deepseek-v3")
    assert padded * 2 / narrow == pytest.approx(2 * 192 / (192 + 128), rel=0.05)
    assert padded_backward / padded == pytest.approx(2.5, rel=0.05)


def test_context_parallel_backward_repeats_capped_scores():
    plain = attention_seconds(cp=2, context=2)
    capped = attention_seconds(family="gemma2", cp=2, context=2)
    assert capped[0] == plain[0]
    assert capped[1] - plain[1] == pytest.approx(attention_seconds()[0] / 2, rel=0.01)


def test_one_rank_sends_nothing():
    terms = estimate(job(gpus=1)).step.terms
    for name in ("tp", "dp", "p2p", "idle", "cp", "ep", "contention"):
        assert only(terms[name]) == 0, name


@pytest.mark.parametrize(
    ("nodes", "microseconds", "gb_s"),
    # Latency and bandwidth of an all-gather with 8 H100 per node in NCCL's `src/graph/tuning.cc`.
    [(2, 70, 410), (4, 146, 396), (8, 297, 390)],
)
def test_all_gather_between_nodes_is_near_nccls_model(nodes, microseconds, gb_s):
    gather = job(gpus=8 * nodes, dp_shard=8 * nodes)
    size = 2e9
    exact = {"link": 1.0, "nic": 1.0, "latency": 1.0, "congestion": 0.0}
    ideal = Rates(datasheet_priors().rates.values | exact)
    shards = group(gather, "shard")
    seconds = only(collective_seconds(gather, ideal, shards, size, "one_way"))
    expected = microseconds * 1e-6 + size * (1 - 1 / (8 * nodes)) / gb_s / 1e9
    assert seconds == pytest.approx(expected, rel=0.1)
    latency = only(collective_seconds(gather, ideal, shards, 0.0, "one_way"))
    assert latency == pytest.approx(microseconds * 1e-6, rel=0.35)


def test_replicas_reduce_each_shard_over_their_own_ring():
    """8 billion float32 gradients on 8 x 8 H100, sharded inside a node.

    Each rank sends 2 x 7/8 x 4 GB.
    """
    rates = fitted_priors().rates

    def exposed(**fields):
        without_overlap = replace(plait(), hidden_dp=0.0)
        sharded = replace(job(dp_shard=8, stage=3, **fields), framework=without_overlap)
        return only(estimate(sharded).step.terms["dp"])

    bandwidth = 50e9 * rates["nic"] / 8 ** rates["congestion"]
    expected = 2 * 7 / 8 * 4 * float(named("llama-3-8b").parameters) / 8 / bandwidth
    assert expected > 0.1
    difference = exposed(gpus=64, dp_replicate=8) - exposed(gpus=8)
    assert difference == pytest.approx(expected * rates["dp"], rel=0.05)


def test_sequence_parallel_stages_send_a_share():
    def seconds(sp):
        """Return the time of a send without its start."""
        fields = {"pp": 2, "tp": 4, "dp_replicate": 8, "schedule": SCHEDULES.index("1f1b")}
        sending = job(sp=sp, accumulation=8, **fields)
        return only(send_seconds(sending, fitted_priors().rates)) - only(plait().send_seconds)

    assert seconds(sp=0) == pytest.approx(4 * seconds(sp=1))


def test_a_token_goes_once_to_a_node_with_several_experts():
    # Expected number of nodes if 8 of 32 experts on 4 nodes are drawn.
    draws = np.random.default_rng(0).integers(0, 4, (20_000, 8))
    nodes = np.mean([len(set(row)) for row in draws.tolist()])
    medians = {name: constant.median for name, constant in datasheet_priors().constants.items()}
    rates = Rates({**medians, "latency": 1e-9})

    def ratio(gpus):
        """Return Megatron-LM's time relative to Plait's, which sends a copy per expert."""
        fields = {"gpus": gpus, "dp_shard": gpus, "ep": gpus, "stage": 1, "micro_batch": 1}
        ours = job("qwen3-235b-a22b", **fields)
        megatron = replace(ours, framework=framework("megatron-core"))
        return only(expert_seconds(megatron, rates, 0.0)) / only(expert_seconds(ours, rates, 0.0))

    assert ratio(32) == pytest.approx(nodes / 8, rel=0.01)
    assert ratio(8) == pytest.approx(1)


def test_wide_experts_are_as_efficient_as_dense_layers():
    def products(expert_ffn):
        experts = job("mixtral-8x7b", gpus=8, dp_shard=8, stage=1, micro_batch=1)
        experts = replace(experts, model=replace(experts.model, expert_ffn=expert_ffn))
        return only(layer_cost(experts, datasheet_priors().rates).products)

    narrow = products(2000) - products(1000)
    wide = products(29000) - products(28000)
    assert wide / narrow == pytest.approx(0.55, rel=0.01)


def megatron_activations(model, tp, pp, vpp, micro_batch, **fields):
    """Return the activations of the first stage in GiB, counted as in arXiv 2205.05198.

    The paper has fp16, dropout and attention that is not fused.
    """
    schedule = "none"
    if pp > 1:
        schedule = "interleaved" if vpp > 1 else "1f1b"
    fields |= {"tp": tp, "pp": pp, "vpp": vpp, "schedule": SCHEDULES.index(schedule)}
    layout = layouts(accumulation=64, micro_batch=micro_batch, **fields)
    precision = PRECISIONS.index("fp16")
    megatron = framework("Megatron-LM")
    paper = Job(named(model), device("a100"), megatron, layout, 2048, precision)
    memory = estimate(paper, frameworks.datasheet_priors().rates).memory
    return only(memory.terms["activations"]) / GIB


@pytest.mark.parametrize(
    ("model", "tp", "pp", "vpp", "micro_batch", "plain", "selective"),
    # GiB without recomputation, and with selective recomputation and sequence parallelism.
    # Figures 1 and 7 of arXiv 2205.05198.
    [
        ("megatron-22b", 8, 1, 1, 4, 59.25, 9.56),
        ("gpt3-175b", 8, 8, 3, 1, 66.84, 12.35),
        ("megatron-530b", 8, 35, 3, 1, 114.0, 23.08),
        ("megatron-1t", 8, 64, 1, 1, 131.25, 26.56),
    ],
)
def test_activations_of_the_megatron_paper(model, tp, pp, vpp, micro_batch, plain, selective):
    degrees = (model, tp, pp, vpp, micro_batch)
    assert megatron_activations(*degrees) == pytest.approx(plain, rel=0.1)
    recomputed = megatron_activations(*degrees, sp=1, recompute=RECOMPUTE.index("selective"))
    assert recomputed == pytest.approx(selective, rel=0.1)


def test_every_zero_stage_updates_the_shards_alone():
    def optimizer_seconds(stage):
        return only(estimate(job(gpus=8, dp_shard=8, stage=stage)).step.terms["optimizer"])

    for stage in (1, 2, 3):
        assert optimizer_seconds(stage) == pytest.approx(optimizer_seconds(0) / 8, rel=0.01)


@pytest.mark.parametrize(
    ("pp", "vpp", "layers"),
    [
        # The 126 layers and the two ends divide into 64 chunks.
        (8, 8, (16, 15, 15)),
        (9, 1, (14, 14, 14)),
        (4, 1, (32, 31, 31)),
        (5, 1, (26, 26, 25)),
    ],
)
def test_stages_are_cut_evenly_or_with_the_ends_counted(pp, vpp, layers):
    assert named("llama-3-405b").layers == 126
    cut = stage_layers(job("llama-3-405b", pp=pp, vpp=vpp))
    assert tuple(map(only, cut)) == layers


def test_replicated_attention_costs_more():
    split_job = replace(job("gpt3-13b", tp=8), replicates_attention=False)
    split = estimate(split_job)
    replicated = estimate(replace(split_job, replicates_attention=True))
    attention = only(split.step.terms["attention"])
    assert only(replicated.step.terms["attention"]) == pytest.approx(8 * attention)
    assert only(replicated.step.terms["tp"]) > only(split.step.terms["tp"])
    assert only(replicated.memory.allocated) > only(split.memory.allocated)
