"""The search prices every layout of a cluster, and explains what it chose and excluded."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError
from plait.parallel.schedules.schedule import make_schedule
from plait.planner import explain, output
from plait.planner.calibrate import uncalibrated
from plait.planner.hardware import cluster
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import FAMILY, estimate_space, plan, price, ties
from plait.planner.space import space_of
from plait.planner.techniques import (
    SPLIT_BACKWARD,
    available_techniques,
    format_fixed,
    parse_fixed,
    supports_options,
    with_options,
)
from plait.sizes import GIB


def make_request(model="llama-3-8b", gpu="h100", gpus=16, batch=32, sequence=4096, **changes):
    model = find_model(model, sequence=sequence)
    return Request(model, cluster(gpu, gpus), batch, sequence, **changes)


@cache
def default_plan():
    """Return the plan of the default request, which several tests read."""
    return plan(make_request())


def test_the_best_layout_is_the_fastest_of_all_that_fit():
    small = make_request(gpus=4, batch=4)
    # Every layout without a pipeline, for which the closed form and the simulation agree, with
    # every option that it can have.
    space = space_of(small)
    is_new = np.diff(space.number, prepend=-1) != 0
    without_pipeline = space.layouts.take((np.asarray(space.layouts.pp) == 1) & is_new)
    layouts = with_options(without_pipeline, (*space.options.on_device, *space.options.on_host))
    fastest = float("inf")
    for choice in price(small, [layouts.as_dict(index) for index in range(len(layouts.tp))]):
        if choice.fit_probability >= 0.9 and choice.needed_bytes <= 79.1 * GIB:
            fastest = min(fastest, choice.seconds)

    best = plan(small, fixed={"pp": 1}).best[0]
    assert best.seconds == pytest.approx(fastest)
    assert plan(small).best[0].seconds <= best.seconds
    assert best.seconds_low < best.seconds < best.seconds_high
    assert best.needed_bytes < best.needed_high_bytes
    assert not best.layout["offload"]


def test_the_optimizer_is_on_the_host_only_if_nothing_else_fits():
    request = make_request()
    priced = estimate_space(request, space_of(request), uncalibrated())
    names = (
        *("tp", "pp", "schedule", "vpp", "sp"),
        *("dp_replicate", "dp_shard", "stage", "micro_batch"),
    )
    columns = [np.asarray(getattr(priced.layouts, name)).tolist() for name in names]
    on_host, on_device = set(), set()
    rows = zip(zip(*columns, strict=True), priced.layouts.offload, priced.needed_bytes, strict=True)
    for row, offload, needed_bytes in rows:
        if offload:
            on_host.add(row)
        elif needed_bytes < 0.8 * 79.1 * GIB:
            on_device.add(row)
    assert on_host and on_device and not on_host & on_device


def test_layouts_within_the_uncertainty_are_ties():
    result = default_plan()
    assert 1 <= result.ties <= len(result.best)
    families = {tuple(choice.layout[name] for name in FAMILY) for choice in result.best}
    assert len(families) == len(result.best)
    twin = replace(result.best[0], layout=dict(result.best[0].layout))
    slower = replace(twin, seconds=2 * twin.seconds)
    for choices, expected in (([twin, twin, slower], 2), ([twin], 1), ([], 0)):
        assert ties(result.request, choices, uncalibrated()) == expected


def test_every_candidate_is_a_layout_of_the_cluster():
    layouts = space_of(make_request()).layouts
    assert np.all(layouts.world == 16)
    assert np.all(layouts.dp * layouts.micro_batch * layouts.accumulation == 32)
    assert np.all((layouts.pp == 1) | (layouts.accumulation >= layouts.pp))
    assert np.all((layouts.stage > 0) | (layouts.dp_shard == 1))
    columns = [np.asarray(getattr(layouts, name)).tolist() for name in layouts.as_dict(0)]
    assert len(set(zip(*columns, strict=True))) == len(layouts.tp)
    # Some numbers of experts have no degrees.
    number = space_of(make_request("mixtral-8x7b", gpus=64, batch=64)).number
    assert number[0] >= 0 and np.all(np.diff(number) >= 0)


def test_there_are_no_more_stages_than_layers():
    """126 layers and two ends divide into 128 chunks, but every stage needs a layer."""
    layouts = space_of(make_request("llama-3-405b", gpus=2048, batch=512)).layouts
    assert (layouts.pp * layouts.vpp).max() == 64


RECOMPUTE_MODES = {0: "none", 2: "full", 3: "selective", 4: "budget"}


def test_every_proposed_layout_can_run():
    request = make_request()
    choices = plan(request, best=60).best
    assert {choice.layout["pp"] > 1 for choice in choices} == {True, False}
    for choice in choices:
        resolved = resolve(load(output.config_of(request, choice)), world_size=16)
        layout = choice.layout
        recompute = resolved.recompute
        assert (resolved.layout.tp, resolved.layout.pp) == (layout["tp"], layout["pp"])
        assert recompute.mode == RECOMPUTE_MODES[layout["recompute"]]
        assert recompute.every == layout["every"]
        assert resolved.loss_chunk_tokens == layout["loss_chunk"]
        if choice.budget is not None:
            assert recompute.budget_bytes == pytest.approx(choice.budget, rel=0.01)
        if layout["pp"] > 1:
            schedule = make_schedule(
                resolved.pipeline.schedule,
                pp=layout["pp"],
                microbatches=resolved.batch.accumulation,
                stages_per_rank=resolved.pipeline.stages_per_rank,
            )
            assert schedule.stages == layout["pp"] * layout["vpp"]
            assert not (schedule.splits_backward and layout["stage"] == 3)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "precision", "dtype"),
    [
        ("llama-3-8b", "h100", 16, "bf16", "bfloat16"),
        ("gpt2-xl", "v100", 8, "fp16", "float16"),
        ("qwen2.5-7b", "mi300x", 8, "bf16", "bfloat16"),
        ("gpt2", "cpu", 2, "fp32", None),
    ],
)
def test_the_written_file_resolves_to_the_best_layout(model, gpu, gpus, precision, dtype, tmp_path):
    request = make_request(model, gpu, gpus, batch=64, sequence=512, precision=precision)
    result = plan(request)
    file, estimates = output.write(result, tmp_path / "run.json")
    assert "auto" not in json.dumps(json.loads(file.read_text()))

    resolved = resolve(load(file), world_size=gpus)
    layout = result.best[0].layout
    degrees = {name: layout[name] for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    assert resolved.layout.degrees == {**degrees, "cp": 1}
    assert resolved.batch.train_batch_size == 64
    assert resolved.batch.micro_batch_size == layout["micro_batch"]
    assert resolved.batch.accumulation == layout["accumulation"]
    assert resolved.data_parallel.stage == layout["stage"]
    assert resolved.tensor_parallel.sequence_parallel == bool(layout["sp"])
    assert resolved.precision.compute == dtype

    report = json.loads(estimates.read_text())
    step, memory = report["step"], report["memory"]
    assert sum(step["terms_seconds"].values()) == pytest.approx(step["seconds"])
    assert sum(memory["terms_bytes"].values()) == pytest.approx(memory["allocated_bytes"])


def test_other_settings_of_the_base_file_are_kept():
    base = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"steps": 7},
        "bf16": {"enabled": False},
        "fp16": {"hysteresis": 4},
    }
    parallel = {"tp": 16, "bucket_mib": 9.0}
    best = default_plan().best[0]
    config = output.config_of(make_request(), best, base | {"parallel": parallel})
    assert {name: config[name] for name in base} == base
    assert parallel.items() <= config["parallel"].items()


def test_a_model_that_does_not_fit_has_its_shortage():
    # 6.5 TB of states do not fit on the hosts either.
    result = plan(make_request("llama-3-405b", gpus=8, batch=8))
    assert result.best == ()
    least = min(result.shortages, key=lambda shortage: shortage.needed_bytes)
    assert least.needed_bytes > least.room and "of 79.1 GiB: " in str(least)
    assert sum(size for _, size in least.parts) < least.needed_bytes


def rules_of(request):
    """Return the rules that exclude regions of the space."""
    return {excluded.region: excluded.rule for excluded in space_of(request).excluded}


def test_rules_have_their_numbers():
    # This model has 28 heads.
    request = make_request("qwen2.5-7b", batch=64)
    rule = rules_of(request)["tp = 8"]
    assert "28 % 8 = 4" in rule and "1, 2, 4" in rule
    with pytest.raises(ConfigError, match=r"num_attention_heads is 28 and 28 % 8 = 4"):
        plan(request, fixed={"tp": 8})
    with pytest.raises(ConfigError, match=r"7 % 16 = 7"):
        plan(make_request(batch=7), fixed={"tp": 1})
    with pytest.raises(InputError, match="does not support it"):
        plan(make_request(gpu="v100", precision="bf16"))


def test_compiled_blocks_are_not_split():
    request = make_request(compile=True)
    assert np.all(space_of(request).layouts.tp == 1)
    assert any("torch.compile" in rule for rule in rules_of(request).values())


def test_the_family_of_the_model_limits_the_layouts():
    gpt2 = make_request("gpt2-xl", gpus=8, batch=16)
    assert not np.any(space_of(gpt2).layouts.sp)
    assert "dropout" in rules_of(gpt2)["sp"]
    # All ranks have all of its 25 heads.
    assert len(space_of(gpt2, {"tp": 2}).layouts.tp)

    mixtral = make_request("mixtral-8x7b", batch=16)
    layouts = space_of(mixtral, {"pp": 2, "stage": 1}).layouts
    assert np.all((layouts.tp == 1) | (layouts.ep % layouts.tp == 0)) and np.any(layouts.ep > 1)
    layouts = space_of(make_request("mixtral-8x7b", gpus=64, batch=64)).layouts
    assert np.any((layouts.ep > 1) & (layouts.dp_replicate > 1))
    deepseek = make_request("deepseek-v3", gpus=2048, batch=4096)
    assert np.all(space_of(deepseek).layouts.tp == 1)


def test_states_on_the_host_are_sharded():
    request = make_request()
    layouts = space_of(request).layouts
    assert np.all((layouts.offload == 0) | (layouts.stage > 0)) and np.any(layouts.offload == 1)
    result = plan(request, fixed={"offload": 100, "stage": 3})
    config = output.config_of(request, result.best[0])
    assert resolve(load(config), world_size=16).optimizer_offload.device == "cpu"
    # The host of CPU processes is their device.
    on_cpu = make_request("gpt2", "cpu", 2, batch=8, sequence=512, precision="fp32")
    assert not any(choice.layout["offload"] for choice in plan(on_cpu, best=20).best)


def test_no_more_of_the_optimizer_is_on_the_host_than_needed():
    request = make_request(gpu="a100-40gb", gpus=2, batch=16)
    fixed = {"stage": 3, "tp": 1, "pp": 1, "recompute": 2, "micro_batch": 4}
    full = plan(request, fixed={**fixed, "offload": 100}).best[0]
    partial = plan(request, fixed=fixed).best[0]
    share = partial.layout["offload"]
    assert 0 < share < 1 == full.layout["offload"]
    assert partial.seconds < full.seconds and partial.needed_bytes > full.needed_bytes
    config = output.config_of(request, partial)
    assert resolve(load(config), world_size=2).optimizer_offload.ratio == share
    assert f"{share:.0%} of the optimizer on the host" in explain.describe(partial.layout)


def test_fixed_values_are_kept():
    fixed = parse_fixed(["tp=4", "stage=3, mbs=2"])
    for choice in plan(make_request(), fixed=fixed, best=9).best:
        assert choice.layout.items() >= {"tp": 4, "stage": 3, "micro_batch": 2}.items()
    assert parse_fixed(["recompute=full", "sp=true"]) == {"recompute": 2, "sp": 1}
    fixed = parse_fixed(["recompute=selective", "schedule=interleaved-1f1b"])
    assert fixed == {"recompute": 3, "schedule": 3}
    with pytest.raises(ConfigError, match="must be FIELD=VALUE, where FIELD is a field of a"):
        parse_fixed(["speed=9"])


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (
            ["stage=3", "schedule=zbv", "pp=2"],
            "schedule=zbv, stage=3: for some tp, pp and cp no schedule runs with these values",
        ),
        (
            ["stage=0", "dp_shard=4"],
            "stage=0, dp_shard=4: dp_replicate x dp_shard must be the devices / (tp x pp x cp), "
            "and dp_shard must be 1",
        ),
        (["ep=2"], "ep=2: llama-3-8b has no experts"),
        (["sp=1", "tp=1"], "sp=1: sequence parallelism needs tp of at least 2"),
        (["accumulation=7", "tp=1", "pp=1"], "accumulation = 7 with dp = "),
        (["every=2", "recompute=none"], "recompute=none, every=2"),
    ],
)
def test_fixed_values_without_a_layout_are_refused(fixed, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(make_request(), fixed=parse_fixed(fixed))


@pytest.mark.parametrize("fixed", [["schedule=zbv"], ["schedule=1f1b"], ["vpp=2"]])
def test_a_fixed_value_of_a_pipeline_implies_a_pipeline(fixed):
    """The fastest layout has no pipeline (ZeRO alone), and would ignore the fixed value."""
    request = make_request()
    values = parse_fixed(fixed)
    result = plan(request, fixed=values, best=9)
    assert plan(request, fixed={"pp": 1}).best[0].seconds < result.best[0].seconds
    for choice in result.best:
        assert choice.layout["pp"] > 1 and choice.layout.items() >= values.items()

    rule = f"{format_fixed(values)} needs a pipeline, which has at least 2 stages"
    assert {excluded.region: excluded.rule for excluded in result.excluded}["pp = 1"] == rule
    with pytest.raises(ConfigError, match=f"pp = 1: {rule}"):
        plan(request, fixed={**values, "pp": 1})
    with pytest.raises(ConfigError, match=f"pp = 1: {rule}"):
        plan(replace(request, cluster=cluster("h100", 1)), fixed=values)


def test_the_remedy_for_heads_has_degrees_that_run():
    """tp = 3 divides the 24 heads, but not the 8 key-value heads."""
    request = make_request("llama-3.2-3b", batch=30)
    request = replace(request, cluster=cluster("h100", 30, devices_per_node=30))
    with pytest.raises(ConfigError, match=r"24 % 5 = 4; use 1, 2(?!,)"):
        space_of(request, {"tp": 5})
    with pytest.raises(ConfigError, match="num_key_value_heads is 8"):
        space_of(request, {"tp": 3})
    for tp in (1, 2):
        assert space_of(request, {"tp": tp}).size


def test_a_fixed_context_kind_implies_context_parallelism():
    ring = parse_fixed(["context=ring"])
    for choice in plan(make_request(), fixed=ring, best=9).best:
        assert choice.layout["cp"] > 1 and choice.layout["context"] == 1
    # Shorter parts of a sequence are not proposed, but may be fixed.
    short = make_request(sequence=1024)
    message = "cp = 1: context=ring needs cp of at least 2, .* for parts of at least 2,048"
    with pytest.raises(ConfigError, match=message):
        plan(short, fixed=ring)
    assert plan(short, fixed=ring | {"cp": 2}).best[0].layout["cp"] == 2


def test_a_fixed_interval_of_blocks_implies_recomputation():
    for choice in plan(make_request(), fixed=parse_fixed(["every=2"]), best=9).best:
        assert choice.layout["recompute"] > 0 and choice.layout["every"] == 2


def test_why_names_the_deciding_term():
    result = default_plan()
    best = result.best[0]
    tp = 8 if best.layout["tp"] != 8 else 4
    answer = explain.why(result, {"tp": tp}, f"tp={tp}")
    assert answer.other.layout["tp"] == tp
    assert f"tp={tp} is" in answer.reason and "slower" in answer.reason
    difference = sum(other - chosen for _, chosen, other in answer.differences)
    assert difference == pytest.approx(answer.other.seconds - best.seconds)

    assert "cannot be" in explain.why(result, {"tp": 3}, "tp=3").reason
    answer = explain.why(result, {"tp": int(best.layout["tp"])}, "tp")
    assert "is what the plan chose" in answer.reason
    answer = explain.why(result, {"tp": 1, "stage": 0, "pp": 1}, "tp=1, stage=0, pp=1")
    assert answer.other is None and "does not fit" in answer.reason and "GiB" in answer.reason


def test_why_keeps_fixed_values():
    fixed = {"pp": 4, "recompute": 2}
    result = plan(make_request(), fixed=fixed)
    answer = explain.why(result, {"stage": 0}, "stage=0", fixed=fixed)
    assert answer.other.layout.items() >= fixed.items()
    # A query against a fixed value says that it is faster.
    answer = explain.why(result, {"recompute": 0}, "recompute=none", fixed=fixed)
    assert answer.other.layout["pp"] == 4
    assert answer.other.seconds < result.best[0].seconds
    assert "% faster" in answer.reason and answer.reason.endswith("recompute=full is fixed")
    assert parse_fixed([format_fixed(fixed)]) == fixed


def test_why_answers_for_every_neighbour():
    result = plan(make_request(gpus=8, batch=16))
    queries = explain.neighbours(result)
    assert queries
    for query in queries:
        assert explain.why(result, parse_fixed([query]), query).reason


def test_sixteen_thousand_devices():
    result = plan(make_request("llama-3-405b", gpus=16384, batch=4096, sequence=8192))
    assert result.candidates > 40_000 and result.best


def test_a_split_backward_has_no_recomputation():
    recompute = RECOMPUTE.index("full")
    for name in (*SPLIT_BACKWARD, "1f1b"):
        schedule = SCHEDULES.index(name)
        splits = name in SPLIT_BACKWARD
        assert available_techniques().runs(name, pp=2, micro_batches=8, chunks=1 + splits, zero=1)
        assert supports_options(Layouts(schedule=schedule))
        assert supports_options(Layouts(schedule=schedule, recompute=recompute)) == (not splits)


def layouts_of(model, **fixed):
    """Return the best layouts of a model on one H100."""
    request = make_request(model, gpus=1, sequence=2048)
    return [choice.layout for choice in plan(request, fixed=fixed).best]


def test_states_that_do_not_fit_are_on_the_host():
    best = layouts_of("llama-3-8b")[0]
    assert (best["stage"], best["dp_shard"]) == (1, 1) and best["offload"] > 0


def test_stages_that_do_not_differ_are_shown_once():
    best, *others = layouts_of("gpt2")
    assert best["stage"] == 0 and best["offload"] == 0
    for layout in others:
        assert layout["offload"] > 0 or not layout["stage"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_fixed_stage_is_kept(stage):
    for offload in (0, 100):
        fixed = {"stage": stage, "offload": offload} if offload else {"stage": stage}
        best = layouts_of("gpt2", **fixed)[0]
        assert best["stage"] == stage and best["offload"] == offload / 100
