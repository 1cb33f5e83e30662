"""Parameters that all ranks of a machine hold once: the same bits as gathering them, whoever is late, and nobody reads what another
changes."""

import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import plait
from plait._torch.units import unsharded_parameter_bytes
from plait.comm.shared_memory import host as host_module
from plait.comm.shared_memory.host import SharedMemoryGroup
from plait.comm.shared_memory.parameters import SharedParameters
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.digests import digest_of

HELD = "parameters are stored once in shared memory"
IN_BACKWARD = {"optimizer_in_backward": True, "unused_parameters": False}


def written(rank, ranks):
    """Rows of several sizes, in turns of writing and reading. Runs in a worker."""
    host = SharedMemoryGroup(dist.group.WORLD, label="the test")
    memory = SharedParameters(host, [5, 0, 1000], torch.float64)
    for step in range(50):
        for index, row in enumerate(memory.shards):
            row.fill_(100 * step + 10 * index + rank)
        if rank == step % ranks:
            time.sleep(0.001)
        memory.begin()
        memory.finish()
        for index, whole in enumerate(memory.full_buffers):
            expected = torch.tensor(
                [100.0 * step + 10 * index + r for r in range(ranks)], dtype=torch.float64
            )
            assert torch.equal(
                whole.view(ranks, -1),
                expected.view(-1, 1).expand(ranks, memory.shards[index].numel()),
            ), (step, index)
        memory.release()


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_one_writes_all_read(pool, ranks):
    pool.run(ranks, written)


def late_in_backward(model, seconds):
    """Stand still before every block's backward."""

    def hook(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: time.sleep(seconds))

    for block in model.get_submodule("model.layers").children():
        block.register_forward_hook(hook)


def is_shared(tensor):
    """Whether it lies in memory that other processes see, by the kernel's own list."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if "memfd:plait" in line and int(start, 16) <= tensor.data_ptr() < int(end, 16):
            return True
    return False


def trained(rank, world, config, late, moved=False, free=None):
    """Three steps with an evaluation in between. Rank `late` is slow; `moved`: the user puts copies in the parameters' places; `free`: so
    many bytes of memory are said to be left. Runs in a worker."""
    with ExitStack() as stack:
        if free is not None:
            stack.enter_context(patch.object(host_module, "free_host_bytes", lambda: free))
        model = cases.build("llama", tied=True)
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        if rank == late:
            late_in_backward(model, 0.005)
        losses = []
        for step in cases.steps_for(
            "llama", world * config["gradient_accumulation_steps"], steps=3
        ):
            mine = step[rank::world]
            losses.append(float(engine.train_batch(mine).loss))
            losses.append(engine.eval_batch(mine[0])[0])
            if moved:
                model._apply(lambda tensor: tensor.clone())
    return {
        "losses": losses,
        "bits": digest_of(engine),
        "said": engine.communication,
        "shared": [is_shared(p.to_local()) for p in model.parameters()],  # type: ignore[operator]
        "gathered": unsharded_parameter_bytes(model),
    }


def transported(config, transport):
    return {**config, "parallel": {**config["parallel"], "transport": transport}}


@pytest.mark.parametrize("late", [pytest.param(None, marks=pytest.mark.proof), 0, 1])
@pytest.mark.parametrize(
    ("stage", "accumulation", "more"),
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
def test_same_bits_as_gathered(pool, stage, accumulation, more, late):
    """Of two ranks: a sum of two numbers has no order."""
    config = settings(2, stage, 1, accumulation)
    config["parallel"] |= more
    if more is IN_BACKWARD:
        config["gradient_clipping"] = 0
    gathered = pool.run(2, trained, transported(config, "torch"), None)
    held = pool.run(2, trained, transported(config, "shared-memory"), late)
    for one, other in zip(gathered, held, strict=True):
        assert (one["losses"], one["bits"]) == (other["losses"], other["bits"])
        assert HELD in other["said"] and HELD not in one["said"]
        assert all(other["shared"]) and not any(one["shared"])
        assert other["gathered"] == 0


def test_parameters_that_the_user_replaced_come_back(pool):
    config = transported(settings(2, 2, 1, 1), "shared-memory")
    kept, moved = (pool.run(2, trained, config, None, moved)[0] for moved in (False, True))
    assert (kept["losses"], kept["bits"]) == (moved["losses"], moved["bits"])
    assert not any(moved["shared"]), "the last thing that happened was a replacement"


def test_short_of_memory_a_unit_is_gathered(pool):
    config = settings(2, 3, 1, 1)
    whole = pool.run(2, trained, transported(config, "torch"), None)[0]
    short = pool.run(2, trained, transported(config, "auto"), None, False, 100_000)[0]
    assert (whole["losses"], whole["bits"]) == (short["losses"], short["bits"])
    assert "units are still copied when they are gathered: rank 0: " in short["said"]
    assert "to share, and" in short["said"]
    assert any(short["shared"]) and not all(short["shared"])


def said(rank, world, config):
    """Runs in a worker."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    engine.train_batch(cases.steps_for("llama", world, steps=1)[0][rank])
    return engine.communication, any(is_shared(p.to_local()) for p in model.parameters())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"bf16": {"enabled": True}}),
        (2, {"parallel": {"compress_weights": "int8"}}),
        (3, {"parallel": {"secondary_partition": 2}}),
        (2, {"parallel": {"transport": "torch"}}),
        (
            2,
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"},
                }
            },
        ),
    ],
    ids=["cast", "compressed", "secondary partition", "torch", "on disk"],
)
def test_what_is_computed_with_must_be_the_shards_themselves(pool, tmp_path, stage, more):
    world = 4 if "secondary_partition" in more.get("parallel", {}) else 2
    config = settings(world, stage, 1, 1)
    parallel = config["parallel"] | more.get("parallel", {})
    config |= {**more, "parallel": parallel}
    if "nvme_path" in str(more):
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path)
    words, shared = pool.run(world, said, config)[0]
    assert HELD not in words and not shared


def changed_after_evaluation(rank, world, config, waits):
    """(logits, those of an evaluation after which rank 0 set its shards to zero while rank 1 was still computing). Runs in a worker."""
    with ExitStack() as stack:
        if not waits:
            stack.enter_context(patch.object(SharedParameters, "release", lambda self: None))
        model = cases.build("llama", tied=False)
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        batch = cases.steps_for("llama", 1, steps=1)[0][0]
        first = engine.predict(batch).logits.clone()
        if rank == 1:
            # After the last unit was gathered, and before it is read.
            model.get_submodule("lm_head").register_forward_pre_hook(lambda *_: time.sleep(0.3))
        second = engine.predict(batch).logits.clone()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()  # type: ignore[operator]
        dist.barrier()
    return first, second


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "a planted defect"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nobody_changes_what_another_still_reads(pool, stage, waits):
    config = transported(settings(2, stage, 1, 1), "shared-memory")
    results = pool.run(2, changed_after_evaluation, config, waits)
    # On a busy machine either rank may be the one that reads what the other has changed.
    assert all(torch.equal(*found) for found in results) == waits
