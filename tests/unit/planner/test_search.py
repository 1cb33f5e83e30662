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
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import FAMILY, estimate_space, plan, price, ties
from plait.planner.space import divisors, space_of
from plait.planner.techniques import format_fixed, parse_fixed, with_options
from plait.sizes import GIB


def request(model="llama-3-8b", gpu="h100", gpus=16, batch=32, sequence=4096, **changes):
    found = find_model(model, sequence=sequence)
    return Request(found, cluster(gpu, gpus), batch, sequence, **changes)


@cache
def default_plan():
    """The plan for the default request, which several tests read."""
    return plan(request())


def test_the_best_is_the_fastest_of_all_that_fit():
    """Price every candidate with every measure that it can have."""
    small = request(gpus=4, batch=4)
    space = space_of(small)
    is_new = np.diff(space.number, prepend=-1) != 0
    some = space.layouts.take((np.asarray(space.layouts.pp) == 1) & is_new)
    layouts = with_options(some, (*space.options.on_device, *space.options.on_host))
    fitting = [
        choice
        for choice in price(small, [layouts.as_dict(i) for i in range(len(layouts.tp))])
        if choice.fit_probability >= 0.9 and choice.needed_bytes <= 79.1 * GIB
    ]
    # Without a pipeline, the closed form and the walk agree.
    best = plan(small, fixed={"pp": 1}).best[0]
    assert best.seconds == pytest.approx(min(choice.seconds for choice in fitting))
    assert plan(small).best[0].seconds <= best.seconds
    assert best.seconds_low < best.seconds < best.seconds_high
    assert best.needed_bytes < best.needed_high_bytes
    assert not best.layout["offload"]


def test_the_optimizer_is_on_the_host_where_nothing_else_fits():
    priced = estimate_space(request(), space_of(request()), uncalibrated())
    names = ("tp", "pp", "schedule", "vpp", "sp", "dp_replicate", "dp_shard", "stage", "micro_batch")  # fmt: skip
    layouts = [np.asarray(getattr(priced.layouts, name)).tolist() for name in names]
    rows = list(zip(*layouts, strict=True))
    offload, room = priced.layouts.offload, 0.8 * 79.1 * GIB
    on_host = {row for row, host in zip(rows, offload, strict=True) if host}
    fits = {
        row
        for row, host, needed in zip(rows, offload, priced.needed_bytes, strict=True)
        if not host and needed < room
    }
    assert on_host and fits and not on_host & fits


def test_layouts_that_cannot_be_told_apart_are_ties():
    found = default_plan()
    assert 1 <= found.ties <= len(found.best)
    families = {tuple(choice.layout[name] for name in FAMILY) for choice in found.best}
    assert len(families) == len(found.best)
    twin = replace(found.best[0], layout=dict(found.best[0].layout))
    far = replace(twin, seconds=2 * twin.seconds)
    for choices, expected in (([twin, twin, far], 2), ([twin], 1), ([], 0)):
        assert ties(found.request, choices, uncalibrated()) == expected


def test_every_candidate_is_a_layout_of_the_cluster():
    at = space_of(request()).layouts
    assert np.all(at.world == 16)
    assert np.all(at.dp * at.micro_batch * at.accumulation == 32)
    assert np.all((at.pp == 1) | (at.accumulation >= at.pp))
    assert np.all((at.stage > 0) | (at.dp_shard == 1))
    # No degrees fit to some numbers of experts.
    number = space_of(request("mixtral-8x7b", gpus=64, batch=64)).number
    assert number[0] >= 0 and np.all(np.diff(number) >= 0)
    columns = [np.asarray(getattr(at, name)).tolist() for name in at.as_dict(0)]
    assert len(set(zip(*columns, strict=True))) == len(at.tp)


def test_no_more_stages_than_layers():
    """126 layers and two for the ends divide into 128 chunks; the engine gives every stage a layer."""
    asked = request("llama-3-405b", gpus=2048, batch=512)
    at = space_of(asked).layouts
    assert (at.pp * at.vpp).max() == 64


def test_only_what_this_version_runs_is_offered():
    default = request()
    found = plan(default, best=60).best
    assert {choice.layout["pp"] > 1 for choice in found} == {True, False}
    modes = {0: "none", 2: "full", 3: "selective", 4: "budget"}
    for choice in found:
        resolved = resolve(load(output.config_of(default, choice)), world_size=16)
        layout, recompute = choice.layout, resolved.recompute
        assert (resolved.layout.tp, resolved.layout.pp) == (layout["tp"], layout["pp"])
        assert (recompute.mode, recompute.every) == (modes[layout["recompute"]], layout["every"])
        assert resolved.loss_chunk_tokens == layout["loss_chunk"]
        if choice.budget is not None:
            assert recompute.budget_bytes == pytest.approx(choice.budget, rel=0.01)
        if layout["pp"] > 1:  # the schedule's own table exists for these numbers
            table = make_schedule(
                resolved.pipeline.schedule,
                pp=layout["pp"],
                microbatches=resolved.batch.accumulation,
                stages_per_rank=resolved.pipeline.stages_per_rank,
            )
            assert table.stages == layout["pp"] * layout["vpp"]
            assert not (table.splits_backward and layout["stage"] == 3)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [("llama-3-8b", "h100", 16), ("gpt2-xl", "v100", 8), ("qwen2.5-7b", "mi300x", 8), ("gpt2", "cpu", 2)],
)  # fmt: skip
def test_the_winner_loads_and_resolves_to_what_was_priced(model, gpu, gpus, tmp_path):
    precision = {"v100": "fp16", "cpu": "fp32"}.get(gpu, "bf16")
    model = find_model(model, sequence=512)
    found = plan(Request(model, cluster(gpu, gpus), 64, 512, precision))
    file, estimates = output.write(found, tmp_path / "run.json")
    resolved = resolve(load(file), world_size=gpus)
    at = found.best[0].layout
    degrees = {name: at[name] for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    assert resolved.layout.degrees == {**degrees, "cp": 1}
    batch = resolved.batch
    sizes = (batch.train_batch_size, batch.micro_batch_size, batch.accumulation)
    assert sizes == (64, at["micro_batch"], at["accumulation"])
    assert resolved.data_parallel.stage == at["stage"]
    assert resolved.tensor_parallel.sequence_parallel == bool(at["sp"])
    assert resolved.precision.compute == {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    assert "auto" not in json.dumps(json.loads(file.read_text()))
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
    config = output.config_of(request(), best, base | {"parallel": parallel})
    assert {name: config[name] for name in base} == base
    assert parallel.items() <= config["parallel"].items()


def test_what_does_not_fit_says_by_how_much():
    found = plan(request("llama-3-405b", gpus=8, batch=8))  # on the host neither: 6.5 TB of states
    assert found.best == ()
    least = min(found.shortages, key=lambda s: s.needed_bytes)
    assert least.needed_bytes > least.room and "of 79.1 GiB: " in str(least)
    assert sum(size for _, size in least.parts) < least.needed_bytes


def test_rules_name_their_numbers():
    # This model has 28 heads.
    rules = {e.region: e.rule for e in space_of(request("qwen2.5-7b", batch=64)).excluded}
    assert "28 % 8 = 4" in rules["tp = 8"] and "1, 2, 4" in rules["tp = 8"]
    with pytest.raises(ConfigError, match=r"num_attention_heads is 28 and 28 % 8 = 4"):
        plan(request("qwen2.5-7b", batch=64), fixed={"tp": 8})
    with pytest.raises(ConfigError, match=r"7 % 16 = 7"):
        plan(request(batch=7), fixed={"tp": 1})
    with pytest.raises(InputError, match="does not support it"):
        plan(request(gpu="v100", precision="bf16"))


def test_compiled_blocks_are_not_split():
    space = space_of(request(compile=True))
    assert np.all(space.layouts.tp == 1) and any("torch.compile" in e.rule for e in space.excluded)


def test_a_model_without_sequence_parallelism_is_planned_so():
    small = request("gpt2-xl", gpus=8, batch=16)
    space = space_of(small)
    assert not np.any(space.layouts.sp)
    assert any(e.region == "sp" and "dropout" in e.rule for e in space.excluded)
    assert len(space_of(small, {"tp": 2}).layouts.tp)  # 25 heads, whole on every rank
    mixtral = space_of(request("mixtral-8x7b", batch=16), {"pp": 2, "stage": 1}).layouts
    assert np.all((mixtral.tp == 1) | (mixtral.ep % mixtral.tp == 0)) and np.any(mixtral.ep > 1)
    replicated = space_of(request("mixtral-8x7b", gpus=64, batch=64)).layouts
    assert np.any((replicated.ep > 1) & (replicated.dp_replicate > 1))
    assert np.all(space_of(request("deepseek-v3", gpus=2048, batch=4096)).layouts.tp == 1)


def test_states_on_the_host_are_sharded_and_not_a_cpus():
    at = space_of(request()).layouts
    assert np.all((at.offload == 0) | (at.stage > 0)) and np.any(at.offload == 1)
    found = plan(request(), fixed={"offload": 100, "stage": 3})
    config = output.config_of(request(), found.best[0])
    assert resolve(load(config), world_size=16).optimizer_offload.device == "cpu"
    on_cpu = Request(find_model("gpt2", sequence=512), cluster("cpu", 2), 8, 512, "fp32")
    assert not any(choice.layout["offload"] for choice in plan(on_cpu, best=20).best)


def test_no_more_of_the_optimizer_is_on_the_host_than_must_be():
    asked = request(gpu="a100-40gb", gpus=2, batch=16)
    fixed = {"stage": 3, "tp": 1, "pp": 1, "recompute": 2, "micro_batch": 4}
    whole, open_ = (plan(asked, fixed=fixed | more).best[0] for more in ({"offload": 100}, {}))
    share = open_.layout["offload"]
    assert 0 < share < 1 == whole.layout["offload"]
    assert open_.seconds < whole.seconds and open_.needed_bytes > whole.needed_bytes
    config = output.config_of(asked, open_)
    assert resolve(load(config), world_size=2).optimizer_offload.ratio == share
    assert f"{share:.0%} of the optimizer on the host" in explain.describe(open_.layout)


def test_fixed_values_are_kept():
    for choice in plan(request(), fixed=parse_fixed(["tp=4", "stage=3, mbs=2"]), best=9).best:
        assert choice.layout.items() >= {"tp": 4, "stage": 3, "micro_batch": 2}.items()
    assert parse_fixed(["recompute=full", "sp=true"]) == {"recompute": 2, "sp": 1}
    fixed = parse_fixed(["recompute=selective", "schedule=interleaved-1f1b"])
    assert fixed == {"recompute": 3, "schedule": 3}
    for text, words in (
        ("recompute=some", "use none, full, selective, budget"),
        ("speed=9", "must be FIELD=VALUE, where FIELD is a field of a layout"),
        ("tp=many", "not a whole number"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_fixed([text])


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        (["stage=3", "schedule=zbv", "pp=2"], "schedule=zbv, stage=3: for some tp, pp and cp no schedule runs with these values"),
        (["stage=0", "dp_shard=4"], "stage=0, dp_shard=4: dp_replicate x dp_shard must be the devices / (tp x pp x cp), and dp_shard must be 1"),
        (["ep=2"], "ep=2: llama-3-8b has no experts"),
        (["sp=1", "tp=1"], "sp=1: sequence parallelism needs tp of at least 2"),
        (["accumulation=7", "tp=1", "pp=1"], "accumulation = 7 with dp = "),
    ],
)  # fmt: skip
def test_fixed_values_that_leave_nothing_are_named(fixed, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(request(), fixed=parse_fixed(fixed))


@pytest.mark.parametrize("fixed", [["schedule=zbv"], ["schedule=1f1b"], ["vpp=2"]])
def test_what_only_a_pipeline_has_makes_one(fixed):
    """Without a pipeline the fastest layout has none (ZeRO alone), and the fixed value would mean nothing."""
    default, values = request(), parse_fixed(fixed)
    found = plan(default, fixed=values, best=9)
    assert plan(default, fixed={"pp": 1}).best[0].seconds < found.best[0].seconds
    for choice in found.best:
        assert choice.layout["pp"] > 1 and choice.layout.items() >= values.items()
    rule = f"{format_fixed(values)} needs a pipeline, which has at least 2 stages"
    assert {e.region: e.rule for e in found.excluded}["pp = 1"] == rule
    for one, pp in ((replace(default, cluster=cluster("h100", 1)), {}), (default, {"pp": 1})):
        with pytest.raises(ConfigError, match=f"pp = 1: {rule}"):
            plan(one, fixed=values | pp)


def test_the_remedy_for_heads_names_degrees_that_run():
    """tp = 3 divides the 24 heads of this model, but neither divides its 8 key-value heads nor is divided by them."""
    asked = request("llama-3.2-3b", batch=30)
    asked = replace(asked, cluster=cluster("h100", 30, devices_per_node=30))
    with pytest.raises(ConfigError, match=r"24 % 5 = 4; use 1, 2(?!,)"):
        space_of(asked, {"tp": 5})
    with pytest.raises(ConfigError, match="num_key_value_heads is 8"):
        space_of(asked, {"tp": 3})
    for tp in (1, 2):
        assert space_of(asked, {"tp": tp}).size


def test_what_only_parts_of_sequences_have_makes_some():
    ring = parse_fixed(["context=ring"])
    for choice in plan(request(), fixed=ring, best=9).best:
        assert choice.layout["cp"] > 1 and choice.layout["context"] == 1
    short = request(sequence=1024)
    words = "cp = 1: context=ring needs cp of at least 2, which is only proposed for parts of at least 2,048"
    with pytest.raises(ConfigError, match=words):
        plan(short, fixed=ring)
    assert plan(short, fixed=ring | {"cp": 2}).best[0].layout["cp"] == 2


def test_every_nth_block_is_one_that_recomputes():
    found = plan(request(), fixed=parse_fixed(["every=2"]), best=9).best
    assert all(choice.layout["recompute"] > 0 and choice.layout["every"] == 2 for choice in found)
    with pytest.raises(ConfigError, match="recompute=none, every=2"):
        plan(request(), fixed=parse_fixed(["every=2", "recompute=none"]))


def test_why_names_the_deciding_term():
    found = default_plan()
    best = found.best[0]
    other = 8 if best.layout["tp"] != 8 else 4
    answer = explain.why(found, {"tp": other}, f"tp={other}")
    assert answer.other.layout["tp"] == other
    assert f"tp={other} is" in answer.reason and "slower" in answer.reason
    difference = sum(theirs - ours for _, ours, theirs in answer.differences)
    assert difference == pytest.approx(answer.other.seconds - best.seconds)
    assert "cannot be" in explain.why(found, {"tp": 3}, "tp=3").reason
    chosen = explain.why(found, {"tp": int(best.layout["tp"])}, "tp")
    assert "is what the plan chose" in chosen.reason
    refused = explain.why(found, {"tp": 1, "stage": 0, "pp": 1}, "tp=1, stage=0, pp=1")
    assert refused.other is None and "does not fit" in refused.reason and "GiB" in refused.reason


def test_why_keeps_what_is_fixed():
    """An answer says where a query against a fixed value is faster."""
    fixed = {"pp": 4, "recompute": 2}
    found = plan(request(), fixed=fixed)
    same = explain.why(found, {"stage": 0}, "stage=0", fixed=fixed)
    assert same.other.layout.items() >= fixed.items()
    against = explain.why(found, {"recompute": 0}, "recompute=none", fixed=fixed)
    assert against.other.layout["pp"] == 4
    assert against.other.seconds < found.best[0].seconds
    assert "% faster" in against.reason and against.reason.endswith("recompute=full is fixed")
    assert parse_fixed([format_fixed(fixed)]) == fixed


def test_neighbours_are_one_step_away():
    found = plan(request(gpus=8, batch=16))
    queries = explain.neighbours(found)
    assert queries
    assert all(explain.why(found, parse_fixed([query]), query).reason for query in queries)


def test_sixteen_thousand_devices():
    found = plan(request("llama-3-405b", gpus=16384, batch=4096, sequence=8192))
    assert found.candidates > 40_000 and found.best


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1]
