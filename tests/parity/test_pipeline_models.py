"""Models and losses with unusual forwards in a pipeline, against one process in float64.

Others are refused on every rank, before the first update.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same, plain_trace
from tests.parity.pipelines import dp_of, settings
from tests.unit.model.families import family


class EmbeddingReadAgain(cases.PlainModel):
    """Adds the embedding of the inputs to the output of the last block."""

    def forward(self, input_ids, side=False):
        embedded = self.embed(input_ids)
        hidden = embedded
        for block in self.blocks:
            hidden = block(hidden, side)
        return cases.Output(self.head(hidden + embedded))


class TrimmedToTheMask(cases.PlainModel):
    """Cuts off positions that no row's mask has, so that shapes follow from values."""

    def length(self, attention_mask):
        return int(attention_mask.sum(1).max())

    def forward(self, input_ids, attention_mask):
        length = self.length(attention_mask)
        logits = super().forward(input_ids[:, :length]).logits
        return cases.Output(F.pad(logits, (0, 0, 0, input_ids.shape[1] - length)))


class TrimmedToHalf(TrimmedToTheMask):
    """Cuts off the second half of the positions if no mask has any of it."""

    def length(self, attention_mask):
        length = attention_mask.shape[1]
        return length if attention_mask[:, length // 2 :].any() else length // 2


class BlocksRunTwice(cases.PlainModel):
    """Runs its blocks twice in one forward."""

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden, side)
        return cases.Output(self.head(hidden))


class EarlierBlockRead(cases.PlainModel):
    """The last block also reads the output of the first."""

    def forward(self, input_ids, side=False):
        outputs = [self.embed(input_ids)]
        for block in self.blocks:
            skip = outputs[1] if len(outputs) > 2 else 0
            outputs.append(block(outputs[-1] + skip, side))
        return cases.Output(self.head(outputs[-1]))


class RecordedStates(cases.PlainModel):
    """Returns the outputs of its blocks and a number computed from them along with its logits."""

    def forward(self, input_ids, side=False):
        states = [self.embed(input_ids)]
        for block in self.blocks:
            states.append(block(states[-1], side))
        size = torch.stack([state.square().mean() for state in states]).sum()
        return SimpleNamespace(logits=self.head(states[-1]), states=tuple(states), size=size)


KINDS: dict[str, type[cases.PlainModel]] = {
    "skip": EmbeddingReadAgain,
    "trims": TrimmedToTheMask,
    "halves": TrimmedToHalf,
    "twice": BlocksRunTwice,
    "earlier": EarlierBlockRead,
    "recorded": RecordedStates,
}


def padded_steps(micro_batches):
    """Return steps of micro-batches of one shape whose masks end at different positions."""
    generator = torch.Generator().manual_seed(2)

    def micro_batch(length):
        ids = torch.randint(0, cases.VOCABULARY, (2, 8), generator=generator)
        mask = (torch.arange(8) < length).long().expand(2, 8)
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    lengths = (8, 4, 3, 7)
    return [
        [micro_batch(lengths[(index + step) % 4]) for index in range(micro_batches)]
        for step in range(3)
    ]


def build(kind):
    """Return a model with the same weights on every call.

    Of the kinds "early" and "late" only the first block or the head is trained.
    """
    torch.manual_seed(7)
    if kind in ("mixtral", "bart"):
        return family(kind, num_hidden_layers=4, decoder_layers=4).train()
    model = KINDS.get(kind, cases.PlainModel)(tied=kind == "skip", layers=4).double()
    if kind in ("early", "late"):
        trained = model.blocks[0] if kind == "early" else model.head
        model.requires_grad_(False)
        trained.requires_grad_(True)
    return model


def steps_for(kind, micro_batches):
    if kind in ("trims", "halves"):
        return padded_steps(micro_batches)
    keys = ("attention_mask",) if kind in ("mixtral", "bart") else ()
    return cases.ragged_steps(micro_batches, keys=keys)


def train_all(rank, world, kinds, config, folder):
    """Train each model with an optimizer instance over all parameters. Runs on every rank."""
    traces = {}
    for kind in kinds:
        model = build(kind)
        engine = cases.engine(model, config, optimizer=cases.sgd(list(model.parameters())))
        steps = steps_for(kind, dp_of(config) * config["gradient_accumulation_steps"])
        traces[kind] = engine_trace(engine, steps)
        engine.save_checkpoint(f"{folder}/{kind}")
        assert engine.load_checkpoint(f"{folder}/{kind}") is not None
    return traces if rank == 0 else {}


def check(pool, world, kinds, config, folder):
    """Train each model on the layout and in one process, and compare."""
    traces = pool.run(world, train_all, kinds, config, str(folder))[0]
    for kind in kinds:
        steps = steps_for(kind, dp_of(config) * config["gradient_accumulation_steps"])
        expected = plain_trace(build(kind), steps, optimizer=cases.sgd)
        assert_same(expected, traces[kind], bar=1e-9, where=kind)


def test_models_that_train_in_a_pipeline(pool, tmp_path):
    """Covers defects A3, A20, B4 and B6.

    A3 is a norm after the embedding that is registered after the blocks (Bart). A20 are shapes
    that follow from values, B4 stages with nothing to train, and B6 an optimizer instance.
    """
    kinds = ["bart", "trims", "halves", "early", "late", "skip", "recorded"]
    check(pool, 2, kinds, settings(0, 4, pp=2), tmp_path)


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_stages_with_data_parallelism(pool, tmp_path, stage):
    """Ranks of frozen stages have no buckets, or sharded units without gradients (B4)."""
    axis = "dp_replicate" if stage == 0 else "dp_shard"
    check(pool, 4, ["early", "late", "skip"], settings(stage, 2, pp=2, **{axis: 2}), tmp_path)


def loss_of_recorded_states(output, batch):
    total, weight = plait.causal_lm_loss(output, batch)
    return total + output.size, weight


def loss_of_routers(output, batch):
    total, weight = plait.causal_lm_loss(output, batch)
    return total + output.aux_loss, weight


REFUSED = {
    "recorded": (
        loss_of_recorded_states,
        "the model's output `size` follows from blocks before blocks.",
    ),
    "mixtral": (loss_of_routers, "the balance loss is a sum over ranks, which no output holds"),
    "twice": (plait.causal_lm_loss, "4 of the 4 blocks run more than once"),
    "earlier": (plait.causal_lm_loss, "does not pass through the chain of blocks"),
}


def train_one_step(kind, loss):
    model = build(kind)
    if kind == "mixtral":
        model.config.output_router_logits = True
    weighted = plait.WeightedLoss(loss, plait.causal_lm_loss.weight)
    engine = plait.initialize(model, settings(0, 2, pp=2), loss_fn=weighted)
    engine.train_batch(steps_for(kind, 2)[0])


def refusals(rank, world):
    """Return the message for each refused model, and try `predict`. Runs on every rank."""
    messages = {}
    for kind, (loss, _) in REFUSED.items():
        with pytest.raises(plait.PlaitError) as error:
            train_one_step(kind, loss)
        messages[kind] = str(error.value)

    # Outputs that the last stage does not compute may not be read either.
    engine = cases.engine(build("recorded"), settings(0, 2, pp=2))
    output = engine.predict(steps_for("recorded", 1)[0][0])
    if rank == 0:
        assert output is None
    else:
        assert output.logits.shape[-1] == cases.VOCABULARY
        with pytest.raises(plait.PlaitError, match="the model's output `states` follows from"):
            str(output.states[1])
    return messages


def test_models_and_losses_that_are_refused(pool):
    """A loss may not read what earlier stages recorded (A4). Blocks must form a chain."""
    first, second = pool.run(2, refusals)
    assert first == second
    for kind, (_, fragment) in REFUSED.items():
        assert fragment in first[kind], kind
    assert "stage 1" in first["recorded"]
