"""Hooks and outputs under tensor and sequence parallelism (defects A5 and A17).

Hooks receive full tensors, or are refused by name.
"""

import pytest
import torch
from torch.nn.utils import parametrizations, weight_norm

import plait
from plait.cluster.layout import Layout
from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, reference_trace
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, assert_same, plain_trace
from tests.parity.refusals import message_of
from tests.parity.tensor_parallel import settings

LAYER = "model.layers.1"


def mix_features(_module, *values):
    """Reverse the features of a hook's last argument: the output, or the inputs of a pre-hook."""
    value = values[-1]
    if isinstance(value, tuple):
        return tuple(tensor.flip(-1) for tensor in value)
    return value.flip(-1)


def check(model, **settings):
    context = TechniqueContext(Layout(tp=2), model=model, blocks=find_blocks(model))
    TensorParallel(**settings).check(context)


@pytest.mark.parametrize(
    ("name", "kind", "fragment"),
    [
        ("mlp.up_proj", "forward_hook", "would receive only this rank's part of outputs"),
        (
            "mlp.down_proj",
            "forward_pre_hook",
            f"{LAYER}.mlp, whose inputs and outputs are unsharded",
        ),
        ("self_attn.v_proj", "full_backward_hook", "or use parallel.tp = 1"),
        ("self_attn.o_proj", "full_backward_hook", "part of inputs"),
        ("mlp.act_fn", "forward_hook", "part of the features"),
    ],
)
def test_hooks_on_shards_are_refused(name, kind, fragment):
    """The check runs before any process group exists."""
    model = cases.build("llama", tied=False)
    getattr(model.get_submodule(f"{LAYER}.{name}"), f"register_{kind}")(mix_features)
    with pytest.raises(ModelError, match=rf"^{LAYER}.{name}: .*{fragment}"):
        check(model)


@pytest.mark.parametrize("name", [LAYER, f"{LAYER}.input_layernorm", f"{LAYER}.mlp"])
def test_hooks_on_sequence_shards_are_refused(name):
    """Hooks on blocks and on modules in them are refused only under sequence parallelism."""
    model = cases.build("llama", tied=False)
    model.get_submodule(name).register_forward_hook(mix_features)
    check(model)
    message = "only this rank's part of the sequence.*sequence_parallel = false"
    with pytest.raises(ModelError, match=message):
        check(model, sequence_parallel=True)


def test_hooks_of_parameters_and_parametrizations_are_refused():
    """A shard replaces the parameter that has the hook, or the weight that is computed."""
    layer = f"{LAYER}.mlp.up_proj"
    model = cases.build("llama", tied=False)
    model.get_parameter(f"{layer}.weight").register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match=f"{layer}.weight has a hook"):
        check(model)
    for parametrize in (parametrizations.weight_norm, parametrizations.spectral_norm, weight_norm):
        model = cases.build("llama", tied=False, device="cpu")
        parametrize(model.get_submodule(layer))
        message = rf"{layer} .* cannot be 'colwise'.*its weight is computed"
        with pytest.raises(ModelError, match=message):
            check(model)


def build(kind):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = cases.transformers_config(kind, tied=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.double().train()


def build_with_hooks():
    """Return a model with hooks on modules whose tensors are full."""
    model = build("llama")
    model.get_submodule(f"{LAYER}.mlp.up_proj").register_forward_pre_hook(mix_features)
    for name in (f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp", "model.embed_tokens", "lm_head"):
        model.get_submodule(name).register_forward_hook(mix_features)
    return model


def train_with_hooks(rank, world):
    """Return a trace, and the messages for later changes of the model. Runs on every rank."""
    model = build_with_hooks()
    messages = {}
    with keeping_float64(model):
        engine = cases.engine(model, settings(2, 2, 0, 1, 1))
        trace = engine_trace(engine, cases.steps_for("llama", 1))
        batch = cases.steps_for("llama", 1)[0]
        for name in ("mlp.gate_proj", "self_attn.k_proj", "mlp.act_fn"):
            hook = model.get_submodule(f"{LAYER}.{name}").register_forward_hook(mix_features)
            messages[name] = message_of(engine.train_batch, batch, error=ModelError)
            hook.remove()
        engine.train_batch(batch)
        parametrizations.weight_norm(model.get_submodule(f"{LAYER}.mlp.gate_proj"))
        parametrized = message_of(engine.train_batch, batch, error=ModelError)
    return trace, messages, parametrized


def test_hooks_on_full_tensors_equal_one_process(pool):
    """Hooks on shards that are added after the start are refused at the next step."""
    expected = plain_trace(build_with_hooks(), cases.steps_for("llama", 1))
    for trace, messages, parametrized in pool.run(2, train_with_hooks):
        assert_same(expected, trace)
        for name, message in messages.items():
            assert message.startswith(f"{LAYER}.{name}: ")
        assert parametrized.startswith(f"{LAYER}.mlp.gate_proj: ")
        assert "no longer a parameter of the layer" in parametrized


def loss_of_all_outputs(output, batch):
    total = output.logits.logsumexp(-1).sum()
    for index, state in enumerate(output.hidden_states):
        total = total + (index + 1) * state.sin().sum()
    for weights in output.attentions:
        # Each element has its own factor, so that no permutation has the same loss.
        factors = torch.arange(weights.numel(), dtype=weights.dtype).view_as(weights) / 100
        total = total + (weights * factors).sum()
    return total


def steps_with_all_outputs(kind):
    steps = cases.steps_for(kind, 1, steps=2)
    for (micro_batch,) in steps:
        micro_batch |= {"output_hidden_states": True, "output_attentions": True}
    return steps


def train_on_all_outputs(rank, world, kind):
    """Train with tensor and with sequence parallelism. Runs on every rank."""
    traces = []
    for sequence in (False, True):
        model = build(kind)
        config = settings(2, 2, 0, 1, 1, sequence)
        with keeping_float64(model):
            engine = plait.initialize(model, config, loss_fn=plait.per_sample(loss_of_all_outputs))
            traces.append(engine_trace(engine, steps_with_all_outputs(kind)))
    return traces


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "openai-gpt"])
def test_a_loss_of_hidden_states_and_attention_weights(pool, kind):
    """Inside the model, hidden states are sequence shards and attention weights a rank's heads.

    OpenAI's GPT returns both in lists.
    """
    model = build(kind)
    with keeping_float64(model):
        expected = reference_trace(
            model,
            steps_with_all_outputs(kind),
            loss_fn=plait.per_sample(loss_of_all_outputs),
            optimizer=cases.adamw,
            clipping=CLIPPING,
        )
    for traces in pool.run(2, train_on_all_outputs, kind):
        for trace in traces:
            assert_same(expected, trace)
