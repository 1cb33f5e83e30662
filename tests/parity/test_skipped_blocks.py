"""Ranks that run different blocks in one step: LayerDrop, stochastic depth, missing images."""

import pytest
import torch

import plait
from plait.errors import CommunicationError
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same, materialise_model, plain_trace, settings
from tests.parity.full_tensors import assert_gradients_close, full_gradients
from tests.parity.refusals import message_of

LAYERS = 4
SKIPPED = [["1", "2"], ["", "03"], ["012", ""], ["3", "3"], ["", ""]]
"""Indices of the blocks that each rank skips, by step."""


class SkippingModel(cases.PlainModel):
    """A model whose batch names the blocks to skip. It can read a weight outside of its block."""

    repeats = False

    def forward(self, input_ids, skip="", penalty=False):
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if str(index) in skip:
                continue
            hidden = block(hidden, False)
            if self.repeats and index == 1:
                hidden = block(hidden, False)
        if penalty:
            hidden = hidden + self.blocks[1].up.weight.square().mean()
        return cases.Output(self.head(hidden))


def build():
    """Return the model on meta, in float64."""
    with torch.device("meta"):
        return SkippingModel(tied=False, layers=LAYERS).to(torch.float64)


def config_of(stage, accumulation, transport="torch"):
    config = settings(2, stage, 1, accumulation)
    config["parallel"]["transport"] = transport
    return config


def steps(accumulation, *, penalty):
    """Return the micro-batches of two ranks, with the blocks that each skips."""
    plan = cases.ragged_steps(2 * accumulation, steps=len(SKIPPED), keys=())
    for micro_batches, skipped in zip(plan, SKIPPED, strict=True):
        for index, micro_batch in enumerate(micro_batches):
            micro_batch |= {"skip": skipped[index // accumulation], "penalty": penalty}
    return plan


def train(rank, world, config, penalty):
    """Runs on every rank."""
    engine = cases.engine(build(), config)
    accumulation = config["gradient_accumulation_steps"]
    trace = engine_trace(engine, steps(accumulation, penalty=penalty))
    return trace if rank == 0 else None


@pytest.mark.parametrize("transport", ["torch", "auto"])
@pytest.mark.parametrize(
    ("stage", "accumulation", "penalty"), [(1, 2, False), (2, 2, False), (2, 1, True)]
)
def test_ranks_skip_different_blocks(pool, stage, accumulation, penalty, transport):
    trace = pool.run(2, train, config_of(stage, accumulation, transport), penalty)[0]
    expected = plain_trace(materialise_model(build()), steps(accumulation, penalty=penalty))
    assert_same(expected, trace)


def skip_at_stage_3(rank, world):
    """Return the message for ranks that skip different blocks. Runs on every rank."""
    engine = cases.engine(build(), config_of(3, 1))
    first, second = cases.ragged_steps(world, steps=2, keys=())
    engine.train_batch(first[rank])
    batch = {**second[rank], "skip": str(1 + rank)}
    return message_of(engine.train_batch, batch, error=CommunicationError)


def test_different_blocks_at_stage_3_are_named(pool):
    for message in pool.run(2, skip_at_stage_3):
        assert "rank 0: gathering of blocks.2; rank 1: gathering of blocks.1" in message, message


def mean_loss(model, micro_batch, skip):
    total, weight = plait.causal_lm_loss(model(micro_batch["input_ids"], skip=skip), micro_batch)
    return total / weight


def gradients_of(model, case, ranks):
    """Return the gradients of a step in which ranks skip different blocks.

    Args:
        model: The model.
        case: What else happens before the backward.
        ranks: Ranks whose micro-batches are used.
    """
    micro_batches = cases.ragged_steps(2, steps=2, keys=())[1]
    others = cases.ragged_steps(2, steps=3, keys=())[2]
    for rank in ranks:
        if case == "evaluation before":
            with torch.no_grad():
                model(others[rank]["input_ids"])
        loss = mean_loss(model, micro_batches[rank], skip=("1", "23")[rank])
        if case == "evaluation between":
            with torch.no_grad():
                model(others[rank]["input_ids"])
        if case == "two forwards":
            loss = loss + mean_loss(model, others[rank], skip=("03", "")[rank])
        if case == "a block twice on one rank":
            model.repeats = rank == 0
            loss = loss + mean_loss(model, others[rank], skip="")
            model.repeats = False
        (loss / len(ranks)).backward()
    return full_gradients(model)


def gradients_of_own_loop(rank, world, stage, case):
    """Runs on every rank."""
    model = build()
    plait.parallelize(model, config_of(stage, 1))
    return gradients_of(model, case, [rank])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "case", ["evaluation before", "evaluation between", "two forwards", "a block twice on one rank"]
)
def test_forwards_around_one_with_skipped_blocks(pool, stage, case):
    expected = gradients_of(materialise_model(build()), case, [0, 1])
    for gradients in pool.run(2, gradients_of_own_loop, stage, case):
        assert_gradients_close(gradients, expected)
