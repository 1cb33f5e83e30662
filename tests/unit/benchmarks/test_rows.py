"""Rows of published tables are read in all their spellings, or refused with a reason."""

import pytest

from benchmarks.planner_accuracy.row import count_of, network_bandwidth
from benchmarks.planner_accuracy.runs import measured_bytes, measured_seconds, read_runs
from plait.planner.hardware import PRECISIONS
from plait.planner.job import RECOMPUTE, SCHEDULES
from tests.unit.planner.rows import ROW


def variants(**changes):
    runs = read_runs([{**ROW, **changes}])
    assert not runs.reasons, runs.reasons
    return runs.variants


def layout(**changes):
    return variants(**changes)[0].layout


def reason(**changes):
    runs = read_runs([{**ROW, **changes}])
    assert not runs.variants
    return runs.reasons[0]


def test_a_complete_row_is_read():
    degrees = {"tp": 2, "pp": 2, "sp": 1, "dp_shard": 4, "stage": 1, "accumulation": 16}
    assert layout().items() >= (degrees | {"schedule": SCHEDULES.index("1f1b")}).items()


@pytest.mark.parametrize(
    ("text", "stage", "shard"),
    [
        ("FSDP FULL_SHARD", 3, 4),
        ("FSDP SHARD_GRAD_OP", 2, 4),
        ("ZeRO-1 sharded within 2 DP ranks", 1, 2),
        ("none (DDP)", 0, 1),
        ("ZeRO-3", 3, 4),
        ("FSDP2", 3, 4),
        ("ZeRO-1 (distributed optimizer)", 1, 4),
        ("", 1, 4),
        ("DistributedOptimizer (ZeRO-1)", 1, 4),
        ("ZeRO-2", 2, 4),
    ],
)
def test_spellings_of_sharding(text, stage, shard):
    degrees = layout(zero_or_fsdp=text)
    assert (degrees["stage"], degrees["dp_shard"]) == (stage, shard)
    assert degrees["dp_shard"] * degrees["dp_replicate"] == 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16 (O2, fp32 master)", "bf16"),
        ("fp8 rowwise (bf16 all-gather)", "fp8"),
        ("mxfp4 (last 5 layers bf16)", "fp4"),
        ("fp32", "fp32"),
    ],
)
def test_spellings_of_precision(text, name):
    variant = variants(gpu="B200", precision=text)[0]
    assert variant.precision == PRECISIONS.index(name)


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"model_name": "Qwen3-32B", "hidden": "5120", "n_heads": "64"}, 128),
        ({"model_name": "Qwen3-32B (head size 80 as run)", "hidden": "5120", "n_heads": "64"}, 80),
        ({"model_name": "mine (head_dim 128)", "hidden": "2560", "n_heads": "32"}, 128),
        ({"model_name": "mine", "hidden": "2560", "n_heads": "32", "head_dim": "96"}, 96),
        ({"model_name": "mine", "hidden": "2560", "n_heads": "32"}, 80),
    ],
)
def test_width_of_a_head(changes, width):
    assert variants(**changes)[0].model.head_dim == width


@pytest.mark.parametrize(
    ("text", "kind", "share"),
    [
        ("none", "none", 1.0),
        ("", "none", 1.0),
        ("full", "full", 1.0),
        ("selective", "selective", 1.0),
        ("selective (per-op SAC)", "operators", 1.0),
        ("selective layer (every 2nd)", "full", 0.5),
        ("full on 5 layers (recompute_num_layers=5)", "full", 5 / 32),
    ],
)
def test_spellings_of_recomputation(text, kind, share):
    values = layout(recompute=text)
    assert values["recompute"] == RECOMPUTE.index(kind)
    assert 1 / values["every"] == pytest.approx(share)


def test_open_values_become_variants():
    open_variants = variants(micro_batch="", vpp="")
    assert {v.layout["micro_batch"] for v in open_variants} == {1, 2, 4, 8, 16}
    assert {v.layout["vpp"] for v in open_variants} == {1, 2, 4}
    assert any("micro_batch 4" in v.assumed for v in open_variants)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_layers": "", "hidden": ""}, "not in the table"),
        ({"gpu": "TPUv4"}, "not in the catalogue"),
        ({"seq_len": ""}, "seq_len is not given"),
        ({"gpus_total": "15"}, "does not divide 15"),
        ({"global_batch": "", "micro_batch": ""}, "neither global_batch nor micro_batch"),
        ({"tp": ""}, "tp is not given"),
        ({"pp": "64", "gpus_total": "128"}, "64 stages and 32 layers"),
        ({"gpu": "V100-32GB", "precision": "fp8"}, "has no fp8"),
        ({"moe": "hybrid Mamba-MoE"}, "Mamba"),
        ({"moe": "MoE"}, "experts 'MoE'"),
        ({"gpus_total": ""}, "gpus_total is not given"),
    ],
)
def test_rows_that_cannot_be_priced_have_a_reason(changes, expected):
    assert expected in reason(**changes)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8),
        ("8.0", 8),
        ("8192 (packed)", 8192),
        ("128k", 131072),
        ("1,024", 1024),
        ("2e3", 2000),
    ],
)
def test_spellings_of_numbers(text, number):
    assert count_of({"x": text}, "x") == number


def test_other_texts_are_no_numbers():
    for text in ("", "n/a", "0", "-4", "nan", "inf", "1.2.3"):
        assert count_of({"x": text}, "x") is None, text


def test_a_known_model_needs_no_sizes():
    unknown = {"n_layers": "", "hidden": "", "n_heads": "", "tp": "1", "pp": "1"}
    experts = {"moe": "256/8", "ep": "8", "gpus_total": "64"}
    full = variants(**unknown, **experts, model_name="DeepSeekV3 (tokendrop)")
    assert int(full[0].model.experts) == 256
    cut = variants(**unknown | {"n_layers": "4"}, model_name="deepseekv3 truncated to 4 layers")
    assert int(cut[0].model.layers) == 4


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [
        ("8x200Gbps HDR IB per node (Selene)", 25),
        ("4 Omni-Path (OPA 100) links per node, NVLink", 6.25),
        ("IBM Cloud, 3.2 Tbps RoCE", 50),
        ("A100: 1600 Gbps RoCE/node (section title)", 25),
        ("4x100Gb RoCE inter-node", 6.25),
        ("AWS EFA 400 Gb/s per node", 6.25),
    ],
)
def test_spellings_of_networks(text, gb_s):
    assert network_bandwidth(text, 8) == pytest.approx(gb_s * 1e9)


def test_a_text_without_a_network_has_none():
    assert network_bandwidth("single node", 8) is None and network_bandwidth("", 8) is None


def test_schedules_are_read_from_names():
    assert layout(notes="zero bubble ZB-1p")["schedule"] == SCHEDULES.index("zb-h1")
    assert layout(notes="ZB-V schedule")["schedule"] == SCHEDULES.index("zbv")
    assert layout(vpp="4")["schedule"] == SCHEDULES.index("interleaved")


def test_measurements_and_their_units():
    assert measured_seconds({"derived_step_time_s": "3"}) == 3
    rate = {
        "tokens_per_s_per_gpu": "1000",
        "global_batch": "10",
        "seq_len": "1000",
        "gpus_total": "5",
    }
    assert measured_seconds(rate) == pytest.approx(2)
    assert measured_seconds({"step_time_s": "n/a"}) is None
    allocated = "max over ranks of torch max_memory_allocated, GiB -> GB (reserved 70 GiB)"
    for definition, kind in (
        ("torch max reserved, GiB -> GB", "reserved"),
        (allocated, "allocated"),
        ("nvidia-smi snapshot GB", "total"),
    ):
        assert measured_bytes({"peak_mem_gb": "10", "mem_def": definition}) == (10e9, kind)
    assert measured_bytes({"peak_mem_gb": ""}) is None


def test_many_rows_are_one_job():
    gpus = ("H100", "A100-80GB", "B200")
    runs = read_runs([{**ROW, "id": str(i), "gpu": gpu} for i, gpu in enumerate(gpus)])
    assert [variant.row for variant in runs.variants] == [0, 1, 2]
    assert len(set(runs.job.device.memory_bandwidth)) == 3
