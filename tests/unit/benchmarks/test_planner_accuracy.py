"""Published runs as rows that are priced: frameworks by name, and what their rows mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import learn
from benchmarks.planner_accuracy.frameworks import fitted_priors, framework, without_name
from benchmarks.planner_accuracy.predict import evaluate
from benchmarks.planner_accuracy.runs import read_runs
from plait.planner import constants
from plait.planner.job import SCHEDULES, Framework
from tests.unit.planner.rows import ROW


def test_old_names_mean_what_they_meant_then():
    def stack(**changes):
        return str(
            read_runs([{**ROW, "framework": "Megatron-LM", **changes}]).variants[0].framework.name
        )

    assert (
        stack(gpu="A100-80GB", year="2021")
        == "megatron"
        == stack(gpu="A100-80GB", gated_mlp="n", n_kv_heads="")
    )
    assert (
        stack(gpu="A100-80GB", year="2024")
        == stack(gpu="H100")
        == stack(gpu="MI300X")
        == "megatron-modern"
    )


def test_names_tell_compilation_and_authors():
    def stack(name):
        found: Framework = framework(name, newer=True)
        return found

    assert (
        stack("torchtitan (0.2, 2026), not compiled").name == "torchtitan-eager"
        and stack("torchtitan, torch.compile").name == "torchtitan"
    )
    assert (
        stack("torchtitan eager (December 2024)").separate_norms
        == 1
        > stack("torchtitan eager (2026)").separate_norms
    )
    own, compiled = (
        stack("a trainer (PyTorch FSDP2), not compiled"),
        stack("a trainer (PyTorch FSDP2 + TP), torch.compile"),
    )
    assert (
        own.name == compiled.name == "torch-fsdp" and own.whole_logits == compiled.whole_logits == 1
    )
    assert (own.separate_norms, compiled.separate_norms) == (1, 0)
    inside = stack("Megatron-Core (NeMo 26.04 container), TP overlap, bf16 gradients")
    assert (
        inside.name == "megatron-modern"
        and inside.wire_reduce == 2
        and inside.hidden_tp > stack("Megatron-Core").hidden_tp
    )
    assert stack("NeMo 24.09 (Megatron-Core)").name == "megatron-bridge"
    assert without_name("torchtitan, not compiled") == "unknown"


def test_torchao_keeps_the_inputs_of_products_in_16_bits():
    layout = {"tp": "1", "pp": "1", "dp": "16", "recompute": "none"}
    for name, narrower in (("torchtitan, torch.compile", False), ("Megatron-Core", True)):
        wide, narrow = (
            one(framework=name, precision=precision, **layout).memory_terms["activations"]
            for precision in ("bf16", "fp8")
        )
        assert (narrow < 0.8 * wide) == narrower


def one(**changes):
    return evaluate([{**ROW, **changes}]).predictions[0]


def test_norms_of_queries_and_keys_are_work_and_memory():
    without, with_norms = (
        one(model_name=name, framework="torchtitan eager", recompute="none")
        for name in ("a Llama", "Qwen3-like")
    )
    assert with_norms.terms["elementwise"] > 1.02 * without.terms["elementwise"]
    assert with_norms.memory_terms["activations"] > without.memory_terms["activations"]


def test_fsdp_shards_weights_at_stage_2_unlike_deepspeed():
    layout = {
        "tp": "1",
        "pp": "1",
        "gpus_total": "16",
        "dp": "16",
        "global_batch": "16",
        "micro_batch": "1",
        "precision": "bf16 (amp)",
    }
    for stack, shards in (("torchtitan eager", 16), ("PyTorch FSDP", 16), ("DeepSpeed", 1)):
        two, three = (
            one(framework=stack, zero_or_fsdp=name, **layout)
            for name in ("FSDP2 SHARD_GRAD_OP", "FSDP FULL_SHARD")
        )
        assert two.memory_terms["weights"] == pytest.approx(
            three.memory_terms["weights"] * (1 if shards > 1 else 16), rel=0.01
        )
        assert two.memory_terms["gathered"] > three.memory_terms["gathered"] or shards == 1


def test_operations_that_python_dispatches_wait_for_their_host():
    layout = {
        "framework": "torchtitan eager",
        "pp": "1",
        "gpus_total": "16",
        "micro_batch": "1",
        "seq_len": "2048",
    }
    split, whole = (
        one(tp="2", dp="8", global_batch="8", **layout),
        one(tp="1", dp="16", global_batch="16", **layout),
    )
    assert split.terms["host"] > 5 * whole.terms["host"]


def test_an_optimizer_in_16_bits_moves_half_of_the_bytes():
    mixed, pure = (
        one(framework="torchtitan", precision=name).terms["optimizer"]
        for name in ("bf16 (amp)", "bf16 (pure)")
    )
    assert pure == pytest.approx(mixed * 14 / 28, rel=0.01)


def test_rows_of_no_framework_and_of_plait_are_priced_too():
    found = read_runs(
        [{**ROW, "framework": name} for name in ("", "Plait 0.1", "Megatron-LM zero bubble ZB-1p")]
    )
    assert found.job is not None
    assert [str(name) for name in found.job.framework.name] == [
        "other-modern",
        "plait",
        "megatron-modern",
    ]
    assert found.variants[2].layout["schedule"] == SCHEDULES.index("zb-h1")
    assert {
        f"stack.{name}" for name in found.job.framework.name
    } <= fitted_priors().constants.keys()


def test_predictions_do_not_depend_on_what_was_measured():
    one, other = (
        evaluate([{**ROW, "step_time_s": value, "peak_mem_gb": value}]).predictions[0]
        for value in ("2", "77")
    )
    assert one.seconds == other.seconds and one.total_bytes == other.total_bytes
    assert one.measured_seconds != other.measured_seconds


def test_planner_and_evaluation_read_the_fitted_constants(tmp_path, monkeypatch):
    shipped, stacks = Path(constants.__file__).parent / "data" / "constants.json", learn.STACKS
    monkeypatch.setattr(learn, "STACKS", tmp_path / "stacks.json")
    learn.write(fitted_priors(), tmp_path / "constants.json")
    assert (tmp_path / "stacks.json").read_text() == stacks.read_text()
    written, priors = (
        json.loads((tmp_path / "constants.json").read_text()),
        json.loads(shipped.read_text()),
    )
    assert (
        written.keys() == priors.keys()
        and written["constants"].items() >= priors["constants"].items()
    )
    assert not [
        name for name in written["constants"] if name.startswith("stack.") and name != "stack.plait"
    ]
