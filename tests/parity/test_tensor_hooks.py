"""Hooks and outputs under tensor and sequence parallelism: what they see is whole, or it is refused by name (defects A5, A17)."""

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
from tests.parity.tensor_parallel import settings


def mix(_module, *given):
    """A hook that mixes features: of the input (a pre-hook) or of the output."""
    value = given[-1]
    return tuple(entry.flip(-1) for entry in value) if isinstance(value, tuple) else value.flip(-1)


def check(model, **settings):
    TensorParallel(**settings).check(
        TechniqueContext(Layout(tp=2), model=model, blocks=find_blocks(model))
    )


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("where", "kind", "said"),
    [
        (
            "mlp.up_proj",
            "forward_hook",
            "forward hook mix would receive only this rank's part of outputs",
        ),
        (
            "mlp.down_proj",
            "forward_pre_hook",
            f"hook {LAYER}.mlp, whose inputs and outputs are unsharded",
        ),
        ("self_attn.v_proj", "full_backward_hook", "or use parallel.tp = 1"),
        ("self_attn.o_proj", "full_backward_hook", "part of inputs"),
        ("mlp.act_fn", "forward_hook", "part of the features"),
    ],
)
def test_hooks_that_see_a_part_are_refused(where, kind, said):
    """A17: before any process group exists."""
    model = cases.build("llama", tied=False)
    getattr(model.get_submodule(f"{LAYER}.{where}"), f"register_{kind}")(mix)
    with pytest.raises(ModelError, match=rf"^{LAYER}.{where}: ") as error:
        check(model)
    assert said in str(error.value)


@pytest.mark.parametrize("where", [LAYER, f"{LAYER}.input_layernorm", f"{LAYER}.mlp"])
def test_hooks_on_sequence_shards_are_refused(where):
    """A17: on blocks and what is in them, under sequence parallelism only."""
    model = cases.build("llama", tied=False)
    model.get_submodule(where).register_forward_hook(mix)
    check(model)
    with pytest.raises(
        ModelError, match="only this rank's part of the sequence.*sequence_parallel = false"
    ):
        check(model, sequence_parallel=True)


def test_hooks_of_parameters_and_parametrizations_are_refused():
    """A17: a hook on a parameter that its shard replaces; weights that are computed."""
    model = cases.build("llama", tied=False)
    model.get_parameter(f"{LAYER}.mlp.up_proj.weight").register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match=f"{LAYER}.mlp.up_proj.weight has a hook"):
        check(model)
    for change in (parametrizations.weight_norm, parametrizations.spectral_norm, weight_norm):
        model = cases.build("llama", tied=False, device="cpu")
        change(model.get_submodule(f"{LAYER}.mlp.up_proj"))
        with pytest.raises(
            ModelError, match=rf"{LAYER}.mlp.up_proj .* cannot be 'colwise'.*its weight is computed"
        ):
            check(model)


def hook_everywhere(model):
    """Hooks that see full tensors."""
    model.get_submodule(f"{LAYER}.mlp.up_proj").register_forward_pre_hook(mix)
    model.get_submodule(f"{LAYER}.mlp.down_proj").register_forward_hook(mix)
    model.get_submodule(f"{LAYER}.mlp").register_forward_hook(mix)
    model.get_submodule("model.embed_tokens").register_forward_hook(mix)
    model.get_submodule("lm_head").register_forward_hook(mix)


def hooked(rank, world, config):
    """Runs in a worker."""
    model = built("llama")
    hook_everywhere(model)
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, cases.steps_for("llama", 1))
        said = []
        for where in ("mlp.gate_proj", "self_attn.k_proj", "mlp.act_fn"):
            handle = model.get_submodule(f"{LAYER}.{where}").register_forward_hook(mix)
            try:
                engine.train_batch(cases.steps_for("llama", 1)[0])
            except ModelError as error:
                said.append(str(error))
            handle.remove()
        engine.train_batch(cases.steps_for("llama", 1)[0])
        parametrizations.weight_norm(model.get_submodule(f"{LAYER}.mlp.gate_proj"))
        try:
            engine.train_batch(cases.steps_for("llama", 1)[0])
        except ModelError as error:
            said.append(str(error))
    return trace, said


def built(kind):
    """With weights, float64."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    return (
        AutoModelForCausalLM.from_config(
            cases.transformers_config(kind, tied=False), attn_implementation="eager"
        )
        .double()
        .train()
    )


def test_hooks_that_see_full_tensors_are_right(pool):
    """A17."""
    model = built("llama")
    hook_everywhere(model)
    wanted = plain_trace(model, cases.steps_for("llama", 1))
    for trace, said in pool.run(2, hooked, settings(2, 2, 0, 1, 1)):
        assert_same(wanted, trace)
        for where, words in zip(
            ("mlp.gate_proj", "self_attn.k_proj", "mlp.act_fn", "mlp.gate_proj"), said, strict=True
        ):
            assert words.startswith(f"{LAYER}.{where}: ")
        assert "no longer a parameter of the layer" in said[-1]


def total(output, batch):
    """A loss of everything that a model returns."""
    hidden = sum(
        ((index + 1) * state.sin()).sum() for index, state in enumerate(output.hidden_states)
    )
    attention = sum(
        (weights * torch.arange(weights.numel(), dtype=weights.dtype).view_as(weights)).sum()
        for weights in output.attentions
    )
    return output.logits.logsumexp(-1).sum() + hidden + attention / 100


def steps(kind):
    more = {"output_hidden_states": True, "output_attentions": True}
    return [[{**piece, **more} for piece in step] for step in cases.steps_for(kind, 1, steps=2)]


def returned(rank, world, kind):
    """Runs in a worker."""
    traces = []
    for sequence in (False, True):
        model = built(kind)
        with keeping_float64(model):
            engine = plait.initialize(
                model, settings(2, 2, 0, 1, 1, sequence), loss_fn=plait.per_sample(total)
            )
            traces.append(engine_trace(engine, steps(kind)))
    return traces


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "openai-gpt"])
def test_a_loss_of_hidden_states_and_attention_weights(pool, kind):
    """A5: hidden states are sequence shards inside, attention weights the heads of a rank; OpenAI's GPT returns both in lists."""
    model = built(kind)
    with keeping_float64(model):
        wanted = reference_trace(
            model,
            steps(kind),
            loss_fn=plait.per_sample(total),
            optimizer=cases.adamw,
            clipping=CLIPPING,
        )
    for traces in pool.run(2, returned, kind):
        for trace in traces:
            assert_same(wanted, trace)
