"""Analysis of a stored trace with known answers, and of the profiler's own events."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from plait.validation.profile import STEP_MARK, Event, analyse, events_of, kind_of, outside, union

TRACE = Path(__file__).parent / "trace.json"
"""Two steps with names as CUPTI gives them. Times are round numbers, in microseconds."""


def test_a_stored_trace():
    rows = json.loads(TRACE.read_text())
    events = [Event(name, start / 1e6, end / 1e6, place) for name, start, end, place in rows]
    numbers = analyse(events, 2)
    assert numbers["kernels_per_step"] == 5
    assert numbers["launches_per_step"] == 4
    assert numbers["host_waits_per_step"] == {"cudaStreamSynchronize": 0.5}
    assert numbers["seconds_per_step"] == pytest.approx(1100e-6)
    assert numbers["busy_seconds_per_step"] == pytest.approx(800e-6)
    assert numbers["idle_share"] == pytest.approx(600 / 2200)
    assert numbers["idle_seconds_between_steps"] == pytest.approx(200e-6)
    assert numbers["median_gap_seconds"] == pytest.approx(100e-6)
    assert numbers["longest_gap_seconds"] == pytest.approx(200e-6)
    kinds = numbers["seconds_per_step_by_kind"]
    assert kinds["products"] == pytest.approx(400e-6)
    assert kinds["attention"] == pytest.approx(200e-6)
    # Half of the all-gather runs under the product.
    assert kinds["collectives"] == pytest.approx(200e-6)
    assert numbers["exposed_seconds_per_step"]["collectives"] == pytest.approx(100e-6)
    assert numbers["longest_kernels"][0]["name"].startswith("nvjet")


def test_a_trace_without_kernels():
    numbers = analyse([], 3)
    assert numbers["kernels_per_step"] == 0 and numbers["idle_seconds_between_steps"] is None


def test_kinds_of_kernels():
    kinds = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "Memcpy DtoD (Device -> Device)": "other",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "other",
    }
    for name, kind in kinds.items():
        assert kind_of(name) == kind


def test_unions_and_differences_of_intervals():
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert outside([(0, 10)], [(1, 2), (4, 5), (9, 12)]) == [(0, 1), (2, 4), (5, 9)]
    assert outside([(0, 1), (5, 6)], []) == [(0, 1), (5, 6)]
    assert outside([(0, 2), (3, 6)], [(1, 4)]) == [(0, 1), (4, 6)]


def test_a_cpu_profile_has_no_kernels():
    """The fields of torch's events are those that are read."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(STEP_MARK):
        torch.ones(8).sum()
    assert recorded.events()
    assert events_of(recorded) == []
