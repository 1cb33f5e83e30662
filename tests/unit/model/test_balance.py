"""Models of Transformers that add a balance loss of their routers are recognised."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

import plait
from plait.model.experts import balance_coefficient, enables_balance_loss
from tests.unit.model.families import SMALL

TEXT = {
    **SMALL,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.7,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}


def vision_model(output_router_logits):
    """Return a Qwen 3 VL MoE, whose routers are configured in its text part."""
    text = {**TEXT, "output_router_logits": output_router_logits}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=VISION)
    config.text_config.rope_parameters = {**ROPE, "mrope_section": [2, 1, 1]}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("enabled", [True, False])
def test_the_text_part_of_a_configuration_decides(enabled):
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    model = vision_model(enabled)
    # Transformers 5.17 adds the loss only if output_router_logits is an argument of the call.
    adds_loss = vision_model(True)(**batch).aux_loss is not None
    expected = (0.7, enabled) if adds_loss else (None, False)
    assert (balance_coefficient(model), enables_balance_loss(model)) == expected

    expected_loss = model(**batch).loss.item()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    loss = engine.train_batch([batch]).loss
    engine.close()
    # Both compute the loss in float32.
    assert loss == pytest.approx(expected_loss, rel=1e-6)


def test_classes_that_add_no_balance_loss():
    fields = {**TEXT, "num_local_experts": 4, "output_router_logits": True, "pad_token_id": 0}
    config = AutoConfig.for_model("mixtral", **fields)
    assert balance_coefficient(AutoModelForSequenceClassification.from_config(config)) is None
    assert enables_balance_loss(AutoModelForCausalLM.from_config(config))
