"""Tensor and sequence parallelism against one process in float64, for model families with and without a plan of their own, with every
ZeRO stage."""

from itertools import product

import pytest
import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from tests.covers import cover
from tests.parity import cases
from tests.parity.data_parallel import materialised as one_process_model
from tests.parity.tensor_parallel import FAMILIES, check, plan, settings


def alternately(kinds):
    """(family, tied embeddings): every family in `make test`, every other one tied; the other half is proof."""
    pairs = [
        (kind, (number + half) % 2 == 1) for half in (0, 1) for number, kind in enumerate(kinds)
    ]
    return [
        pytest.param(
            kind,
            tied,
            id=f"{kind}-{'tied' if tied else 'untied'}",
            marks=[] if at < len(kinds) else [pytest.mark.proof],
        )
        for at, (kind, tied) in enumerate(pairs)
    ]


@pytest.mark.parametrize(("kind", "tied"), alternately([*FAMILIES, "plain", "frozen"]))
def test_families(pool, kind, tied):
    """tp 2, accumulation, loss parallel; a split layer that is frozen has no gradient and does not decay."""
    check(pool, 2, kind, tied, settings(2, 2, 0, 1, 2, **plan(kind)))


@pytest.mark.parametrize(
    ("kind", "tied"), alternately(["llama", "qwen3", "gemma", "gemma2", "mistral", "gpt_neox"])
)
def test_sequence_parallel(pool, kind, tied):
    """Ragged lengths that tp does not divide included."""
    check(pool, 2, kind, tied, settings(2, 2, 0, 1, 2, True))


@pytest.mark.parametrize(
    ("kind", "stage", "accumulation", "sequence"),
    cover(product(("llama", "qwen3"), (0, 1, 2, 3), (1, 3), (False, True))),
)
def test_with_zero(pool, kind, stage, accumulation, sequence):
    """tp 2 x dp 2."""
    check(pool, 4, kind, kind == "qwen3", settings(4, 2, stage, 1, accumulation, sequence))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_four_ways(pool, kind):
    """tp 4: one key-value head for two ranks (llama has 2), and widths that do not divide."""
    for sequence in (False, True) if kind == "llama" else (False,):
        check(pool, 4, kind, False, settings(4, 4, 0, 1, 1, sequence))


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid(pool, stage):
    """2 x 2 x 2: replicas, shards, tp."""
    check(pool, 8, "llama", True, settings(8, 2, stage, 2, 1))


def shapes(rank, world):
    """Runs in a worker."""
    from torch import nn

    model = nn.ModuleDict({"columns": nn.Linear(4096, 4096), "rows": nn.Linear(4096, 4096)})
    config = settings(4, 4, 0, 1, 1, plan={"columns": "colwise", "rows": "rowwise"})
    plait.parallelize(model, config)
    return {
        name: (tuple(p.shape), tuple(p.to_local().shape))
        for name, p in model.named_parameters()
        if hasattr(p, "to_local")
    }


def test_linear_4096_on_4_devices(pool):
    """MISSION T1, literally: each device keeps 4096 x 1024 of a Linear(4096, 4096), by columns (torch stores [out, in]) or by rows."""
    for found in pool.run(4, shapes):
        assert found["columns.weight"] == ((4096, 4096), (1024, 4096))
        assert found["columns.bias"] == ((4096,), (1024,))
        assert found["rows.weight"] == ((4096, 4096), (4096, 1024))


def logits(rank, world, config):
    """What a caller of the model gets outside training. Runs in a worker."""
    model = (
        one_process_model("llama", tied=False)
        if config is None
        else cases.build("llama", tied=False)
    )
    with keeping_float64(model):
        if config is not None:
            plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        with torch.no_grad():
            return model(input_ids=torch.arange(14).view(2, 7)).logits


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_a_direct_call_gives_whole_logits(pool, sequence):
    """Loss parallel is for the loss alone."""
    wanted = pool.run(1, logits, None)[0]
    for found in pool.run(2, logits, settings(2, 2, 0, 1, 1, sequence)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def shortest(rank, world):
    """Runs in a worker."""
    engine = cases.engine(
        cases.build("llama", tied=True, dtype=torch.float32),
        {
            "zero_optimization": {"stage": 2},
            "tensor_parallel": {"tp_size": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
    )
    batch = cases.ragged_steps(1, steps=1, size=3)[0][0]
    return (
        str(engine.mesh.layout),
        engine.config.data_parallel.stage,
        [float(engine.train_batch(batch)) for _ in range(5)],
    )


def test_the_shortest_file(pool):
    """MISSION Z7: two keys (and an optimizer) are enough; the rest of the processes are data parallel, and the loss falls."""
    for layout, stage, losses in pool.run(4, shortest):
        assert (layout, stage) == ("dp_shard=2 x tp=2", 2)
        assert losses[-1] < losses[0]


def with_dropout(rank, world, stage):
    """GPT-2 with all its dropouts. Runs in a worker."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": cases.VOCABULARY,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", bos_token_id=0, eos_token_id=0, **shape)
        )
    engine = plait.initialize(model, settings(world, 2, stage, 1, 1), loss_fn=plait.causal_lm_loss)
    steps = cases.ragged_steps(world // 2, steps=3)
    losses = [float(engine.train_batch([step[engine.dp_rank]])) for step in steps]
    states = {"rng": torch.get_rng_state(), "dp": torch.tensor(engine.dp_rank)}
    return losses, states


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_is_shared_over_tp_and_differs_over_dp(pool, stage):
    """Activations that are replicated over tp must be dropped alike on its ranks, or they drift apart unseen."""
    found = pool.run(4, with_dropout, stage)
    assert len({tuple(losses) for losses, _ in found}) == 1
    by_dp = {int(states["dp"]): states["rng"] for _, states in found}
    for _, states in found:
        assert torch.equal(states["rng"], by_dp[int(states["dp"])])
    assert not torch.equal(by_dp[0], by_dp[1])


def refused(rank, world, kind, config):
    """What is said. Runs in a worker."""
    try:
        plait.initialize(cases.build(kind, tied=False), config)
    except plait.PlaitError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("llama", {"plan": {"model.layers.*.mlp.upproj": "colwise"}}, "names no module"),
        ("llama", {"plan": {"model.layers.*.mlp": "colwise"}}, "mlp"),
        ("plain", {"plan": {"blocks.*.norm": "colwise"}}, "norm"),
        ("plain", {"plan": {"blocks.*.up": "columnwise"}}, "columnwise"),
    ],
)
def test_wrong_plans_are_refused(pool, kind, more, said):
    """By name."""
    for found in pool.run(2, refused, kind, settings(2, 2, 0, 1, 1, **more)):
        assert said in found, found


def test_heads_are_refused(pool):
    """With the degrees that work."""
    for found in pool.run(3, refused, "llama", settings(3, 3, 0, 1, 1)):
        assert found == "parallel.tp = 3: num_attention_heads is 4 and 4 % 3 != 0; use 1, 2 or 4"
