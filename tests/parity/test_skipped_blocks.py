"""Ranks that run different blocks in one step: LayerDrop, stochastic depth, samples without an image."""

import pytest
import torch

import plait
from plait.errors import CommunicationError
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import assert_same, materialise_model, plain_trace, settings

LAYERS = 4
SKIPPED = [["1", "2"], ["", "03"], ["012", ""], ["3", "3"], ["", ""]]
"""Blocks that a step leaves out, per rank."""


class SkippingModel(cases.PlainModel):
    """A model whose batch names the blocks to leave out, and which may read a weight outside of its block."""

    repeats = False

    def forward(self, input_ids, skip="", penalty=False):
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if str(index) not in skip:
                hidden = block(hidden, False)
                hidden = block(hidden, False) if self.repeats and index == 1 else hidden
        if penalty:
            hidden = hidden + self.blocks[1].up.weight.square().mean()
        return cases.Output(self.head(hidden))


def build(*, device="meta"):
    """The model, in float64."""
    torch.manual_seed(7)
    with torch.device(device):
        return SkippingModel(tied=False, layers=LAYERS).to(torch.float64)


def steps(accumulation, *, penalty):
    """Micro-batches of two ranks, with what each leaves out."""
    plan = cases.ragged_steps(2 * accumulation, steps=len(SKIPPED), keys=())
    return [
        [
            {**piece, "skip": skipped[index // accumulation], "penalty": penalty}
            for index, piece in enumerate(pieces)
        ]
        for pieces, skipped in zip(plan, SKIPPED, strict=True)
    ]


def train(rank, world, config, penalty):
    """Runs in a worker."""
    engine = plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    accumulation = config["gradient_accumulation_steps"]
    trace = engine_trace(engine, steps(accumulation, penalty=penalty))
    return trace if rank == 0 else None


@pytest.mark.parametrize("transport", ["torch", "auto"])
@pytest.mark.parametrize(
    ("stage", "accumulation", "penalty"), [(1, 2, False), (2, 2, False), (2, 1, True)]
)
def test_ranks_skip_different_blocks(pool, stage, accumulation, penalty, transport):
    config = settings(2, stage, 1, accumulation)
    config["parallel"]["transport"] = transport
    trace = pool.run(2, train, config, penalty)[0]
    expected = plain_trace(materialise_model(build()), steps(accumulation, penalty=penalty))
    assert_same(expected, trace)


def skip_at_stage_3(rank, world, config):
    """Runs in a worker. Returns the error of the step in which the ranks skip different blocks."""
    engine = plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    first, second = cases.ragged_steps(world, steps=2, keys=())
    engine.train_batch(first[rank])
    with pytest.raises(CommunicationError) as caught:
        engine.train_batch({**second[rank], "skip": str(1 + rank)})
    return str(caught.value)


def test_different_blocks_at_stage_3_are_named(pool):
    config = settings(2, 3, 1, 1)
    config["parallel"]["transport"] = "torch"
    for message in pool.run(2, skip_at_stage_3, config):
        assert "rank 0: gathering of blocks.2; rank 1: gathering of blocks.1" in message, message


def own_loop(rank, world, config, case):
    """Runs in a worker. Returns the gradients of one step of the user's own loop."""
    model = build()
    plait.parallelize(model, config)
    return gradients_of(model, case, [rank])


def mean_of(model, piece, skip):
    """Mean over the targets of a micro-batch."""
    total, weight = plait.causal_lm_loss(model(piece["input_ids"], skip=skip), piece)
    return total / weight


def gradients_of(model, case, ranks):
    """Gradients of a step in which ranks skip different blocks. `case` says what happens around the forward."""
    first, second = (
        cases.ragged_steps(2, steps=2, keys=())[1],
        cases.ragged_steps(2, steps=3, keys=())[2],
    )
    for rank in ranks:
        if case == "evaluation before":
            with torch.no_grad():
                model(second[rank]["input_ids"])
        loss = mean_of(model, first[rank], skip=("1", "23")[rank])
        if case == "evaluation between":
            with torch.no_grad():
                model(second[rank]["input_ids"])
        if case == "two forwards":
            loss = loss + mean_of(model, second[rank], skip=("03", "")[rank])
        if case == "a block twice on one rank":
            model.repeats = rank == 0
            loss = loss + mean_of(model, second[rank], skip="")
            model.repeats = False
        (loss / len(ranks)).backward()
    return {
        name: None if p.grad is None else full_tensor_on_cpu(p.grad)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "case", ["evaluation before", "evaluation between", "two forwards", "a block twice on one rank"]
)
def test_around_a_forward_with_skipped_blocks(pool, stage, case):
    config = settings(2, stage, 1, 1)
    config["parallel"]["transport"] = "torch"
    model = build()
    materialise_model(model)
    expected = gradients_of(model, case, [0, 1])
    for gradients in pool.run(2, own_loop, config, case):
        for name, gradient in expected.items():
            assert (gradients[name] is None) == (gradient is None), name
            if gradient is not None:
                torch.testing.assert_close(
                    gradients[name], gradient, rtol=0, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}"
                )
