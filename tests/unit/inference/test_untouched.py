"""What a forward changes of a model besides its output is put back."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import plait
from plait.errors import InputError
from plait.inference.predictor import untouched
from tests.parity import cases


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.seen, self.kept = 4, torch.ones(2)

    def forward(self):
        self.register_buffer("table", torch.arange(9.0), persistent=False)
        self.count += 1
        self.seen, self.kept = 9, torch.zeros(2)
        self.training = False
        torch.rand(3)


def test_buffers_attributes_and_generators():
    model = Changing()
    table, kept, state = model.table, model.kept, torch.random.get_rng_state()
    with untouched(model, torch.device("cpu")):
        model()
    assert model.table is table and model.count == 0 and model.seen == 4 and model.kept is kept
    assert torch.equal(torch.random.get_rng_state(), state) and "table" not in model.state_dict()
    assert not model.training  # the mode is not its business


def test_dynamic_rotary_frequencies():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, longer = torch.tensor([[1, 2, 3]]), torch.arange(11).repeat(1, 3)
    with torch.no_grad():
        before = model(ids).logits
        with untouched(model, torch.device("cpu")):
            model(longer)
        assert torch.equal(
            model.model.rotary_emb.inv_freq, LlamaForCausalLM(config).model.rotary_emb.inv_freq
        )
        assert torch.equal(model(ids).logits, before)


def test_a_second_thread_is_refused_and_a_nested_call_is_not():
    """The model has dropout: the first thread to end would put it back into training mode under the other."""
    model = cases.build("gpt2", tied=True, dtype=torch.float32, device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    engine = plait.initialize(
        model, {"train_micro_batch_size_per_gpu": 1}, loss_fn=plait.causal_lm_loss
    )
    engine.module.train()
    (expected,), inner = (
        engine.generate([[1, 2]], max_new_tokens=8),
        engine.generate([[3]], max_new_tokens=2),
    )
    heard = []

    def beside(call):
        with pytest.raises(InputError) as found:
            call()
        heard.append(str(found.value))

    def note(_, token):
        for call in (
            lambda: engine.generate([[1, 2]], max_new_tokens=8),
            lambda: engine.score([[1, 2]]),
        ):
            thread = threading.Thread(target=beside, args=(call,))
            thread.start()
            thread.join(20)
        assert engine.generate([[3]], max_new_tokens=2) == inner

    (made,) = engine.generate([[1, 2]], max_new_tokens=8, on_token=note)
    assert made == expected and len(heard) == 16 and engine.module.training
    assert all(
        "another thread evaluates this model or generates with it" in words for words in heard
    )
    with ThreadPoolExecutor(1) as other:
        assert other.submit(engine.generate, [[1, 2]], max_new_tokens=8).result() == [expected]
    engine.close()
