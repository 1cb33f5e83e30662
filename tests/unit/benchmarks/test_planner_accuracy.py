"""Frameworks of published runs are read from their names, and priced as they run."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import learn, published
from benchmarks.planner_accuracy.frameworks import fitted_priors, framework, without_name
from benchmarks.planner_accuracy.predict import evaluate
from benchmarks.planner_accuracy.runs import read_runs
from plait.planner import constants
from plait.planner.job import SCHEDULES
from tests.unit.planner.rows import ROW


def test_a_name_means_the_release_of_its_time():
    def stack(**changes):
        variant = read_runs([{**ROW, "framework": "Megatron-LM", **changes}]).variants[0]
        return str(variant.framework.name)

    assert stack(gpu="A100-80GB", year="2021") == "megatron"
    assert stack(gpu="A100-80GB", gated_mlp="n", n_kv_heads="") == "megatron"
    for changes in ({"gpu": "A100-80GB", "year": "2024"}, {"gpu": "H100"}, {"gpu": "MI300X"}):
        assert stack(**changes) == "megatron-modern"


def test_names_contain_compilation_and_authors():
    stack = partial(framework, newer=True)
    for text, name in (
        ("torchtitan (0.2, 2026), not compiled", "torchtitan-eager"),
        ("torchtitan, torch.compile", "torchtitan"),
        ("a trainer (PyTorch FSDP2), not compiled", "torch-fsdp"),
        ("a trainer (PyTorch FSDP2 + TP), torch.compile", "torch-fsdp"),
        ("Megatron-Core (NeMo 26.04 container), TP overlap, bf16 gradients", "megatron-modern"),
    ):
        assert stack(text).name == name
    assert stack("torchtitan eager (December 2024)").separate_norms == 1
    assert stack("torchtitan eager (2026)").separate_norms < 1
    eager = stack("a trainer (PyTorch FSDP2), not compiled")
    compiled = stack("a trainer (PyTorch FSDP2 + TP), torch.compile")
    assert eager.whole_logits == compiled.whole_logits == 1
    assert (eager.separate_norms, compiled.separate_norms) == (1, 0)
    overlapped = stack("Megatron-Core (NeMo 26.04 container), TP overlap, bf16 gradients")
    assert overlapped.wire_reduce == 2
    assert overlapped.hidden_tp > stack("Megatron-Core").hidden_tp
    assert stack("NeMo 24.09 (Megatron-Core)").name == "megatron-bridge"
    assert without_name("torchtitan, not compiled") == "unknown"


def test_torchao_keeps_the_inputs_of_products_in_16_bits():
    layout = {"tp": "1", "pp": "1", "dp": "16", "recompute": "none"}
    for name, narrower in (("torchtitan, torch.compile", False), ("Megatron-Core", True)):
        wide = predict(framework=name, precision="bf16", **layout).memory_terms
        narrow = predict(framework=name, precision="fp8", **layout).memory_terms
        assert (narrow["activations"] < 0.8 * wide["activations"]) == narrower


def predict(**changes):
    return evaluate([{**ROW, **changes}]).predictions[0]


def test_norms_of_queries_and_keys_are_work_and_memory():
    run = {"framework": "torchtitan eager", "recompute": "none"}
    without = predict(model_name="a Llama", **run)
    with_norms = predict(model_name="Qwen3-like", **run)
    assert with_norms.terms["elementwise"] > 1.02 * without.terms["elementwise"]
    assert with_norms.memory_terms["activations"] > without.memory_terms["activations"]


def test_fsdp_shards_weights_at_stage_2_unlike_deepspeed():
    run = {
        "tp": "1",
        "pp": "1",
        "gpus_total": "16",
        "dp": "16",
        "global_batch": "16",
        "micro_batch": "1",
        "precision": "bf16 (amp)",
    }
    for stack, copies in (("torchtitan eager", 1), ("PyTorch FSDP", 1), ("DeepSpeed", 16)):
        two = predict(framework=stack, zero_or_fsdp="FSDP2 SHARD_GRAD_OP", **run).memory_terms
        three = predict(framework=stack, zero_or_fsdp="FSDP FULL_SHARD", **run).memory_terms
        assert two["weights"] == pytest.approx(copies * three["weights"], rel=0.01)
        assert two["gathered"] > three["gathered"] or copies > 1


def test_operations_that_python_dispatches_wait_for_their_host():
    run = {
        "framework": "torchtitan eager",
        "pp": "1",
        "gpus_total": "16",
        "micro_batch": "1",
        "seq_len": "2048",
    }
    split = predict(tp="2", dp="8", global_batch="8", **run)
    unsplit = predict(tp="1", dp="16", global_batch="16", **run)
    assert split.terms["host"] > 5 * unsplit.terms["host"]


def test_an_optimizer_in_16_bits_moves_half_of_the_bytes():
    mixed = predict(framework="torchtitan", precision="bf16 (amp)").terms["optimizer"]
    pure = predict(framework="torchtitan", precision="bf16 (pure)").terms["optimizer"]
    # Bytes per parameter that the step reads and writes.
    assert pure == pytest.approx(mixed * 14 / 28, rel=0.01)


def test_rows_of_no_framework_and_of_plait_are_priced_too():
    names = ("", "Plait 0.1", "Megatron-LM zero bubble ZB-1p")
    runs = read_runs([{**ROW, "framework": name} for name in names])
    stacks = list(map(str, runs.job.framework.name))
    assert stacks == ["other-modern", "plait", "megatron-modern"]
    assert runs.variants[2].layout["schedule"] == SCHEDULES.index("zb-h1")
    assert {f"stack.{name}" for name in stacks} <= fitted_priors().constants.keys()


def test_predictions_do_not_depend_on_what_was_measured():
    small = predict(step_time_s="2", peak_mem_gb="2")
    large = predict(step_time_s="77", peak_mem_gb="77")
    assert small.seconds == large.seconds and small.total_bytes == large.total_bytes
    assert small.measured_seconds != large.measured_seconds


def test_planner_and_evaluation_read_the_fitted_constants(tmp_path, monkeypatch):
    shipped = Path(constants.__file__).parent / "data" / "constants.json"
    stacks = learn.STACKS
    monkeypatch.setattr(learn, "STACKS", tmp_path / "stacks.json")
    learn.write(fitted_priors(), tmp_path / "constants.json")
    assert (tmp_path / "stacks.json").read_text() == stacks.read_text()
    written = json.loads((tmp_path / "constants.json").read_text())
    priors = json.loads(shipped.read_text())
    assert written.keys() == priors.keys()
    assert written["constants"].items() >= priors["constants"].items()
    names = {name for name in written["constants"] if name.startswith("stack.")}
    assert names <= {"stack.plait"}


def test_published_layout_is_compared_with_the_plan():
    run = {"model": "llama-3-8b", "gpu": "h100", "source": "a paper"}
    compared = published.compare(run, {**ROW, "id": ""})
    assert compared["published"].startswith("pp 2 (1f1b), tp 2 + sp, dp 4")
    assert compared["plan_seconds"] <= compared["theirs_seconds"]
