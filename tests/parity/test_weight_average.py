"""A moving average of each rank's shards, and weight decay by a rule, as in one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import plait
from plait.errors import InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import materialised, settings
from tests.parity.full_tensors import full_weights
from tests.parity.mean_losses import close, mean_loss
from tests.parity.refusals import message_of

STEPS, MIX = 3, 0.3


def adamw_without_decay_of_vectors(parameters, *, decay=0.1):
    """Return an optimizer in which biases and norms do not decay.

    The learning rate is large, so that the rule changes the weights visibly.
    """
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": decay}]
    for parameter in parameters:
        groups[parameter.ndim > 1]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=1e-2)


def copies_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def update_average(average, model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter, MIX)


def train(rank, world, config):
    """Return the weights and their average. Runs on every rank."""
    config = config | {"gradient_clipping": 0}
    del config["optimizer"]
    model = cases.build("plain", tied=True)
    engine = plait.initialize(model, config, optimizer=adamw_without_decay_of_vectors)
    average = copies_of(engine.module)
    for step in cases.ragged_steps(engine.dp_size, steps=STEPS, keys=()):
        engine.backward(mean_loss(engine, step[engine.dp_rank])[0])
        engine.step()
        update_average(average, engine.module)
    full_average = {name: full_tensor_on_cpu(tensor) for name, tensor in average.items()}
    return full_weights(engine.module), full_average


def train_alone(batches, *, decay=0.1):
    """Train in one process in plain torch, with as many batches per step."""
    model = materialised("plain", tied=True)
    optimizer = adamw_without_decay_of_vectors(model.parameters(), decay=decay)
    average = copies_of(model)
    for step in cases.ragged_steps(batches, steps=STEPS, keys=()):
        for micro_batch in step:
            (mean_loss(model, micro_batch)[0] / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        update_average(average, model)
    return full_weights(model), average


@pytest.mark.parametrize(
    ("config", "batches"),
    [
        *(pytest.param(settings(2, stage, 1, 1), 2, id=f"zero{stage}") for stage in (0, 1, 3)),
        pytest.param(
            tensor_parallel.settings(2, 2, 0, 1, 1, **tensor_parallel.plan("plain")), 1, id="tp2"
        ),
    ],
)
def test_an_average_and_decay_by_a_rule(pool, config, batches):
    expected_weights, expected_average = train_alone(batches)
    # Both change the numbers by more than rounding.
    for other in (expected_average, train_alone(batches, decay=0.0)[0]):
        with pytest.raises(AssertionError, match="not close"):
            close(other, expected_weights, atol=1e-6)
    for weights, average in pool.run(2, train, config):
        close(weights, expected_weights)
        close(average, expected_average)


RECOMPUTED = settings(2, 0, 1, 1)
RECOMPUTED["parallel"] |= {"recompute": {"mode": "full"}}
SPLIT = tensor_parallel.settings(2, 2, 0, 1, 1, **tensor_parallel.plan("plain"))


def copy_and_train(rank, world, config):
    """Return the logits before training, and those of a copy and a pickled copy after it.

    Runs on every rank.
    """
    model = cases.build("plain", tied=True)
    engine = plait.initialize(model, config)
    steps = cases.ragged_steps(engine.dp_size, steps=STEPS, keys=())
    ids = steps[0][0]["input_ids"]
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        before = model(ids).logits
    for step in steps:
        engine.backward(mean_loss(engine, step[engine.dp_rank])[0])
        engine.step()
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, before)
        return before, copied(ids).logits, loaded(ids).logits


def test_a_copy_computes_with_its_own_weights(pool):
    """The forwards that recomputation replaces call the blocks of the model."""
    for before, *after in pool.run(2, copy_and_train, RECOMPUTED):
        assert all(torch.equal(logits, before) for logits in after)


def run_a_split_copy(rank, world, config):
    """Return the message about a copy, and whether its advice works. Runs on every rank."""
    model = cases.build("plain", tied=True)
    engine = plait.initialize(model, config)
    ids = cases.ragged_steps(1, keys=())[0][0]["input_ids"]
    copied = copy.deepcopy(model)
    message = message_of(copied, ids, error=InputError)
    with torch.no_grad():
        expected = model(ids).logits
        for parameter in engine.module.parameters():
            parameter.zero_()
        for parameter, average in zip(model.parameters(), copied.parameters(), strict=True):
            parameter.copy_(average)
        return message, torch.equal(model(ids).logits, expected)


def test_a_copy_of_a_split_model_is_refused(pool):
    for message, is_advice_right in pool.run(2, run_a_split_copy, SPLIT):
        assert "copy them into the trained model (parameter.copy_ under torch.no_grad())" in message
        assert is_advice_right
