"""`init_inference` on two processes: logits and greedy tokens of a ragged batch are those of Transformers in one."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import plait.compat.deepspeed as deepspeed
from plait.errors import InputError

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5], [0, 3, 3, 4, 2]])
MASK = (IDS != 0).long()
NEW = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": 5,
    "num_beams": 1,
}
"""`num_beams` overrides the model's own setting, which is not supported."""


def model():
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


def work(rank, world, options):
    engine = deepspeed.init_inference(model().train(), **options)
    assert not engine.module.training
    logits = engine(input_ids=IDS, attention_mask=MASK).logits
    tokens = engine.generate(input_ids=IDS, attention_mask=MASK, **NEW)
    refused = []
    for bad in ({"inputs": IDS[0]}, {"inputs": IDS, "attention_mask": MASK[:, 1:]}):
        with pytest.raises(InputError) as caught:
            engine.generate(**bad)
        refused.append(str(caught.value))
    rows = engine.module.model.layers[0].mlp.up_proj.weight
    return (
        logits,
        tokens,
        (rows.to_local() if hasattr(rows, "to_local") else rows).shape[0],
        refused,
    )


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"tensor_parallel": {"tp_size": 2}}, 24), ({"mp_size": 1, "max_out_tokens": 512}, 48)],
)
def test_one_process(pool, options, rows):
    with torch.no_grad():
        logits = model()(input_ids=IDS, attention_mask=MASK).logits
    tokens = model().generate(input_ids=IDS, attention_mask=MASK, **NEW)
    assert 5 in tokens[:, 5:], "no request ends early"
    for found, made, held, refused in pool.run(2, work, options):
        torch.testing.assert_close(found[MASK.bool()], logits[MASK.bool()], rtol=1e-10, atol=1e-10)
        assert torch.equal(made, tokens) and held == rows
        assert "token ids [batch, length]" in refused[0] and "attention_mask is" in refused[1]
