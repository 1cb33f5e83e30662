"""Tensor and sequence parallelism against one process in float64, with every ZeRO stage.

Model families have a plan of Transformers or none.
"""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import nn

import plait
from plait.errors import InputError
from plait.losses.loss import CausalLMLoss
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, reference_trace
from tests.covers import cover
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, assert_same, materialise_model
from tests.parity.data_parallel import materialised as one_process_model
from tests.parity.refusals import message_of
from tests.parity.tensor_parallel import FAMILIES, check, plan, settings


def alternately_tied(kinds):
    """Return (family, tied embeddings) as parameters.

    Every other family is tied in `make test`, and the other half is in `make proof`.
    """
    parameters = []
    for half in (0, 1):
        for index, kind in enumerate(kinds):
            tied = (index + half) % 2 == 1
            name = f"{kind}-{'tied' if tied else 'untied'}"
            marks = [pytest.mark.proof] if half else []
            parameters.append(pytest.param(kind, tied, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(("kind", "tied"), alternately_tied([*FAMILIES, "plain", "frozen"]))
def test_families(pool, kind, tied):
    """A split layer that is frozen has no gradient and no weight decay."""
    check(pool, 2, kind, tied, settings(2, 2, 0, 1, 2, **plan(kind)))


@pytest.mark.parametrize(
    ("kind", "tied"),
    alternately_tied(["llama", "qwen3", "gemma", "gemma2", "mistral", "gpt_neox"]),
)
def test_sequence_parallel(pool, kind, tied):
    """Some lengths are no multiples of tp."""
    check(pool, 2, kind, tied, settings(2, 2, 0, 1, 2, True))


@pytest.mark.parametrize(
    ("kind", "stage", "accumulation", "sequence"),
    cover(product(("llama", "qwen3"), (0, 1, 2, 3), (1, 3), (False, True))),
)
def test_with_zero(pool, kind, stage, accumulation, sequence):
    check(pool, 4, kind, kind == "qwen3", settings(4, 2, stage, 1, accumulation, sequence))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_four_ways(pool, kind):
    """Two ranks share each of llama's two key-value heads, and widths do not divide."""
    for sequence in (False, True) if kind == "llama" else (False,):
        check(pool, 4, kind, False, settings(4, 4, 0, 1, 1, sequence))


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_sharding(pool, stage):
    """Two replicas, two shards, and two ranks of tp."""
    check(pool, 8, "llama", True, settings(8, 2, stage, 2, 1))


def shapes_of_shards(rank, world):
    """Return the full and the local shape of each parameter. Runs on every rank."""
    model = nn.ModuleDict({"columns": nn.Linear(4096, 4096), "rows": nn.Linear(4096, 4096)})
    config = settings(4, 4, 0, 1, 1, plan={"columns": "colwise", "rows": "rowwise"})
    plait.parallelize(model, config)
    shapes = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            shapes[name] = (tuple(parameter.shape), tuple(parameter.to_local().shape))
    return shapes


def test_linear_4096_on_4_devices(pool):
    """Each of four devices keeps a quarter of a Linear(4096, 4096) (mission T1).

    torch stores weights as [out, in], so columns of the mission are rows of the tensor.
    """
    for shapes in pool.run(4, shapes_of_shards):
        assert shapes["columns.weight"] == ((4096, 4096), (1024, 4096))
        assert shapes["columns.bias"] == ((4096,), (1024,))
        assert shapes["rows.weight"] == ((4096, 4096), (4096, 1024))


IDS = torch.arange(14).view(2, 7)


def logits_of_a_call(rank, world, config):
    """Call the model outside of training. Runs on every rank."""
    model = cases.build("llama", tied=False)
    with keeping_float64(model), torch.no_grad():
        cases.engine(model, config)
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_a_direct_call_returns_full_logits(pool, sequence):
    """Only the loss reads logits that are split over the vocabulary."""
    model = one_process_model("llama", tied=False)
    with keeping_float64(model), torch.no_grad():
        expected = model(input_ids=IDS).logits
    for logits in pool.run(2, logits_of_a_call, settings(2, 2, 0, 1, 1, sequence)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def train_with_the_shortest_file(rank, world):
    """Runs on every rank."""
    config = {
        "zero_optimization": {"stage": 2},
        "tensor_parallel": {"tp_size": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = cases.engine(cases.build("llama", tied=True, dtype=torch.float32), config)
    batch = cases.ragged_steps(1, steps=1, size=3)[0][0]
    losses = [float(engine.train_batch(batch)) for _ in range(5)]
    return str(engine.mesh.layout), engine.config.data_parallel.stage, losses


def test_the_shortest_file(pool):
    """Two keys and an optimizer are enough. The other processes are data parallel (mission Z7)."""
    for layout, stage, losses in pool.run(4, train_with_the_shortest_file):
        assert (layout, stage) == ("dp_shard=2 x tp=2", 2)
        assert losses[-1] < losses[0]


def train_with_dropout(rank, world, stage):
    """Train GPT-2 with all its dropouts. Runs on every rank.

    Returns the losses, the data-parallel rank and the state of the random generator.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = AutoConfig.for_model(
        "gpt2", vocab_size=cases.VOCABULARY, bos_token_id=0, eos_token_id=0, **fields
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    engine = cases.engine(model, settings(world, 2, stage, 1, 1))
    steps = cases.ragged_steps(world // 2, steps=3)
    losses = [float(engine.train_batch([step[engine.dp_rank]])) for step in steps]
    return losses, engine.dp_rank, torch.get_rng_state()


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_is_shared_over_tp_and_differs_over_dp(pool, stage):
    """Ranks of tp would otherwise compute with different activations, which no error shows."""
    results = pool.run(4, train_with_dropout, stage)
    generators = {dp_rank: state for _, dp_rank, state in results}
    for losses, dp_rank, state in results:
        assert losses == results[0][0]
        assert torch.equal(state, generators[dp_rank])
    assert not torch.equal(generators[0], generators[1])


class EmbeddedModel(cases.PlainModel):
    """A model whose output also has the embeddings and the last hidden states."""

    def __init__(self):
        super().__init__(tied=False)
        # Sequence parallelism refuses a layer that is neither split nor a norm.
        for block in self.blocks:
            del block.side

    def forward(self, input_ids):
        embedded = self.embed(input_ids)
        hidden = embedded
        for block in self.blocks:
            hidden = block(hidden, False)
        return PenaltyOutput(self.head(hidden), embedded, hidden)


@dataclass
class PenaltyOutput:
    """Output of `EmbeddedModel`."""

    logits: torch.Tensor
    embedded: torch.Tensor
    hidden: torch.Tensor


class PenaltyLoss(CausalLMLoss):
    """Cross entropy plus a gradient penalty on the embeddings.

    Args:
        of: The value whose gradient is penalised, "loss" or "hidden" states.
    """

    split_logits = True

    def __init__(self, of):
        self.of = of

    def __call__(self, output, batch):
        loss, weight = super().__call__(output, batch)
        value = loss if self.of == "loss" else output.hidden.square().sum()
        (slope,) = torch.autograd.grad(value, output.embedded, create_graph=True)
        return loss + slope.square().sum(), weight


def embedded_model():
    torch.manual_seed(7)
    with torch.device("meta"):
        return EmbeddedModel().double()


def train_with_penalty(rank, world, of, parallel):
    """Runs on every rank."""
    config = settings(2, 2, 0, 1, 2, **plan("plain"), **parallel)
    engine = plait.initialize(embedded_model(), config, loss_fn=PenaltyLoss(of))
    return engine_trace(engine, cases.steps_for("plain", 2))


PENALTIES = [
    ("hidden", {}),
    ("hidden", {"sequence": True}),
    ("loss", {"loss_parallel": False}),
]


@pytest.mark.parametrize(("of", "parallel"), PENALTIES, ids=["tp", "sp", "full logits"])
def test_a_gradient_penalty(pool, of, parallel):
    """The collectives of a backward have a backward themselves."""
    expected = reference_trace(
        materialise_model(embedded_model()),
        cases.steps_for("plain", 2),
        loss_fn=PenaltyLoss(of),
        optimizer=cases.adamw,
        clipping=CLIPPING,
    )
    assert_same(expected, pool.run(2, train_with_penalty, of, parallel)[0])


def refused_penalty(rank, world, of, parallel):
    """Return the message about a penalty. Runs on every rank."""
    return message_of(train_with_penalty, rank, world, of, parallel, error=InputError)


@pytest.mark.parametrize(
    ("of", "parallel", "remedy"),
    [
        ("loss", {}, "use parallel.loss_parallel = false"),
        ("hidden", {"tensor_overlap": 2}, "use parallel.tensor_overlap = 0"),
    ],
    ids=["split logits", "overlap"],
)
def test_a_gradient_penalty_that_is_refused(pool, of, parallel, remedy):
    for message in pool.run(2, refused_penalty, of, parallel):
        assert message.endswith(remedy)
