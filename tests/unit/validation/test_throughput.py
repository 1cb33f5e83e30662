"""The harness of throughput, its peers and its arithmetic, on the CPU with small models."""

import pytest
import torch

from plait.sizes import GIB
from plait.validation import throughput
from plait.validation.context import TINY, WIDE, on_device, random_batch
from plait.validation.peers import Llama, transformers_fsdp2
from plait.validation.rows import NotRun, summary_of
from plait.validation.throughput import TRAINERS, Visit

LAYERS = {
    "input_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "query": "self_attn.q_proj",
    "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def transformers_name(name):
    module, leaf = name.rsplit(".", 1)
    if module in ENDS:
        return f"{ENDS[module]}.{leaf}"
    _, index, layer = module.split(".")
    return f"model.layers.{index}.{LAYERS[layer]}.{leaf}"


def test_the_hand_written_llama_is_the_llama_of_transformers():
    workload = TINY
    theirs = on_device(workload, torch.device("cpu"), dtype=torch.float64)
    ours = Llama(workload).double()
    for name, parameter in ours.named_parameters():
        parameter.data.copy_(theirs.get_parameter(transformers_name(name)))
    batch = random_batch(workload, torch.device("cpu"), seed=1)

    def backward(logits):
        labels = batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
        loss.backward()
        return loss

    loss = backward(theirs(input_ids=batch["input_ids"]).logits)
    own_loss = backward(ours.logits(batch["input_ids"]))
    # Both compute the angles of positions in float32, and the norms of Transformers are float32 too.
    assert own_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(transformers_name(name)).grad
        assert torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-7), name


def test_a_comparison_on_the_cpu(context):
    """Plait, FSDP2 and the hand-written model train, in two rounds, with a second depth."""
    reported = []
    context.progress = reported.append
    settings = {"contenders": ["plait", "fsdp2", "ceiling"], "depths": True}
    numbers = throughput.compare(context, settings).numbers
    assert numbers["rounds"] == 2
    # Each first visit is reported, then each round.
    assert [next(iter(found)) for found in reported[:3]] == ["first_visits"] * 3
    assert [found["rounds"] for found in reported[3:]] == [1, 2]
    assert set(numbers["seconds"]) == {"plait", "fsdp2", "ceiling"}
    for name, tokens in numbers["tokens_per_second"].items():
        assert tokens == pytest.approx(TINY.tokens / numbers["seconds"][name])
    assert set(numbers["layer"]["mfu"]) == {"plait", "fsdp2", "ceiling"}
    assert context.results[throughput.LAYERS] == TINY.layers
    assert "step of plait / fsdp2" in summary_of("throughput/eager", numbers)


def test_plait_takes_the_same_steps_as_fsdp2(context):
    """Losses of three steps from the same weights, to the rounding of bfloat16."""
    batch = random_batch(TINY, context.device, seed=0)
    losses = {}
    for name in ("plait", "fsdp2"):
        trainer = TRAINERS[name](context, TINY)
        losses[name] = [float(trainer.step(batch)) for _ in range(3)]
        trainer.close()
    assert losses["plait"] == pytest.approx(losses["fsdp2"], rel=1e-2)


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_compiled_contenders(context):
    """Each contender compiles its blocks, for which CPUs take minutes."""
    settings = {"contenders": ["plait-compiled", "fsdp2-compiled", "ceiling-compiled"]}
    assert throughput.compare(context, settings).numbers["rounds"] == 2


def test_fewer_layers_after_memory_ran_out(context, monkeypatch):
    """A contender that runs out of memory lowers the depth of all, and nothing of it stays alive."""
    built = []

    def runs_out(context, workload):
        built.append(workload.layers)
        if workload.layers > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return transformers_fsdp2(context, TINY)

    monkeypatch.setitem(throughput.TRAINERS, "fsdp2", runs_out)
    contenders = ["plait", "fsdp2"]
    workload, visits, errors = throughput.first_visits(context, contenders, TINY.with_layers(3))
    assert workload.layers == 2 and set(visits) == {"plait", "fsdp2"} and not errors
    assert built == [3, 2]
    monkeypatch.setitem(throughput.TRAINERS, "fsdp2", never_fits)
    with pytest.raises(NotRun, match="out of memory with 2 layers"):
        throughput.first_visits(context, ["fsdp2"], TINY.with_layers(3))


def test_fewer_layers_after_the_allocator_had_to_retry(context, monkeypatch):
    """Steps that wait for the allocator are not compared."""

    def visit(context, name, workload):
        return Visit(1.0, 1.0, 10, 2.0, retries=int(workload.layers > 4))

    monkeypatch.setattr(throughput, "visit", visit)
    workload, visits, _ = throughput.first_visits(context, ["plait", "fsdp2"], TINY.with_layers(8))
    assert workload.layers == 4 and set(visits) == {"plait", "fsdp2"}


def test_a_contender_that_does_not_run(context, monkeypatch):
    """The others are compared, and the row fails with the error."""

    def breaks(context, workload):
        raise RuntimeError("no such kernel\nmore lines")

    monkeypatch.setitem(throughput.TRAINERS, "ceiling", breaks)
    result = throughput.compare(context, {"contenders": ["plait", "fsdp2", "ceiling"]})
    assert result.outcome == "failed" and "ceiling: RuntimeError: no such kernel" in result.reason
    assert set(result.numbers["seconds"]) == {"plait", "fsdp2"}


def never_fits(context, workload):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_layers_that_fit():
    """An H100 has room for six layers or more, a smaller GPU for none, and an H200 for the most."""
    assert throughput.layers_that_fit(78 * GIB, WIDE) >= 6
    assert throughput.layers_that_fit(138 * GIB, WIDE) == throughput.MOST_LAYERS
    with pytest.raises(NotRun, match="2 layers need"):
        throughput.layers_that_fit(24 * GIB, WIDE)


def visits(**seconds):
    return {name: Visit(value, 1.0, 10, 2.0) for name, value in seconds.items()}


def test_ratios_have_a_spread():
    rounds = [visits(plait=seconds, fsdp2=1.0) for seconds in (1.1, 1.0, 1.5)]
    numbers = throughput.comparison(rounds, TINY, 1e12, 1)
    assert numbers["ratio"]["fsdp2"] == {"median": 1.1, "least": 1.0, "most": 1.5}
    assert numbers["mfu"]["fsdp2"] == pytest.approx(TINY.flops / 1e12)
    assert throughput.judge(numbers, ["plait", "fsdp2"]).outcome == "passed"
    slow = throughput.comparison([visits(plait=1.3, fsdp2=1.0)], TINY, 1e12, 1)
    result = throughput.judge(slow, ["plait", "fsdp2"])
    assert result.outcome == "failed" and "1.30 times as long as one of fsdp2" in result.reason


def test_a_layer_from_two_depths():
    """The head and fixed costs cancel in the slope."""
    workload = WIDE.with_layers(5)
    peak = 1e15
    layer = workload.layer_flops / (0.5 * peak)
    found = throughput.per_layer({"plait": 0.1 + 5 * layer}, {"plait": 0.1 + layer}, workload, peak)
    assert found["mfu"]["plait"] == pytest.approx(0.5)
