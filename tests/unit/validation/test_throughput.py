"""The comparison of throughput, its peers and its arithmetic, on the CPU with small models."""

import pytest
import torch

from plait.sizes import GIB
from plait.validation import throughput
from plait.validation.context import TINY, WIDE, on_device, random_batch
from plait.validation.peers import Llama, transformers_fsdp2
from plait.validation.rows import NotRun, summary_of
from plait.validation.throughput import TRAINERS, Visit

CPU = torch.device("cpu")
LAYERS = {
    "input_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def transformers_name(name):
    module, leaf = name.rsplit(".", 1)
    if module in ENDS:
        return f"{ENDS[module]}.{leaf}"
    _, index, layer = module.split(".")
    return f"model.layers.{index}.{LAYERS[layer]}.{leaf}"


def test_the_hand_written_llama_is_that_of_transformers():
    reference = on_device(TINY, CPU, dtype=torch.float64)
    model = Llama(TINY).double()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(reference.get_parameter(transformers_name(name)))
    batch = random_batch(TINY, CPU, seed=1)

    def backward(logits):
        labels = batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
        loss.backward()
        return loss.item()

    expected_loss = backward(reference(input_ids=batch["input_ids"]).logits)
    loss = backward(model.logits(batch["input_ids"]))
    # Both compute angles in float32, and Transformers computes norms in float32 too.
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(transformers_name(name)).grad
        assert torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-7), name


def test_a_comparison_on_the_cpu(context):
    """Three contenders train in two rounds, with a second depth."""
    reports = []
    context.progress = reports.append
    contenders = ["plait", "fsdp2", "ceiling"]
    settings = {"contenders": contenders, "depths": True}
    numbers = throughput.compare(context, settings).numbers
    assert numbers["rounds"] == 2
    # Each first visit is reported, and then each round.
    for report in reports[:3]:
        assert "first_visits" in report
    assert [report["rounds"] for report in reports[3:]] == [1, 2]
    assert set(numbers["seconds"]) == set(numbers["layer"]["mfu"]) == set(contenders)
    for name, tokens in numbers["tokens_per_second"].items():
        assert tokens == pytest.approx(TINY.tokens / numbers["seconds"][name])
    assert context.results[throughput.LAYERS] == TINY.layers
    assert "step of plait / fsdp2" in summary_of("throughput/eager", numbers)


def test_plait_takes_the_same_steps_as_fsdp2(context):
    batch = random_batch(TINY, context.device, seed=0)
    losses = {}
    for name in ("plait", "fsdp2"):
        trainer = TRAINERS[name](context, TINY)
        losses[name] = [float(trainer.step(batch)) for _ in range(3)]
        trainer.close()
    # The rounding of bfloat16.
    assert losses["plait"] == pytest.approx(losses["fsdp2"], rel=1e-2)


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_compiled_contenders(context):
    """Each contender compiles its blocks, for which CPUs take minutes."""
    settings = {"contenders": ["plait-compiled", "fsdp2-compiled", "ceiling-compiled"]}
    assert throughput.compare(context, settings).numbers["rounds"] == 2


def test_a_contender_without_memory_lowers_the_depth_of_all(context, monkeypatch):
    depths = []

    def fits_two_layers(context, workload):
        depths.append(workload.layers)
        if workload.layers > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return transformers_fsdp2(context, TINY)

    def never_fits(context, workload):
        raise torch.OutOfMemoryError("CUDA out of memory")

    three_layers = TINY.with_layers(3)
    monkeypatch.setitem(throughput.TRAINERS, "fsdp2", fits_two_layers)
    workload, visits, errors = throughput.first_visits(context, ["plait", "fsdp2"], three_layers)
    assert workload.layers == 2 and set(visits) == {"plait", "fsdp2"} and not errors
    assert depths == [3, 2]
    monkeypatch.setitem(throughput.TRAINERS, "fsdp2", never_fits)
    with pytest.raises(NotRun, match="out of memory with 2 layers"):
        throughput.first_visits(context, ["fsdp2"], three_layers)


def test_retries_of_the_allocator_lower_the_depth(context, monkeypatch):
    """Steps that wait for the allocator are not compared."""

    def visit(context, name, workload):
        return Visit(1.0, 1.0, 10, 2.0, retries=int(workload.layers > 4))

    monkeypatch.setattr(throughput, "visit", visit)
    workload, visits, _ = throughput.first_visits(context, ["plait", "fsdp2"], TINY.with_layers(8))
    assert workload.layers == 4 and set(visits) == {"plait", "fsdp2"}


def test_a_broken_contender_fails_the_row_but_not_the_others(context, monkeypatch):
    def broken(context, workload):
        raise RuntimeError("no such kernel\nmore lines")

    monkeypatch.setitem(throughput.TRAINERS, "ceiling", broken)
    result = throughput.compare(context, {"contenders": ["plait", "fsdp2", "ceiling"]})
    assert result.outcome == "failed" and "ceiling: RuntimeError: no such kernel" in result.reason
    assert set(result.numbers["seconds"]) == {"plait", "fsdp2"}


def test_layers_that_fit():
    """An H100 has memory for six layers, a smaller GPU for none, and an H200 for the most."""
    assert throughput.layers_that_fit(78 * GIB, WIDE) >= 6
    assert throughput.layers_that_fit(138 * GIB, WIDE) == throughput.MOST_LAYERS
    with pytest.raises(NotRun, match="2 layers need"):
        throughput.layers_that_fit(24 * GIB, WIDE)


def round_of(**seconds):
    return {name: Visit(value, 1.0, 10, 2.0) for name, value in seconds.items()}


def test_ratios_have_a_spread():
    rounds = [round_of(plait=seconds, fsdp2=1.0) for seconds in (1.1, 1.0, 1.5)]
    numbers = throughput.comparison(rounds, TINY, 1e12, 1)
    assert numbers["ratio"]["fsdp2"] == {"median": 1.1, "least": 1.0, "most": 1.5}
    assert numbers["mfu"]["fsdp2"] == pytest.approx(TINY.flops / 1e12)
    assert throughput.judge(numbers, ["plait", "fsdp2"]).outcome == "passed"
    slow = throughput.comparison([round_of(plait=1.3, fsdp2=1.0)], TINY, 1e12, 1)
    result = throughput.judge(slow, ["plait", "fsdp2"])
    assert result.outcome == "failed" and "1.30 times as long as one of fsdp2" in result.reason


def test_the_time_of_a_layer_comes_from_two_depths():
    """The head and fixed costs cancel in the slope."""
    workload = WIDE.with_layers(5)
    peak = 1e15
    layer = workload.layer_flops / (0.5 * peak)
    deep = {"plait": 0.1 + 5 * layer}
    shallow = {"plait": 0.1 + layer}
    numbers = throughput.per_layer(deep, shallow, workload, peak)
    assert numbers["mfu"]["plait"] == pytest.approx(0.5)
