"""Parameters that the ranks of a machine store once, in shared memory, instead of gathering them.

The bits are the same as with gathering, whichever rank is late, and no rank reads what another
changes.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait._torch.units import unsharded_parameter_bytes
from plait.comm.shared_memory import host as host_module
from plait.comm.shared_memory.host import SharedMemoryGroup
from plait.comm.shared_memory.parameters import SharedParameters
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.digests import digest_of

STORED_ONCE = "parameters are stored once in shared memory"
IN_BACKWARD = {"optimizer_in_backward": True, "unused_parameters": False}


def write_and_read(rank, world):
    """Write shards of several sizes and read those of all ranks. Runs on every rank."""
    host = SharedMemoryGroup(dist.group.WORLD, label="the test")
    memory = SharedParameters(host, [5, 0, 1000], torch.float64)
    ranks = torch.arange(world).unsqueeze(1)
    for step in range(50):
        for index, shard in enumerate(memory.shards):
            shard.fill_(100 * step + 10 * index + rank)
        if rank == step % world:
            time.sleep(0.001)
        memory.begin()
        memory.finish()
        for index, buffer in enumerate(memory.full_buffers):
            expected = (100.0 * step + 10 * index + ranks).double()
            expected = expected.expand(world, memory.shards[index].numel())
            assert torch.equal(buffer.view(world, -1), expected), (step, index)
        memory.release()


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_read_what_one_writes(pool, ranks):
    pool.run(ranks, write_and_read)


def sleep_in_backward(model, seconds):
    """Sleep before the backward of every block."""

    def hook(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: time.sleep(seconds))

    for block in model.get_submodule("model.layers").children():
        block.register_forward_hook(hook)


def is_shared(parameter):
    """Return whether the kernel maps the shard's memory to a file that other processes have."""
    address = parameter.to_local().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if "memfd:plait" in line and int(start, 16) <= address < int(end, 16):
            return True
    return False


def train(rank, world, config, late=None, replaces=False, free_bytes=None):
    """Train three steps with an evaluation after each. Runs on every rank.

    Args:
        late: Rank that is slow in every backward.
        replaces: Whether the user replaces the parameters' memory after each step.
        free_bytes: Bytes of memory that the machine has left. Its own number by default.
    """
    with ExitStack() as stack:
        if free_bytes is not None:
            # A machine that is short of memory cannot be had otherwise.
            stack.enter_context(patch.object(host_module, "free_host_bytes", lambda: free_bytes))
        model = cases.build("llama", tied=True)
        engine = cases.engine(model, config)
        if rank == late:
            sleep_in_backward(model, 0.005)
        losses = []
        micro_batches = world * config["gradient_accumulation_steps"]
        for step in cases.steps_for("llama", micro_batches, steps=3):
            losses.append(float(engine.train_batch(step[rank::world]).loss))
            losses.append(engine.eval_batch(step[rank])[0])
            if replaces:
                model._apply(lambda tensor: tensor.clone())
    return {
        "numbers": (losses, digest_of(engine)),
        "communication": engine.communication,
        "shared": [is_shared(parameter) for parameter in model.parameters()],
        "gathered_bytes": unsharded_parameter_bytes(model),
    }


def with_transport(config, transport):
    return {**config, "parallel": {**config["parallel"], "transport": transport}}


@pytest.mark.parametrize("late", [pytest.param(None, marks=pytest.mark.proof), 0, 1])
@pytest.mark.parametrize(
    ("stage", "accumulation", "parallel"),
    [
        (1, 1, {}),
        (1, 3, {}),
        (2, 3, {}),
        (3, 1, {}),
        (3, 3, {"recompute": {"mode": "full"}}),
        (2, 1, IN_BACKWARD),
        (3, 1, IN_BACKWARD),
    ],
    ids=str,
)
def test_same_bits_as_gathered(pool, stage, accumulation, parallel, late):
    """There are two ranks, because the sum of two numbers does not depend on their order."""
    config = settings(2, stage, 1, accumulation)
    config["parallel"] |= parallel
    if parallel is IN_BACKWARD:
        config["gradient_clipping"] = 0
    gathered = pool.run(2, train, with_transport(config, "torch"))
    shared = pool.run(2, train, with_transport(config, "shared-memory"), late)
    for expected, result in zip(gathered, shared, strict=True):
        assert result["numbers"] == expected["numbers"]
        assert STORED_ONCE in result["communication"]
        assert STORED_ONCE not in expected["communication"]
        assert all(result["shared"]) and not any(expected["shared"])
        assert result["gathered_bytes"] == 0


def test_parameters_that_the_user_replaced_are_shared_again(pool):
    config = with_transport(settings(2, 2, 1, 1), "shared-memory")
    expected = pool.run(2, train, config)[0]
    result = pool.run(2, train, config, None, True)[0]
    assert result["numbers"] == expected["numbers"]
    # The last step ended with a replacement.
    assert not any(result["shared"])


def test_short_of_memory_a_unit_is_gathered(pool):
    config = settings(2, 3, 1, 1)
    expected = pool.run(2, train, with_transport(config, "torch"))[0]
    result = pool.run(2, train, with_transport(config, "auto"), None, False, 100_000)[0]
    assert result["numbers"] == expected["numbers"]
    message = "units are still copied when they are gathered: rank 0: "
    assert message in result["communication"]
    assert "to share, and" in result["communication"]
    assert any(result["shared"]) and not all(result["shared"])


def communication_of(rank, world, config):
    """Return the description, and whether a parameter is shared. Runs on every rank."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    engine = cases.engine(model, config)
    engine.train_batch(cases.steps_for("llama", world, steps=1)[0][rank])
    return engine.communication, any(is_shared(parameter) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("stage", "sections"),
    [
        (2, {"bf16": {"enabled": True}}),
        (2, {"parallel": {"compress_weights": "int8"}}),
        (3, {"parallel": {"secondary_partition": 2}}),
        (2, {"parallel": {"transport": "torch"}}),
        (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}),
    ],
    ids=["cast", "compressed", "secondary partition", "torch", "on disk"],
)
def test_converted_parameters_are_not_shared(pool, tmp_path, stage, sections):
    """Only parameters that are computed with as they are stored can be shared."""
    world = 4 if "secondary_partition" in sections.get("parallel", {}) else 2
    config = settings(world, stage, 1, 1)
    config |= {**sections, "parallel": config["parallel"] | sections.get("parallel", {})}
    if "offload_optimizer" in config["zero_optimization"]:
        offload = {"device": "nvme", "nvme_path": str(tmp_path)}
        config["zero_optimization"] = {"stage": stage, "offload_optimizer": offload}
    communication, shared = pool.run(world, communication_of, config)[0]
    assert STORED_ONCE not in communication
    assert not shared


def clear_shards_after_evaluation(rank, world, config, waits):
    """Return logits before, and those of an evaluation in which rank 1 is late.

    Runs on every rank. Rank 0 sets its shards to zero while rank 1 still computes.
    """
    with ExitStack() as stack:
        if not waits:
            stack.enter_context(patch.object(SharedParameters, "release", lambda self: None))
        model = cases.build("llama", tied=False)
        engine = cases.engine(model, config)
        batch = cases.steps_for("llama", 1, steps=1)[0][0]
        expected = engine.predict(batch).logits.clone()
        if rank == 1:
            # After the last unit was gathered, and before it is read.
            model.get_submodule("lm_head").register_forward_pre_hook(lambda *_: time.sleep(0.3))
        logits = engine.predict(batch).logits.clone()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()
        dist.barrier()
    return expected, logits


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "a planted defect"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_rank_changes_what_another_reads(pool, stage, waits):
    config = with_transport(settings(2, stage, 1, 1), "shared-memory")
    results = pool.run(2, clear_shards_after_evaluation, config, waits)
    # On a busy machine either rank may be the one that reads what the other has changed.
    assert all(torch.equal(expected, logits) for expected, logits in results) == waits
