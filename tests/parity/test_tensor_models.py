"""Tensor parallelism of models whose layers differ (B7), and of a user's loss and state (B14)."""

import pytest
import torch

import plait
from plait.losses.loss import CausalLMLoss
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, reference_trace
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, assert_same, plain_trace
from tests.parity.full_tensors import full_weights
from tests.parity.tensor_parallel import settings


def gemma4():
    """Return a model with heads of two widths and two layers that read the keys of earlier ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "vocab_size": cases.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 53,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": cases.VOCABULARY,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model("gemma4_text", **fields)
    return AutoModelForCausalLM.from_config(config).double().train()


def train_gemma4(rank, world):
    """Runs on every rank."""
    model = gemma4()
    with keeping_float64(model):
        engine = cases.engine(model, settings(world, world, 0, 1, 1))
        return engine_trace(engine, cases.steps_for("llama", 1, steps=2))


@pytest.mark.parametrize("tp", [2, 4])
def test_gemma4(pool, tp):
    """The configuration raises an error for fields that differ between layers (B7).

    With tp = 4 two ranks share a key head, also across layers.
    """
    model = gemma4()
    with keeping_float64(model):
        expected = plain_trace(model, cases.steps_for("llama", 1, steps=2))
    assert_same(expected, pool.run(tp, train_gemma4)[0])


class SmoothedLoss(CausalLMLoss):
    """A loss that also reads the logits itself."""

    def __call__(self, output, batch):
        total, weight = super().__call__(output, batch)
        return total - 0.1 * output.logits.log_softmax(-1).mean(-1).sum(), weight


def train_and_load_full_tensors(rank, world, stage):
    """Train, and load full state dicts. Runs on every rank."""
    model = cases.build("llama", tied=True, device="cpu")
    for name, parameter in model.named_parameters():
        parameter.decays = name  # type: ignore[attr-defined]
    state = {name: torch.full_like(tensor, 0.5) for name, tensor in model.state_dict().items()}
    with keeping_float64(model):
        engine = plait.initialize(model, settings(world, 2, stage, 1, 1), loss_fn=SmoothedLoss())
        trace = engine_trace(engine, cases.steps_for("llama", world // 2))

    model.load_state_dict(state)
    for name, weight in full_weights(model).items():
        assert bool((weight == 0.5).all()), name
    for name, parameter in model.named_parameters():
        assert parameter.decays == name  # type: ignore[attr-defined]

    prefix = "model.layers.0.mlp."
    mlp_state = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            mlp_state[name.removeprefix(prefix)] = 2 * tensor
    model.get_submodule("model.layers.0.mlp").load_state_dict(mlp_state)
    for name, weight in full_weights(model).items():
        assert bool((weight == (1 if name.startswith(prefix) else 0.5)).all()), name
    return trace


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 3)])
def test_a_users_loss_and_full_state_dicts(pool, world, stage):
    """A subclass of the loss gets full logits, and `load_state_dict` accepts full tensors (B14).

    Attributes of parameters stay.
    """
    model = cases.build("llama", tied=True, device="cpu")
    with keeping_float64(model):
        steps = cases.steps_for("llama", world // 2)
        expected = reference_trace(
            model, steps, loss_fn=SmoothedLoss(), optimizer=cases.adamw, clipping=CLIPPING
        )
    for trace in pool.run(world, train_and_load_full_tensors, stage):
        assert_same(expected, trace)
