"""Models and calls that tensor parallelism stumbled over: layers that differ (defect B7), a user's own loss and full state dicts (B14)."""

import pytest
import torch

import plait
from plait.losses.loss import CausalLMLoss
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, full_tensor_on_cpu, reference_trace
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, assert_same, plain_trace
from tests.parity.tensor_parallel import settings


def gemma4():
    """Heads of two widths, and two layers that read the keys of earlier ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 53,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    widths = {
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": cases.VOCABULARY,
    }
    layers = {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
    }
    tokens = {
        "vocab_size": cases.VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model("gemma4_text", **sizes, **widths, **layers, **tokens)
    return AutoModelForCausalLM.from_config(config).double().train()


def layers_that_differ(rank, world):
    """Runs in a worker."""
    model = gemma4()
    with keeping_float64(model):
        engine = cases.engine(model, settings(world, world, 0, 1, 1))
        return engine_trace(engine, cases.steps_for("llama", 1, steps=2))


@pytest.mark.parametrize("tp", [2, 4])
def test_gemma4(pool, tp):
    """B7: its configuration answers with an error where layers differ. With tp 4 two ranks share a key head, across layers too."""
    model = gemma4()
    with keeping_float64(model):
        steps = cases.steps_for("llama", 1, steps=2)
        wanted = plain_trace(model, steps)
    assert_same(wanted, pool.run(tp, layers_that_differ)[0])


class Smoothed(CausalLMLoss):
    """Reads logits itself."""

    def __call__(self, output, batch):
        total, weight = super().__call__(output, batch)
        return total - 0.1 * output.logits.log_softmax(-1).mean(-1).sum(), weight


def own_loss_and_full_tensors(rank, world, stage):
    """Runs in a worker."""
    model = cases.build("llama", tied=True, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.decays = name  # type: ignore[attr-defined]
    full = {name: torch.full_like(tensor, 0.5) for name, tensor in model.state_dict().items()}
    with keeping_float64(model):
        engine = plait.initialize(model, settings(world, 2, stage, 1, 1), loss_fn=Smoothed())
        trace = engine_trace(engine, cases.steps_for("llama", world // 2))
    model.load_state_dict(full)
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if not bool((full_tensor_on_cpu(parameter) == 0.5).all())
    ]
    wrong += [
        f"{name}.decays"
        for name, parameter in model.named_parameters()
        if getattr(parameter, "decays", "") != name
    ]
    model.get_submodule("model.layers.0.mlp").load_state_dict(
        {
            name.removeprefix("model.layers.0.mlp."): tensor * 2
            for name, tensor in full.items()
            if name.startswith("model.layers.0.mlp.")
        }
    )
    wrong += [
        name
        for name, p in model.named_parameters()
        if ".0.mlp." in name and not bool((full_tensor_on_cpu(p) == 1).all())
    ]
    return trace, wrong


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 3)])
def test_a_loss_of_one_s_own_and_full_tensors(pool, world, stage):
    """B14: a subclass that reads logits is given full ones; `load_state_dict` of full tensors, of the model and of a part of it. And
    attributes of parameters stay."""
    model = cases.build("llama", tied=True, device="cpu")
    with keeping_float64(model):
        steps = cases.steps_for("llama", world // 2)
        wanted = reference_trace(
            model, steps, loss_fn=Smoothed(), optimizer=cases.adamw, clipping=CLIPPING
        )
    for trace, wrong in pool.run(world, own_loss_and_full_tensors, stage):
        assert_same(wanted, trace)
        assert wrong == []
