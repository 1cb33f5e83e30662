"""The disk tier's account: bytes of masters, gradients and states in files, padding included."""

import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
from plait._torch.units import shard_buffers, sharded_modules
from plait.config.resolving.resolve import load, resolve
from plait.optim.disk_optimizer import DiskTier
from tests.fake import pipelines as pipeline
from tests.fake.worlds import account, batch, fake_rank, integers
from tests.parity.experts import Case, build, configured
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import settings


def bytes_in_files(engine, batch, *, kinds, whole=True):
    """Of shards, gradients and states in a step; those of `kinds` are there, all of them if `whole`, and nothing of the others."""
    model, tier, found = engine.model, engine.hooks.find(DiskTier), {}

    def look():
        found["parameters"] = [
            buffer for module in sharded_modules(model) for buffer in shard_buffers(module)
        ]
        found["gradients"] = [
            local_tensor(p.grad) for p in model.parameters() if p.grad is not None
        ]

    engine.stepper.before_update.append(look)
    engine.train_batch(batch)
    found["states"] = [
        local_tensor(v)
        for state in engine.optimizer.state.values()
        for v in state.values()
        if v.ndim
    ]
    assert all(found.values())
    held = {
        kind: [tier.holds(tensor) for tensor in tensors if tensor.numel()]
        for kind, tensors in found.items()
    }
    assert all((all if whole else any)(held[kind]) for kind in kinds)
    assert whole == all(all(held[kind]) for kind in kinds)
    assert not any(any(held[kind]) for kind in set(held) - kinds)
    return sum(
        tensor.numel() * 4
        for kind in kinds
        for tensor in found[kind]
        if tensor.numel() and tier.holds(tensor)
    )


STATES, PARAMETERS = {"gradients", "states"}, {"parameters"}


def offloads(folder, kinds, stage, ratio=1):
    """The sections that put `kinds` into files. Below stage 3 the masters go with the states."""
    section = {"device": "nvme", "nvme_path": str(folder), "buffer_size": 1000}
    found = {"offload_optimizer": section | {"ratio": ratio}} if kinds >= STATES else {}
    return (
        {**found, "offload_param": {**section, "buffer_size": 50_000}}
        if stage == 3 and kinds >= PARAMETERS
        else found
    )


BOTH = STATES | PARAMETERS
CASES = [
    (2, 1, "llama", BOTH),
    (4, 2, "qwen3", BOTH),
    (3, 3, "gpt2", BOTH),
    (3, 3, "gpt2", STATES),
    (3, 3, "gpt2", PARAMETERS),
    (1, 3, "llama", PARAMETERS),
]


@pytest.mark.parametrize(
    ("world", "stage", "kind", "kinds", "ratio"),
    [
        (*case, ratio)
        for case in CASES
        for ratio in (1, 0.3)
        if ratio == 1 or case[3] != PARAMETERS
    ],  # a ratio is one of states
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_files_are_as_priced(fake_world, tmp_path, world, stage, kind, kinds, ratio):
    """Uneven shards too. The optimizer's step counts stay in memory: a few bytes a parameter, which the ledger has in `optimizer`."""
    config = settings(world, 1, stage, 1, 1)
    config["zero_optimization"] |= offloads(tmp_path, kinds, stage, ratio)
    fake = fake_rank(fake_world, kind, config)
    memory = integers(fake.ledger.memory)
    # At stage 3 all shards are in files, whatever the share of the states.
    in_files = bytes_in_files(fake.engine, fake.data, kinds=kinds, whole=ratio == 1)
    assert 0 < in_files == memory["files"]
    pieces = 4 * 4 * 1000 if kinds >= STATES else 0
    pool = min(memory["parameters"], 5 * 4 * 50_000) if stage == 3 and kinds >= PARAMETERS else 0
    assert memory["step_buffers"] == max(pieces, pool) < in_files + 1


@pytest.mark.parametrize(("stage", "kinds"), [(2, BOTH), (3, BOTH), (3, STATES)])
def test_files_of_experts(fake_world, tmp_path, stage, kinds):
    """Of a rank's own experts, and its shards of the rest."""
    fake_world(4, 3)
    config = configured(Case("mixtral", stage, (("ep", 2),), dp=4))
    config["zero_optimization"] |= offloads(tmp_path, kinds, stage)
    model, resolved = (
        build(Case("mixtral"), dtype=torch.float32),
        resolve(load(config), world_size=4),
    )
    ledger = account(model, resolved, 3, accumulation=2)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    in_files = bytes_in_files(engine, batch(2, length=16), kinds=kinds)
    assert in_files == int(ledger.memory["files"][0]) > 0


@pytest.mark.parametrize(
    ("rank", "stage", "schedule", "ratio"),
    [(0, 2, "zbv", 1), (2, 3, "1f1b", 1), (2, 2, "interleaved-1f1b", 0.5)],
)
def test_files_of_a_pipelines_rank(fake_world, tmp_path, rank, stage, schedule, ratio):
    """Tied embeddings are in the files of both ends."""
    fake_world(4, rank)
    config = pipeline_settings(stage, 4, schedule, pp=2, dp_shard=2)
    config["zero_optimization"] |= offloads(tmp_path, BOTH, stage, ratio)
    engine, resolved, facts, parts = pipeline.build(config, 4)
    in_files = bytes_in_files(engine, pipeline.batch(4), kinds=BOTH, whole=ratio == 1)
    assert in_files == int(pipeline.predicted(resolved, facts, parts, rank).memory["files"][0])
