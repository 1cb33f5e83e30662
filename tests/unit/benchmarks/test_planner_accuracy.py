"""Published runs as rows that are priced: frameworks by name, and what their rows mean."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import learn
from benchmarks.planner_accuracy.frameworks import fitted_priors, framework, without_name
from benchmarks.planner_accuracy.predict import evaluate
from benchmarks.planner_accuracy.runs import read_runs
from plait.planner import constants
from plait.planner.job import SCHEDULES
from tests.unit.planner.rows import ROW


def test_old_names_mean_what_they_meant_then():
    def stack(**changes):
        variant = read_runs([{**ROW, "framework": "Megatron-LM", **changes}]).variants[0]
        return str(variant.framework.name)

    assert stack(gpu="A100-80GB", year="2021") == "megatron"
    assert stack(gpu="A100-80GB", gated_mlp="n", n_kv_heads="") == "megatron"
    for changes in ({"gpu": "A100-80GB", "year": "2024"}, {"gpu": "H100"}, {"gpu": "MI300X"}):
        assert stack(**changes) == "megatron-modern"


def test_names_tell_compilation_and_authors():
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
    own = stack("a trainer (PyTorch FSDP2), not compiled")
    compiled = stack("a trainer (PyTorch FSDP2 + TP), torch.compile")
    assert own.whole_logits == compiled.whole_logits == 1
    assert (own.separate_norms, compiled.separate_norms) == (1, 0)
    inside = stack("Megatron-Core (NeMo 26.04 container), TP overlap, bf16 gradients")
    assert inside.wire_reduce == 2 and inside.hidden_tp > stack("Megatron-Core").hidden_tp
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
    layout = {"tp": "1", "pp": "1", "gpus_total": "16", "dp": "16", "global_batch": "16", "micro_batch": "1", "precision": "bf16 (amp)"}  # fmt: skip
    for stack, shards in (("torchtitan eager", 16), ("PyTorch FSDP", 16), ("DeepSpeed", 1)):
        two, three = (
            one(framework=stack, zero_or_fsdp=name, **layout)
            for name in ("FSDP2 SHARD_GRAD_OP", "FSDP FULL_SHARD")
        )
        weights = three.memory_terms["weights"] * (1 if shards > 1 else 16)
        assert two.memory_terms["weights"] == pytest.approx(weights, rel=0.01)
        assert two.memory_terms["gathered"] > three.memory_terms["gathered"] or shards == 1


def test_operations_that_python_dispatches_wait_for_their_host():
    layout = {"framework": "torchtitan eager", "pp": "1", "gpus_total": "16", "micro_batch": "1", "seq_len": "2048"}  # fmt: skip
    split = one(tp="2", dp="8", global_batch="8", **layout)
    whole = one(tp="1", dp="16", global_batch="16", **layout)
    assert split.terms["host"] > 5 * whole.terms["host"]


def test_an_optimizer_in_16_bits_moves_half_of_the_bytes():
    mixed, pure = (
        one(framework="torchtitan", precision=name).terms["optimizer"]
        for name in ("bf16 (amp)", "bf16 (pure)")
    )
    assert pure == pytest.approx(mixed * 14 / 28, rel=0.01)


def test_rows_of_no_framework_and_of_plait_are_priced_too():
    names = ("", "Plait 0.1", "Megatron-LM zero bubble ZB-1p")
    found = read_runs([{**ROW, "framework": name} for name in names])
    stacks = [str(name) for name in found.job.framework.name]
    assert stacks == ["other-modern", "plait", "megatron-modern"]
    assert found.variants[2].layout["schedule"] == SCHEDULES.index("zb-h1")
    assert {f"stack.{name}" for name in stacks} <= fitted_priors().constants.keys()


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
    written = json.loads((tmp_path / "constants.json").read_text())
    priors = json.loads(shipped.read_text())
    assert written.keys() == priors.keys()
    assert written["constants"].items() >= priors["constants"].items()
    names = {name for name in written["constants"] if name.startswith("stack.")}
    assert names <= {"stack.plait"}
