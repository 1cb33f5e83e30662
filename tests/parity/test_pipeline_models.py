"""What models and losses may do in a pipeline, against one process in float64; what they may not is refused on every rank."""

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


class Skip(cases.PlainModel):
    """Reads its embedding again after the blocks."""

    def forward(self, input_ids, side=False):
        first = hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, side)
        return cases.Output(self.head(hidden + first))


class Trims(cases.PlainModel):
    """Leaves out what the mask leaves out of every row, so shapes between blocks follow from values."""

    def length(self, attention_mask):
        return int(attention_mask.sum(1).max())

    def forward(self, input_ids, attention_mask):
        length = self.length(attention_mask)
        logits = super().forward(input_ids[:, :length]).logits
        return cases.Output(F.pad(logits, (0, 0, 0, input_ids.shape[1] - length)))


class Halves(Trims):
    """Asks only whether the second half counts."""

    def length(self, attention_mask):
        half = attention_mask.shape[1] // 2
        return attention_mask.shape[1] if attention_mask[:, half:].any() else half


class Twice(cases.PlainModel):
    """Runs its blocks two times over."""

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden, side)
        return cases.Output(self.head(hidden))


class EarlierBlock(cases.PlainModel):
    """A later block also reads what an earlier one returned."""

    def forward(self, input_ids, side=False):
        outputs = [self.embed(input_ids)]
        for block in self.blocks:
            outputs.append(
                block(outputs[-1] + outputs[1] if len(outputs) > 2 else outputs[-1], side)
            )
        return cases.Output(self.head(outputs[-1]))


class Recorded(cases.PlainModel):
    """Returns what its blocks returned, and a number of it, besides its logits."""

    def forward(self, input_ids, side=False):
        states = [self.embed(input_ids)]
        for block in self.blocks:
            states.append(block(states[-1], side))
        size = torch.stack([state.square().mean() for state in states]).sum()
        return SimpleNamespace(logits=self.head(states[-1]), states=tuple(states), size=size)


def padded(micro_batches):
    """Steps of micro-batches of one shape, whose masks end at different places."""
    generator = torch.Generator().manual_seed(2)
    steps = []
    for step in range(3):
        pieces = []
        for index in range(micro_batches):
            ids = torch.randint(0, cases.VOCABULARY, (2, 8), generator=generator)
            mask = (torch.arange(8) < (8, 4, 3, 7)[(index + step) % 4]).long().expand(2, 8)
            pieces.append(
                {
                    "input_ids": ids,
                    "attention_mask": mask,
                    "labels": ids.masked_fill(mask == 0, -100),
                }
            )
        steps.append(pieces)
    return steps


KINDS: dict[str, type[cases.PlainModel]] = {
    "skip": Skip,
    "trims": Trims,
    "halves": Halves,
    "twice": Twice,
    "earlier": EarlierBlock,
    "recorded": Recorded,
}


def model_of(kind):
    """With the same weights everywhere. `early` and `late` are what is trained of a plain model."""
    torch.manual_seed(7)
    if kind in ("mixtral", "bart"):
        return family(kind, num_hidden_layers=4, decoder_layers=4).train()
    model = KINDS.get(kind, cases.PlainModel)(tied=kind == "skip", layers=4).double()
    if kind in ("early", "late"):
        trained = model.blocks[0] if kind == "early" else model.head
        model.requires_grad_(False)
        trained.requires_grad_(True)
    return model


def data_of(kind, micro_batches):
    """What the model takes."""
    if kind in ("trims", "halves"):
        return padded(micro_batches)
    return cases.ragged_steps(
        micro_batches, keys=("attention_mask",) if kind in ("mixtral", "bart") else ()
    )


def train_all(rank, world, kinds, config, folder):
    """Runs in a worker. The optimizer is an instance over all parameters."""
    traces = {}
    for kind in kinds:
        model = model_of(kind)
        engine = cases.engine(model, config, optimizer=cases.sgd(list(model.parameters())))
        steps = data_of(kind, dp_of(config) * config["gradient_accumulation_steps"])
        traces[kind] = engine_trace(engine, steps)
        engine.save_checkpoint(f"{folder}/{kind}")
        assert engine.load_checkpoint(f"{folder}/{kind}") is not None
    return traces if rank == 0 else {}


def compared(pool, world, kinds, config, folder):
    """Train each and compare with one process."""
    found = pool.run(world, train_all, kinds, config, str(folder))[0]
    for kind in kinds:
        steps = data_of(kind, dp_of(config) * config["gradient_accumulation_steps"])
        wanted = plain_trace(model_of(kind), steps, optimizer=cases.sgd)
        assert_same(wanted, found[kind], bar=1e-9, where=kind)


def test_what_models_may_do(pool, tmp_path):
    """A3: a norm after the embedding that is registered after the blocks. A20: shapes that follow from a mask's values. B4: stages with
    nothing to train. B6: an optimizer instance. And an embedding that is read again after the blocks, a router's aux loss not in the loss,
    recorded states not in the loss."""
    kinds = ["bart", "trims", "halves", "early", "late", "skip", "recorded"]
    compared(pool, 2, kinds, settings(0, 4, pp=2), tmp_path)


@pytest.mark.parametrize("stage", [0, 2])
def test_stages_with_nothing_to_train_and_data_parallelism(pool, tmp_path, stage):
    """B4: their ranks have no buckets, or sharded units without gradients."""
    axis = "dp_replicate" if stage == 0 else "dp_shard"
    compared(pool, 4, ["early", "late", "skip"], settings(stage, 2, pp=2, **{axis: 2}), tmp_path)


def reads_recorded(output, batch):
    """A loss of more than the logits."""
    total, weight = plait.causal_lm_loss(output, batch)
    return total + output.size, weight


def reads_router(output, batch):
    """The loss that balances experts."""
    total, weight = plait.causal_lm_loss(output, batch)
    return total + output.aux_loss, weight


def told(rank, world):
    """Runs in a worker: what is said on this rank."""
    config = settings(0, 2, pp=2)
    said = {}
    for kind, loss in (
        ("recorded", reads_recorded),
        ("mixtral", reads_router),
        ("twice", None),
        ("earlier", None),
    ):
        model = model_of(kind)
        if kind == "mixtral":
            model.config.output_router_logits = True
        try:
            if loss is None:
                used = plait.causal_lm_loss
            else:
                used = plait.WeightedLoss(loss, plait.causal_lm_loss.weight)
            engine = plait.initialize(model, config, loss_fn=used)
            said[kind] = "made"
            engine.train_batch(data_of(kind, 2)[0])
        except plait.PlaitError as error:
            said[kind] = str(error)
    engine = plait.initialize(model_of("recorded"), config, loss_fn=plait.causal_lm_loss)
    output = engine.predict(data_of("recorded", 1)[0][0])
    try:
        said["predict"] = (
            "" if output is None else f"{tuple(output.logits.shape)[-1]} {output.states[1]}"
        )
    except plait.PlaitError as error:
        said["predict"] = str(error)
    return said


def test_what_they_may_not_do(pool):
    """A4: a loss that reads what earlier stages' blocks recorded. Blocks that run more than once, or read what an earlier one returned.
    Said alike on every rank, before the first update."""
    first, second = pool.run(2, told)
    outputs = first.pop("predict"), second.pop("predict")
    assert first == second
    assert (
        "the model's output `size` follows from blocks before blocks." in first["recorded"]
        and "stage 1" in first["recorded"]
    )
    assert "the balance loss is a sum over ranks, which no output holds" in first["mixtral"]
    assert "4 of the 4 blocks run more than once" in first["twice"]
    assert "does not pass through the chain of blocks" in first["earlier"]
    assert outputs[0] == "" and "the model's output `states` follows from" in outputs[1]
