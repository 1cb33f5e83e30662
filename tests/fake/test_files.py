"""Bytes of masters, gradients and optimizer states in files equal the ledger's, with padding."""

import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
from plait._torch.units import shard_buffers, sharded_modules
from plait.config.resolving.resolve import load, resolve
from plait.optim.disk_optimizer import DiskTier
from tests.fake import pipelines
from tests.fake.worlds import account, batch, fake_rank, integers
from tests.parity.experts import Case, build, configured
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import settings


def bytes_in_files(engine, batch, *, kinds, complete=True):
    """Run a step and return the bytes of float32 tensors in files.

    Args:
        engine: The engine.
        batch: Data of the step.
        kinds: Kinds of tensors that are in files. No tensor of another kind may be.
        complete: Whether all tensors of these kinds are in files, and not just some.
    """
    tier = engine.hooks.find(DiskTier)
    tensors = {}

    def before_update():
        modules = sharded_modules(engine.model)
        gradients = [p.grad for p in engine.model.parameters() if p.grad is not None]
        tensors["parameters"] = [x for module in modules for x in shard_buffers(module)]
        tensors["gradients"] = [local_tensor(gradient) for gradient in gradients]

    engine.stepper.before_update.append(before_update)
    engine.train_batch(batch)
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    # Step counts have no dimension and stay in memory.
    tensors["states"] = [local_tensor(value) for value in states if value.ndim]

    total = 0
    all_in_files = True
    for kind, values in tensors.items():
        assert values, kind
        values = [value for value in values if value.numel()]
        in_files = [value for value in values if tier.holds(value)]
        if kind not in kinds:
            assert not in_files, kind
            continue
        assert in_files, kind
        all_in_files = all_in_files and len(in_files) == len(values)
        total += sum(4 * value.numel() for value in in_files)
    assert all_in_files == complete
    return total


STATES = {"gradients", "states"}
PARAMETERS = {"parameters"}
BOTH = STATES | PARAMETERS


def offloads(folder, kinds, stage, ratio=1):
    """Return the sections that put `kinds` into files. Below stage 3 masters follow the states."""
    section = {"device": "nvme", "nvme_path": str(folder), "buffer_size": 1000}
    sections = {}
    if kinds >= STATES:
        sections["offload_optimizer"] = {**section, "ratio": ratio}
    if stage == 3 and kinds >= PARAMETERS:
        sections["offload_param"] = {**section, "buffer_size": 50_000}
    return sections


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
        if ratio == 1 or case[3] != PARAMETERS  # the ratio is a share of the states
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_files_of_data_parallel_ranks(fake_world, tmp_path, world, stage, kind, kinds, ratio):
    config = settings(world, 1, stage, 1, 1)
    config["zero_optimization"] |= offloads(tmp_path, kinds, stage, ratio)
    fake = fake_rank(fake_world, kind, config)
    memory = integers(fake.ledger.memory)
    in_files = bytes_in_files(fake.engine, fake.data, kinds=kinds, complete=ratio == 1)
    assert 0 < in_files == memory["files"]

    # Four tensors of `buffer_size` floats for states, and five buffers of parameters.
    state_buffers = 4 * 4 * 1000 if kinds >= STATES else 0
    parameter_buffers = 0
    if stage == 3 and kinds >= PARAMETERS:
        parameter_buffers = min(memory["parameters"], 5 * 4 * 50_000)
    assert memory["step_buffers"] == max(state_buffers, parameter_buffers) <= in_files


@pytest.mark.parametrize(("stage", "kinds"), [(2, BOTH), (3, BOTH), (3, STATES)])
def test_files_of_experts(fake_world, tmp_path, stage, kinds):
    fake_world(4, 3)
    config = configured(Case("mixtral", stage, (("ep", 2),), dp=4))
    config["zero_optimization"] |= offloads(tmp_path, kinds, stage)
    model = build(Case("mixtral"), dtype=torch.float32)
    resolved = resolve(load(config), world_size=4)
    ledger = account(model, resolved, 3, accumulation=2)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    in_files = bytes_in_files(engine, batch(2, length=16), kinds=kinds)
    assert in_files == int(ledger.memory["files"][0]) > 0


@pytest.mark.parametrize(
    ("rank", "stage", "schedule", "ratio"),
    [(0, 2, "zbv", 1), (2, 3, "1f1b", 1), (2, 2, "interleaved-1f1b", 0.5)],
)
def test_files_of_pipeline_ranks(fake_world, tmp_path, rank, stage, schedule, ratio):
    """Both ends have files of tied embeddings."""
    fake_world(4, rank)
    config = pipeline_settings(stage, 4, schedule, pp=2, dp_shard=2)
    config["zero_optimization"] |= offloads(tmp_path, BOTH, stage, ratio)
    engine, resolved, facts, plan = pipelines.build(config, 4)
    in_files = bytes_in_files(engine, batch(4), kinds=BOTH, complete=ratio == 1)
    ledger = pipelines.predicted(resolved, facts, plan, rank)
    assert in_files == int(ledger.memory["files"][0])
