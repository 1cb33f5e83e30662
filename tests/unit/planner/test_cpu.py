"""Processes on CPU cores are priced with constants of their own."""

import numpy as np
import pytest

from plait.planner.calibrate import relevant, uncalibrated
from plait.planner.compute import layer_cost
from plait.planner.constants import Rates, fitted_priors
from plait.planner.hardware import cluster, only
from plait.planner.job import SCHEDULES, Layouts
from plait.planner.request import Request, estimate, job_of
from plait.planner.search import price, simulate_pipelines
from tests.unit.planner.jobs import layouts, llama, model_of

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192}
MODEL = model_of(llama(**SIZES, **HEADS, tie_word_embeddings=False))


def request_on(name, processes=2, precision="fp32"):
    return Request(MODEL, cluster(name, processes), 8, 128, precision)


CPU = request_on("cpu")
GPU = request_on("h100", precision="bf16")


def terms(request, rates=None, **layout):
    """Return the terms of a step in seconds."""
    step = estimate(job_of(request, layouts(**layout)), rates or fitted_priors().rates).step
    return {name: only(value) for name, value in step.terms.items()}


def scaled(name, factor):
    """Return the fitted rates with one of them multiplied by a factor."""
    values = dict(fitted_priors().rates.values)
    values[name] *= factor
    return Rates(values)


def test_launches_add_to_the_step_and_traffic_is_not_hidden():
    step = terms(CPU, dp_replicate=2, micro_batch=4)
    launch = job_of(CPU, Layouts()).framework.host_seconds * fitted_priors().rates["host"]
    # Forward and backward of 6 layers.
    assert step["host"] == pytest.approx(6 * 2 * float(launch), rel=1e-6)
    assert step["contention"] == 0 and step["dp"] > 0
    assert terms(GPU, dp_replicate=2, micro_batch=4)["contention"] > 0


def test_processes_slow_each_other_down_on_a_cpu_only():
    layout = {"dp_replicate": 2, "micro_batch": 4}
    for request, slower in ((CPU, True), (GPU, False)):
        base = terms(request, scaled("crowding.cpu", 1), **layout)
        crowded = terms(request, scaled("crowding.cpu", 4), **layout)
        for name in ("products", "elementwise"):
            assert (crowded[name] > base[name] * 1.05) == slower
    alone = request_on("cpu", processes=1)
    assert terms(alone, scaled("crowding.cpu", 4), micro_batch=8) == terms(alone, micro_batch=8)


@pytest.mark.parametrize("name", ["memory", "link", "latency"])
def test_a_cpu_has_constants_of_its_own(name):
    layout = {"tp": 2, "micro_batch": 4}
    assert terms(CPU, scaled(name, 2), **layout) == terms(CPU, **layout)
    assert terms(CPU, scaled(f"{name}.cpu", 2), **layout) != terms(CPU, **layout)
    assert terms(GPU, scaled(f"{name}.cpu", 2), **layout) == terms(GPU, **layout)


def test_float32_moves_twice_the_bytes_and_casts_nothing():
    layout = {"dp_replicate": 1, "tp": 2, "micro_batch": 1024}
    half = terms(GPU, **layout)
    single = terms(request_on("h100", precision="fp32"), **layout)
    # A norm of 16 bits computes in float32 too.
    assert 1.2 * half["elementwise"] < single["elementwise"] < 2 * half["elementwise"]
    assert single["tp"] == pytest.approx(2 * half["tp"], rel=0.05)


def test_every_micro_batch_but_the_first_adds_gradients():
    def accumulate(count):
        layout = {"dp_replicate": 2, "micro_batch": 4 // count, "accumulation": count}
        return terms(CPU, **layout)["accumulate"]

    assert accumulate(1) == 0 and accumulate(4) == pytest.approx(3 * accumulate(2))


def test_constants_are_fitted_on_their_own_kind_of_device():
    names = fitted_priors().time_names
    on_cpu = relevant(names, job_of(CPU, Layouts()))
    on_gpu = relevant(names, job_of(GPU, Layouts()))
    assert {"memory.cpu", "link.cpu", "latency.cpu", "crowding.cpu", "gemm.cpu"} <= set(on_cpu)
    assert not {"memory", "link", "latency", "ramp", "contention"} & set(on_cpu)
    assert {"memory", "link", "latency", "ramp"} <= set(on_gpu)
    assert not any(name.endswith(".cpu") for name in on_gpu)


def test_the_closed_form_is_near_the_simulation_with_a_head():
    layout = {"pp": 2, "schedule": SCHEDULES.index("1f1b"), "micro_batch": 1, "accumulation": 8}
    choice = price(CPU, [layout])[0]
    simulated = simulate_pipelines(CPU, [choice], uncalibrated())[0]
    assert choice.seconds == pytest.approx(simulated.seconds, rel=0.06)
    assert sum(simulated.terms.values()) == pytest.approx(simulated.seconds)


def test_sharded_gradients_are_packed_on_a_cpu():
    def grows(request, stage):
        layout = {"dp_shard": 2, "stage": stage, "micro_batch": 4}
        slow_packing = terms(request, scaled("packing.cpu", 2), **layout)
        return slow_packing["dp"] > terms(request, **layout)["dp"]

    assert [grows(CPU, stage) for stage in (1, 2, 3)] == [False, True, True]
    assert not grows(GPU, 3)


def test_small_products_are_as_efficient_on_a_cpu():
    small = terms(CPU, micro_batch=1, accumulation=8)["products"]
    large = terms(CPU, micro_batch=8, accumulation=1)["products"]
    assert small == pytest.approx(large, rel=0.02)


@pytest.mark.parametrize(
    ("length", "measured"), [(256, 13.1e-3 + 8.2e-3), (512, 54.8e-3 + 30.8e-3)]
)
def test_attention_dropout_draws_a_number_per_score_on_a_cpu(length, measured):
    """Seconds of forward and backward were measured on a core of an Intel Xeon, in float32."""
    seconds = {}
    for dropout in (0.0, 0.1):
        fields = {
            "model_type": "gpt2",
            "n_positions": length,
            "n_embd": 512,
            "n_layer": 2,
            "n_head": 8,
            "vocab_size": 100,
            "attn_pdrop": dropout,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        }
        for device in ("cpu", "h100"):
            request = Request(model_of(fields), cluster(device, 1), 2, length, "fp32")
            cost = layer_cost(job_of(request, Layouts(micro_batch=2)), fitted_priors().rates)
            passes = (cost.attention, cost.attention_backward)
            seconds[device, dropout] = np.array(list(map(only, passes)))
    assert (seconds["cpu", 0.1] > 1.4 * seconds["cpu", 0.0]).all()
    assert seconds["cpu", 0.1].sum() == pytest.approx(measured, rel=0.3)
    assert (seconds["h100", 0.1] == seconds["h100", 0.0]).all()
