"""State that a forward changes, where ranks of cp and tp compute a micro-batch together."""

import warnings

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import plait
from tests.parity import cases


class StatefulLayer(LlamaDecoderLayer):
    """A layer with a counter, which is the same on all ranks, and two averages over its tokens."""

    def forward(self, hidden_states, **kwargs):
        hidden = super().forward(hidden_states, **kwargs)
        hidden = hidden * (1 + 0.05 * self.calls + self.level) + self.mean
        self.calls += 1
        self.level = 0.9 * self.level + hidden.detach().mean().item()
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)))
        return hidden


def train(parallel, *, own_loop=False):
    """Return the loss of the third step, and the warnings about state."""
    model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
    for layer in model.model.layers:
        layer.__class__ = StatefulLayer
        layer.calls = 0
        layer.level = 0.0
        layer.register_buffer("mean", torch.zeros(32))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": cases.OPTIMIZER,
        "parallel": parallel,
    }
    ids = torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if own_loop:
            sharded = plait.parallelize(model, config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            sharded.close()
        else:
            engine = cases.engine(model, config)
            for _ in range(3):
                loss = engine.train_batch(batch).loss
            engine.close()
    messages = [str(warning.message) for warning in caught]
    return float(loss), [message for message in messages if "the forward sets" in message]


def train_on_layouts(rank, world):
    """Runs on every rank."""
    return {
        "cp": train({"cp": 2, "context": "all-gather-kv"}),
        "sequence": train({"tp": 2, "sequence_parallel": True}),
        "own loop": train({"tp": 2, "sequence_parallel": True}, own_loop=True),
        "tp": train({"tp": 2, "sequence_parallel": False}),
    }


def test_state_of_a_part_of_the_tokens_is_named_once(pool):
    """The remedy, `sequence_parallel = false`, gives the numbers of one process."""
    first, second = pool.run(2, train_on_layouts)
    for name, remedy in (
        ("cp", "parallel.cp = 1"),
        ("sequence", "parallel.sequence_parallel = false"),
        ("own loop", "parallel.sequence_parallel = false"),
    ):
        (message,) = first[name][1]
        assert "model.layers.0.level, model.layers.0.mean and 2 more to another" in message
        assert message.endswith(f"or use {remedy}")
        assert not second[name][1]

    expected, messages = train({})
    assert not messages and not first["tp"][1]
    assert abs(first["tp"][0] - expected) < 1e-5 < abs(first["sequence"][0] - expected)
