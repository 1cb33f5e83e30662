"""Guards report gradients that are lost, weights that do not change, and shards that are read."""

import warnings

import pytest
import torch

import plait
from plait._torch.units import gathered_parameters
from plait.errors import CommunicationError, InputError
from plait.sharded.guard import STEPS
from tests.parity import cases
from tests.parity.data_parallel import settings


def lose_a_gradient(rank, world):
    """Lose the hook that records a block's gradients, as one registered too early is.

    Runs on every rank.
    """
    engine = cases.engine(cases.build("plain", tied=True), settings(2, 2, 1, 1))
    first, second = cases.ragged_steps(world, steps=2, keys=())
    engine.train_batch([first[rank]])
    # Autograd does not accumulate into the sharded parameters, but into the gathered ones.
    for _, gathered in gathered_parameters(engine.model.blocks[1]):
        gathered._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]
    with pytest.raises(CommunicationError) as caught:
        engine.train_batch([second[rank]])
    return str(caught.value)


def test_a_gradient_lost_on_its_way_is_named(pool):
    for message in pool.run(2, lose_a_gradient):
        assert message.startswith("blocks.1."), message
        assert "no rank has seen autograd compute" in message


def train_with_unused_weights(rank, world, config):
    """Return warnings about weights that did not change. Runs on every rank."""
    torch.manual_seed(0)
    model = cases.build("plain", tied=False)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    batch = cases.ragged_steps(world, steps=1, keys=())[0][rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS + 2):
            engine.train_batch([batch])
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "did not change" in message]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_unchanged_parameter_is_named_once(pool, stage):
    """The side branches are not used. Their gradients are None, so weight decay skips them."""
    first, second = pool.run(2, train_with_unused_weights, settings(2, stage, 1, 1))
    assert not second
    (message,) = first
    expected = "blocks.0.side.weight and 5 more did not change in the first 10 updates"
    assert message.startswith(expected), message


class Encoder(cases.PlainModel):
    """A model with a second method that computes."""

    def encode(self, input_ids):
        return self.head(self.embed(input_ids))


def call_a_method(rank, world):
    """Return the message of the refusal. Runs on every rank."""
    engine = cases.engine(Encoder(tied=False), settings(2, 2, 1, 1))
    # Without tied weights the embedding and the head are units that gather themselves.
    engine.model.encode(torch.arange(3))
    engine.train_batch([cases.ragged_steps(world, steps=1, keys=())[0][rank]])
    engine = cases.engine(Encoder(tied=True), settings(2, 2, 1, 1))
    with pytest.raises(InputError) as caught:
        engine.model.encode(torch.arange(3))
    return str(caught.value)


def test_a_method_that_reads_shards_is_named(pool):
    for message in pool.run(2, call_a_method):
        expected = "Encoder.encode computes with parameters that are shards"
        assert message.startswith(expected), message


class BypassesBlocks(cases.PlainModel):
    """A model that calls modules inside its blocks, from a method or from its forward."""

    def hidden(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block.side(hidden)
        return hidden

    def forward(self, input_ids, side=False):
        if side:
            return self.head(self.hidden(input_ids))
        return self.head(self.blocks[0].side(self.embed(input_ids)))


def bypass_blocks(rank, world):
    """Return the messages of engine and own loop. Runs on every rank."""
    messages = []
    for parallelize in (cases.engine, plait.parallelize):
        model = BypassesBlocks(tied=False)
        owner = parallelize(model, settings(2, 2, 1, 1))
        for side in (False, True):
            with pytest.raises(InputError) as caught:
                model(torch.arange(3), side=side)
            messages.append(str(caught.value))
        owner.close()
    return messages


def test_a_block_that_is_bypassed_is_explained(pool):
    """The message does not say that the code is outside of the forward."""
    for messages in pool.run(2, bypass_blocks):
        for message in messages:
            assert message.startswith("BypassesBlocks.forward computes with"), message
            assert "list the modules that are called in parallel.blocks" in message


class ReplacedForward(cases.PlainModel):
    """A model whose forward the test replaces in the class."""


def doubled_logits(model, input_ids):
    output = cases.PlainModel.forward(model, input_ids)
    output.logits = output.logits * 2
    return output


def replace_the_forward_of_the_class(rank, world):
    """Return the ratio of the logits after to those before. Runs on every rank."""
    torch.manual_seed(0)
    model = ReplacedForward(tied=False)
    plait.parallelize(model, settings(2, 3, 1, 1))
    ids = torch.arange(3)[None]
    with torch.no_grad():
        before = model(ids).logits
        ReplacedForward.forward = doubled_logits  # type: ignore[method-assign]
        return model(ids).logits / before


def test_a_forward_replaced_in_the_class_is_called(pool):
    """Patches of kernels replace the forward of a class, also after the model was sharded."""
    for ratio in pool.run(2, replace_the_forward_of_the_class):
        torch.testing.assert_close(ratio, torch.full_like(ratio, 2.0))
