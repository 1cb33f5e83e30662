"""Recomputed blocks change no bit: losses, gradients and parameters are those of the same layout without recompute, dropout on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait._torch.tensors import local_tensor
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.dryrun.dry_model import rank_activations, token_batch
from plait.model.blocks import find_blocks
from plait.parallel.parts import Parts
from plait.sizes import GIB
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.fake.activations import LAYERS, LENGTH, foretold
from tests.parity import cases
from tests.parity.data_parallel import assert_same
from tests.parity.digests import build, digest
from tests.parity.pipelines import SCHEDULES, named
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import check, plan, settings

MODES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "every second block": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "attention": {"mode": "selective", "keep": ["attention"]},
    "matmul": {"mode": "selective", "keep": ["matmul", "attention", "aten.gelu"]},
}


def digests(rank, world, kind, config, modes, dtype):
    """One run without recompute, and one for each of `modes`. Runs in a worker."""
    found = []
    dp = world // config["parallel"]["tp"]
    for more in ({}, *modes):
        mode = dict(more)
        partition = mode.pop("partition", False)
        parallel = {**config["parallel"], **({"recompute": mode} if mode else {})}
        file = {
            **config,
            "parallel": parallel,
            "activation_checkpointing": {"partition_activations": partition},
        }
        model = build(
            kind, dtype, dropout=not config["parallel"]["sequence_parallel"]
        )  # which refuses dropout
        engine = plait.initialize(model, file, loss_fn=plait.causal_lm_loss)
        expected = sum(
            m == "none" for m in engine.config.recompute.modes(len(engine.parts.blocks))
        ) < len(engine.parts.blocks)
        assert expected == bool(mode)
        found.append(
            digest(
                engine_trace(engine, cases.ragged_steps(dp * config["gradient_accumulation_steps"]))
            )
        )
    return found


def same_bits(pool, world, kind, config, modes, dtype=torch.float64):
    """Every mode gives the bits of the first run."""
    for found in pool.run(world, digests, kind, config, modes, dtype):
        assert len(found) == len(modes) + 1
        for mode, bits in zip(modes, found[1:], strict=True):
            assert bits == found[0], mode


ALL = list(MODES.values())


@pytest.mark.parametrize(
    ("kind", "stage", "modes"),
    [("gpt2", 0, ALL), ("llama", 1, ALL[2:3]), ("qwen3", 2, ALL[:1]), ("gpt2", 3, ALL[1:3])],
)
def test_with_zero(pool, kind, stage, modes):
    """Two data-parallel ranks, accumulation."""
    same_bits(pool, 2, kind, settings(2, 1, stage, 1, 2), modes)


@pytest.mark.parametrize(("kind", "modes"), [("llama", ALL[2:4]), ("gpt2", ALL[2:])])
def test_with_tensor_parallelism(pool, kind, modes):
    """tp 2; also with inputs in slices."""
    same_bits(pool, 2, kind, settings(2, 2, 0, 1, 2), [*modes, {"mode": "full", "partition": True}])


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(ALL[:1], marks=pytest.mark.proof, id="full"),
        pytest.param(ALL[2:3], id="selective"),
    ],
)
def test_with_sequence_parallelism(pool, modes):
    """Lengths that tp does not divide; the length of a micro-batch is remembered for its backward. Slices of sequences are not aligned in
    memory as whole ones are, and products of float64 differ by that in the last bit, so this is not compared bit by bit."""
    first, *others = pool.run(4, traces, "qwen3", settings(4, 2, 3, 1, 2, True), modes)[0]
    for found in others:
        assert_same(first, found, bar=1e-11)


PIPELINES: list[tuple[int, dict[str, Any], list[dict[str, Any]]]] = [
    (2, pipeline_settings(0, 4, "1f1b", pp=2), [{"mode": "budget"}, {"mode": "selective"}]),
    (2, pipeline_settings(0, 4, "zbv", pp=2), [{"mode": "budget"}, {"mode": "full"}]),
    (4, pipeline_settings(3, 4, "interleaved-1f1b", pp=2, dp_shard=2), [{"mode": "budget"}]),
    (4, pipeline_settings(0, 4, "dualpipev", pp=2, tp=2), [{"mode": "budget"}]),
]


def in_pipeline(rank, world, config, modes):
    """One run without recompute, and one for each of `modes`; what every block did. Runs in a worker."""
    found, chosen = [], []
    dp = config["parallel"].get("dp_shard", 1)
    for more in ({}, *modes):
        mode = dict(more)
        if mode.get("mode") == "budget":
            bounds = [
                (at.least()[0], at.peak_bytes(("none",) * at.blocks))
                for at in foretold(config, world, torch.float64)
            ]
            mode |= {
                "budget_gib": max(least + 0.4 * (most - least) for least, most in bounds) / GIB,
                "sequence_length": LENGTH,
            }
        file = {**config, "parallel": {**config["parallel"], "recompute": mode}}
        model = build("llama", torch.float64, dropout=True, layers=LAYERS)
        engine = plait.initialize(model, file, loss_fn=plait.causal_lm_loss)
        found.append(
            digest(
                engine_trace(engine, cases.ragged_steps(dp * config["gradient_accumulation_steps"]))
            )
        )
        chosen.append(engine.parts.recompute_modes)
    return found, chosen


@pytest.mark.parametrize(
    ("world", "config", "modes"),
    [
        pytest.param(
            *case, id=named(case[1]), marks=[] if "zbv" in named(case[1]) else [pytest.mark.proof]
        )
        for case in PIPELINES
    ],
)
def test_in_a_pipeline(pool, world, config, modes):
    """A budget for all micro-batches in flight, ranks for themselves; dropout, tied embeddings, ragged micro-batches; backwards in halves
    recompute twice."""
    ranks = pool.run(world, in_pipeline, config, modes)
    for bits, chosen in ranks:
        assert bits == [bits[0]] * (1 + len(modes))
        assert set(chosen[0]) == {"none"}
    assert any(set(chosen[1]) != {"none"} for _, chosen in ranks), ranks


@pytest.mark.proof
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_every_pipeline(pool, schedule):
    """Every schedule, with tensor parallelism; a budget and all modes."""
    modes: list[dict[str, Any]] = [{"mode": "budget"}, {"mode": "selective"}, {"mode": "full"}]
    for bits, chosen in pool.run(
        4, in_pipeline, pipeline_settings(0, 4, schedule, pp=2, tp=2), modes
    ):
        assert bits == [bits[0]] * (1 + len(modes)), chosen


def with_uneven_slices(rank, world, pp):
    """A budget that the rank with the smaller slice of the vocabulary would keep without recompute, and the other not. Runs in a worker."""
    if pp == 1:
        config = settings(world, 2, 0, 1, 1)
        model = build("llama", torch.float32, dropout=False)
        mesh = build_mesh(Layout(tp=2))
        batch = token_batch(2, LENGTH)
        (foretold_rank,) = rank_activations(
            Parts(model, find_blocks(model)), mesh=mesh, batch=batch
        )
        own = foretold_rank.peak_bytes(("none", "none")) - 1
    else:
        config = pipeline_settings(0, 2, "1f1b", pp=2, tp=2)
        own = foretold(config, world)[1].peak_bytes(("none", "none")) - 1
    asked = torch.tensor(own)
    dist.broadcast(asked, src=1)
    section = {"budget_gib": int(asked) / GIB, "sequence_length": LENGTH}
    config["parallel"]["recompute"] = section
    model = build("llama", torch.float32, dropout=False, layers=LAYERS if pp > 1 else None)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    engine.train_batch(cases.ragged_steps(config["gradient_accumulation_steps"])[0])
    return engine.parts.recompute_modes


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_ranks_with_uneven_slices_decide_alike(pool, pp):
    """A block that one rank of tp recomputes and another does not would wait for ever in a collective."""
    found = pool.run(2 * pp, with_uneven_slices, pp)
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first == second
    assert any(set(modes) != {"none"} for modes in found)


def traces(rank, world, kind, config, modes):
    """One run without recompute, and one for each of `modes`. Runs in a worker."""
    found = []
    for mode in ({}, *modes):
        parallel = {**config["parallel"], **({"recompute": mode} if mode else {})}
        model = build(kind, torch.float64, dropout=False)
        with keeping_float64(model):
            engine = cases.engine(model, {**config, "parallel": parallel})
            found.append(
                engine_trace(engine, cases.ragged_steps(2 * config["gradient_accumulation_steps"]))
            )
    return found if rank == 0 else []


@pytest.mark.proof
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_everywhere(pool, kind, stage, sequence):
    """tp 2 x dp 2, every mode."""
    if kind == "gpt2" and sequence:
        pytest.skip("GPT-2 has no sequence parallelism")
    modes = [
        *ALL,
        *(
            []
            if sequence
            else [{"mode": "full", "partition": True}, {"mode": "selective", "partition": True}]
        ),
    ]
    same_bits(pool, 4, kind, settings(4, 2, stage, 1, 2, sequence), modes)


@pytest.mark.parametrize(
    "precision",
    [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}],
    ids=["bf16", "fp16"],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_with_mixed_precision(pool, precision, tp):
    """float32 parameters."""
    config = {**settings(2, tp, 2, 1, 2), **precision}
    same_bits(pool, 2, "llama", config, ALL[:1] if tp == 1 else ALL[2:3], torch.float32)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.proof), "plain"])
def test_equals_one_process(pool, kind, mode):
    """tp 2 x dp 2, ZeRO 3, against plain torch."""
    check(pool, 4, kind, False, settings(4, 2, 3, 1, 2, recompute={"mode": mode}, **plan(kind)))


def interleaved(rank, world, mode):
    """Two micro-batches of different lengths forward, then backward of both, as a pipeline does. Runs in a worker."""
    config = settings(2, 2, 0, 1, 2, True, recompute={"mode": mode})
    engine = cases.engine(build("llama", torch.float64, dropout=False), config)
    ids = [torch.arange(2 * length).view(2, length) % cases.VOCABULARY for length in (11, 6)]
    sum(plait.causal_lm_loss(engine.model(input_ids=x), {"labels": x})[0] for x in ids).backward()  # type: ignore[union-attr]
    return {
        name: local_tensor(p.grad).clone()
        for name, p in engine.model.named_parameters()
        if p.grad is not None
    }


def test_a_micro_batch_is_recomputed_with_its_own_length(pool):
    """Another one, of another length, has gone through since."""
    wanted, found = pool.run(2, interleaved, "none"), pool.run(2, interleaved, "full")
    for plain, recomputed in zip(wanted, found, strict=True):
        assert all(torch.equal(gradient, recomputed[name]) for name, gradient in plain.items())
