"""The planner's differences for processes on CPU cores."""

import numpy as np
import pytest

from plait.planner.calibrate import relevant, uncalibrated
from plait.planner.compute import layer_cost
from plait.planner.constants import Rates, fitted_priors
from plait.planner.hardware import cluster
from plait.planner.job import SCHEDULES, Layouts
from plait.planner.models import Model, from_config
from plait.planner.request import Request, estimate, job_of
from plait.planner.search import price, simulate_pipelines

FIELDS = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
          "num_key_value_heads": 6, "vocab_size": 8192, "tie_word_embeddings": False}  # fmt: skip


def request(name="cpu", processes=2, precision="fp32"):
    model = Model(from_config(FIELDS, source="test"), {"config": FIELDS})
    return Request(model, cluster(name, processes), 8, 128, precision)


def terms(asked, rates=None, **layout):
    job = job_of(asked, Layouts(**{name: np.array([value]) for name, value in layout.items()}))
    found = estimate(job, rates or fitted_priors().rates).step.terms
    return {name: float(np.ravel(value)[0]) for name, value in found.items()}


def changed(**factors):
    values = dict(fitted_priors().rates.values)
    for name, factor in factors.items():
        values[name.replace("_", ".")] *= factor
    return Rates(values)


def test_launches_add_to_the_step_and_traffic_is_not_hidden():
    on_cpu = terms(request(), dp_replicate=2, micro_batch=4)
    assert on_cpu["host"] == pytest.approx(6 * 2 * job_host(request()), rel=1e-6)
    assert on_cpu["contention"] == 0 and on_cpu["dp"] > 0
    assert terms(request("h100", precision="bf16"), dp_replicate=2, micro_batch=4)["contention"] > 0


def job_host(asked):
    job = job_of(asked, Layouts())
    return float(job.framework.host_seconds * fitted_priors().rates["host"])


def test_processes_slow_each_other_down_on_a_cpu_only():
    for name, precision, slower in (("cpu", "fp32", True), ("h100", "bf16", False)):
        asked = request(name, precision=precision)
        one, more = (
            terms(asked, changed(crowding_cpu=factor), dp_replicate=2, micro_batch=4)
            for factor in (1, 4)
        )
        assert (more["products"] > one["products"] * 1.05) == slower
        assert (more["elementwise"] > one["elementwise"] * 1.05) == slower
    alone = request(processes=1)
    assert terms(alone, changed(crowding_cpu=4), micro_batch=8) == terms(alone, micro_batch=8)


@pytest.mark.parametrize("name", ["memory", "link", "latency"])
def test_a_cpu_has_constants_of_its_own(name):
    layout = {"tp": 2, "micro_batch": 4}
    base = terms(request(), **layout)
    assert terms(request(), changed(**{name: 2}), **layout) == base
    assert terms(request(), changed(**{f"{name}_cpu": 2}), **layout) != base
    gpu = request("h100", precision="bf16")
    assert terms(gpu, changed(**{f"{name}_cpu": 2}), **layout) == terms(gpu, **layout)


def test_float32_moves_twice_the_bytes_and_casts_nothing():
    gpu = {"dp_replicate": 1, "tp": 2, "micro_batch": 1024}
    half, whole = (
        terms(request("h100", precision=precision), **gpu) for precision in ("bf16", "fp32")
    )
    # A norm of 16 bits computes in float32 too.
    assert 1.2 * half["elementwise"] < whole["elementwise"] < 2 * half["elementwise"]
    assert whole["tp"] == pytest.approx(2 * half["tp"], rel=0.05)


def test_every_micro_batch_but_the_first_adds_gradients():
    found = [
        terms(request(), dp_replicate=2, micro_batch=4 // m, accumulation=m)["accumulate"]
        for m in (1, 2, 4)
    ]
    assert found[0] == 0 and found[2] == pytest.approx(3 * found[1])


def test_constants_are_fitted_on_their_own_kind_of_device():
    names = fitted_priors().time_names
    on_cpu = relevant(names, job_of(request(), Layouts()))
    on_gpu = relevant(names, job_of(request("h100", precision="bf16"), Layouts()))
    assert {"memory.cpu", "link.cpu", "latency.cpu", "crowding.cpu", "gemm.cpu"} <= set(on_cpu)
    assert not {"memory", "link", "latency", "ramp", "contention"} & set(on_cpu)
    assert {"memory", "link", "latency", "ramp"} <= set(on_gpu)
    assert not [name for name in on_gpu if name.endswith(".cpu")]


def test_the_closed_form_is_near_the_table_with_a_heavy_head():
    asked = request()
    layout = {"pp": 2, "schedule": SCHEDULES.index("1f1b"), "micro_batch": 1, "accumulation": 8}
    choice = price(asked, [layout])[0]
    table = simulate_pipelines(asked, [choice], uncalibrated())[0]
    assert choice.seconds == pytest.approx(table.seconds, rel=0.06)
    assert sum(table.terms.values()) == pytest.approx(table.seconds)


def test_sharded_gradients_are_packed_on_a_cpu():
    for stage, packs in ((1, False), (2, True), (3, True)):
        layout = {"dp_shard": 2, "stage": stage, "micro_batch": 4}
        one, more = (
            terms(request(), changed(packing_cpu=factor), **layout)["dp"] for factor in (1, 2)
        )
        assert (more > one) == packs
    gpu, layout = request("h100", precision="bf16"), {"dp_shard": 2, "stage": 3}
    assert terms(gpu, changed(packing_cpu=2), **layout) == terms(gpu, **layout)


def test_small_products_lose_no_ramp_on_a_cpu():
    small, large = (
        terms(request(), micro_batch=micro, accumulation=8 // micro)["products"] for micro in (1, 8)
    )
    assert small == pytest.approx(large, rel=0.02)


@pytest.mark.parametrize(
    ("heads", "length", "measured"), [(8, 256, (13.1e-3, 8.2e-3)), (8, 512, (54.8e-3, 30.8e-3))]
)
def test_attention_with_dropout_draws_a_number_per_score(heads, length, measured):
    """The case has two float32 samples and heads 64 wide. On a core of an Intel Xeon torch's kernel takes 10.3 and 38.3 ms in all."""
    seconds = {}
    for share in (0.0, 0.1):
        sizes = {"n_embd": 64 * heads, "n_layer": 2, "n_head": heads, "vocab_size": 100}
        dropout = {"attn_pdrop": share, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        fields = {"model_type": "gpt2", "n_positions": length, **sizes, **dropout}
        model = Model(from_config(fields), {"config": fields})
        for device in ("cpu", "h100"):
            asked = Request(model, cluster(device, 1), 2, length, "fp32")
            cost = layer_cost(job_of(asked, Layouts(micro_batch=2)), fitted_priors().rates)
            passes = (cost.attention, cost.attention_backward)
            seconds[device, share] = np.array([float(one) for one in passes])
    assert (seconds["cpu", 0.1] > 1.4 * seconds["cpu", 0.0]).all()
    assert seconds["cpu", 0.1].sum() == pytest.approx(sum(measured), rel=0.3)
    assert (seconds["h100", 0.1] == seconds["h100", 0.0]).all()
