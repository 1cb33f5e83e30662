"""A generation restores what a forward changes in a model besides its output."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import plait
from plait.errors import InputError
from plait.inference.predictor import untouched
from tests.parity import cases


class SelfChanging(nn.Module):
    """A model whose forward changes buffers, attributes, its mode and the random state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.longest = 4
        self.mask = torch.ones(2)

    def forward(self):
        self.register_buffer("table", torch.arange(9.0), persistent=False)
        self.count += 1
        self.longest = 9
        self.mask = torch.zeros(2)
        self.training = False
        torch.rand(3)


def test_buffers_attributes_and_generators():
    model = SelfChanging()
    table = model.table
    mask = model.mask
    random_state = torch.random.get_rng_state()
    with untouched(model, torch.device("cpu")):
        model()

    assert model.table is table and model.count == 0 and "table" not in model.state_dict()
    assert model.longest == 4 and model.mask is mask
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert not model.training, "the caller restores the mode"


def test_only_nested_calls_may_share_a_model():
    """A second thread is refused, because the first one to end would restore the training mode.

    Dropout shows whether the model was in training mode.
    """
    model = cases.build("gpt2", tied=True, dtype=torch.float32, device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    config = {"train_micro_batch_size_per_gpu": 1}
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    engine.module.train()
    expected = engine.generate([[1, 2]], max_new_tokens=8)
    expected_nested = engine.generate([[3]], max_new_tokens=2)
    messages = []

    def refused(call, **options):
        with pytest.raises(InputError) as error:
            call([[1, 2]], **options)
        messages.append(str(error.value))

    def on_token(_request, _token):
        for call, options in ((engine.generate, {"max_new_tokens": 8}), (engine.score, {})):
            thread = threading.Thread(target=refused, args=(call,), kwargs=options)
            thread.start()
            thread.join(20)
        assert engine.generate([[3]], max_new_tokens=2) == expected_nested

    assert engine.generate([[1, 2]], max_new_tokens=8, on_token=on_token) == expected
    assert len(messages) == 16 and engine.module.training
    for message in messages:
        assert "another thread evaluates this model or generates with it" in message

    # After the first thread is done, another one may use the model.
    with ThreadPoolExecutor(1) as other:
        assert other.submit(engine.generate, [[1, 2]], max_new_tokens=8).result() == expected
    engine.close()
