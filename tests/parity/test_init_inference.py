"""`deepspeed.init_inference` on two processes: logits and tokens are those of Transformers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import plait.compat.deepspeed as deepspeed
from plait._torch.tensors import local_tensor

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5], [0, 3, 3, 4, 2]])
MASK = (IDS != 0).long()
END = 5
# `num_beams` overrides the model's own setting, which is not supported.
ARGUMENTS = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": END,
    "num_beams": 1,
}


def build():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
    )
    model = LlamaForCausalLM(config).double().eval()
    model.generation_config.num_beams = 4
    return model


def infer(rank, world, options):
    """Return logits, tokens, and rows of a weight. Runs on every rank."""
    engine = deepspeed.init_inference(build().train(), **options)
    assert not engine.module.training
    logits = engine(input_ids=IDS, attention_mask=MASK).logits
    tokens = engine.generate(input_ids=IDS, attention_mask=MASK, **ARGUMENTS)
    rows = len(local_tensor(engine.module.model.layers[0].mlp.up_proj.weight))
    return logits, tokens, rows


@pytest.mark.parametrize(
    ("options", "expected_rows"),
    [({"tensor_parallel": {"tp_size": 2}}, 24), ({"mp_size": 1, "max_out_tokens": 512}, 48)],
)
def test_equals_transformers(pool, options, expected_rows):
    model = build()
    with torch.no_grad():
        expected_logits = model(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()]
    expected_tokens = model.generate(input_ids=IDS, attention_mask=MASK, **ARGUMENTS)
    assert END in expected_tokens[:, IDS.shape[1] :], "a request ends early"
    for logits, tokens, rows in pool.run(2, infer, options):
        torch.testing.assert_close(logits[MASK.bool()], expected_logits, rtol=1e-10, atol=1e-10)
        assert torch.equal(tokens, expected_tokens)
        assert rows == expected_rows
