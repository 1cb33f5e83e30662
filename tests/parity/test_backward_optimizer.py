"""Parameters updated inside of the backward have the bits of an update at its end.

Checkpoints load on any layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError, ModelError
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.covers import proof_after
from tests.parity import cases
from tests.parity.digests import digest, digest_of
from tests.parity.tensor_parallel import settings


def configuration(world, stage, replicas=1, *, in_backward=True, tp=1, sequence=False, **sections):
    """Return a configuration whose learning rate changes from step to step.

    It has nothing that needs all gradients at once, such as clipping.
    """
    config = settings(world, tp, stage, replicas, 1, sequence)
    parallel = {
        **config["parallel"],
        **sections.pop("parallel", {}),
        "unused_parameters": False,
        "optimizer_in_backward": in_backward,
    }
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}}
    fixed = {"gradient_clipping": 0, "scheduler": schedule, "parallel": parallel}
    return {**config, **fixed, **sections}


def build_plain():
    return cases.build("plain", tied=True, dtype=torch.float32)


def both(rank, world, kind, layout, overrides):
    """Train with the update at the end and inside of the backward. Runs on every rank.

    Returns digests of a traced run, and of a second one, in which no trace holds the gradients.
    """
    results = []
    for in_backward in (False, True):
        model = cases.build(kind, tied=True, dtype=torch.float32)
        config = configuration(*layout, in_backward=in_backward, **overrides)
        engine = cases.engine(model, config)
        steps = cases.steps_for(kind, engine.dp_size, steps=2)
        trace = engine_trace(engine, steps)
        for step in steps:
            batch = step[engine.dp_rank]
            if kind == "plain" or overrides:
                engine.train_batch([batch])
            else:
                # DeepSpeed's three calls.
                engine.backward(engine(**batch).logits.sum())
                engine.step()
        dropped = all(parameter.grad is None for parameter in model.parameters())
        results.append((digest(trace), digest_of(engine), dropped))
    return results


BF16 = {"bf16": {"enabled": True, "check_grad_overflow": False}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
FULL = {"parallel": {"recompute": {"mode": "full"}}}
SELECTIVE = {"parallel": {"recompute": {"mode": "selective"}}}
# Model, (ranks, ZeRO stage, replicas), overrides.
CASES: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("plain", (1, 0, 1), {}),
    ("llama", (1, 3, 1), BF16),
    ("llama", (2, 1, 1), {}),
    ("gpt2", (2, 2, 1), SGD),
    ("llama", (2, 3, 1), {**BF16, **FULL}),
    ("qwen3", (4, 3, 2), {}),
    ("gpt2", (2, 0, 1), {"tp": 2}),
    ("llama", (2, 0, 1), {"tp": 2, "sequence": True}),
    ("llama", (4, 2, 1), {"tp": 2, "sequence": True, **BF16}),
    ("gpt2", (4, 3, 1), {"tp": 2, **SELECTIVE}),
    ("qwen3", (4, 1, 1), {"tp": 2}),
    ("plain", (1, 0, 1), COMPILED),
    ("plain", (2, 3, 1), COMPILED),
]


@pytest.mark.parametrize(("kind", "layout", "overrides"), proof_after(1, CASES))
def test_update_in_backward_changes_no_bit(pool, kind, layout, overrides):
    """The plain model leaves branches unused in one process."""
    for at_end, inside in pool.run(layout[0], both, kind, layout, overrides):
        assert inside == at_end


def pad(tensor):
    """Pad a tensor of a micro-batch to 12 tokens, with targets that do not count."""
    value = -100 if (tensor == -100).any() else 0
    return nn.functional.pad(tensor, (0, 12 - tensor.shape[1]), value=value)


def resumed(rank, world, stage, folder, steps, in_backward):
    """Train some of four steps, from the checkpoint if there is one, and save. Runs on every rank.

    All layouts train on the same global batches.
    """
    config = configuration(world, stage, in_backward=in_backward)
    engine = plait.initialize(cases.build("llama", tied=True), config, loss_fn=plait.causal_lm_loss)
    assert (engine.load_checkpoint(folder) is not None) == (steps.start > 0)
    size = 4 // world
    for step in cases.steps_for("llama", 2, steps=4)[steps]:
        batch = {}
        for name in step[0]:
            rows = torch.cat([pad(micro_batch[name]) for micro_batch in step])
            batch[name] = rows[rank * size : (rank + 1) * size]
        engine.train_batch([batch])
    engine.save_checkpoint(folder)
    return [full_tensor_on_cpu(p) for p in engine.model.parameters()]


def test_checkpoints_load_on_another_layout(pool, tmp_path):
    """Runs change between two ranks and one, and between the two moments of the update."""
    all_steps, first_steps, last_steps = slice(0, 4), slice(0, 2), slice(2, 4)
    folders = [str(tmp_path / name) for name in ("straight", "to one", "to two")]
    expected = pool.run(2, resumed, 2, folders[0], all_steps, False)[0]

    pool.run(2, resumed, 2, folders[1], first_steps, True)
    on_one_rank = pool.run(1, resumed, 0, folders[1], last_steps, False)[0]
    torch.testing.assert_close(on_one_rank, expected, rtol=0, atol=1e-11)

    pool.run(1, resumed, 0, folders[2], first_steps, True)
    on_two_ranks = pool.run(2, resumed, 3, folders[2], last_steps, True)[0]
    torch.testing.assert_close(on_two_ranks, expected, rtol=0, atol=1e-11)


def test_a_gradient_in_two_parts_is_refused():
    """The first part has been applied when the second arrives."""
    ids = cases.steps_for("plain", 1)[0][0]["input_ids"]
    engine = plait.initialize(build_plain(), configuration(1, 0))
    engine.backward(engine(ids).logits.sum())
    with pytest.raises(ModelError, match="came in two parts"):
        engine.backward(engine(ids).logits.sum())
    engine.close()


def test_a_weight_that_divides_later_is_refused():
    ids = cases.steps_for("plain", 1)[0][0]["input_ids"]
    engine = plait.initialize(build_plain(), configuration(1, 0))
    engine.backward(engine(ids).logits.mean(), weight=3)
    with pytest.raises(InputError, match="divides when all weights are known"):
        engine.step()
    engine.close()


def test_unsupported_settings_are_refused_together():
    config = configuration(4, 2)
    config |= {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    config["parallel"] |= {
        "unused_parameters": True,
        "compress_gradients": "int8",
        "dp_shard": 2,
        "pp": 2,
    }
    files = {"device": "nvme", "nvme_path": "x"}
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": files}
    with pytest.raises(ConfigError) as raised:
        resolve(load(config), world_size=4)
    for text in (
        "accumulation",
        "clipping",
        "check_grad_overflow",
        "unused",
        "parallel.pp",
        "nvme",
        "compressed",
    ):
        assert text in str(raised.value)

    with pytest.raises(ConfigError, match="buckets"):
        resolve(load(configuration(4, 0)), world_size=4)
    with pytest.raises(ConfigError, match="float16"):
        resolve(load(configuration(4, 2, fp16={"enabled": True})), world_size=4)


def test_unsupported_optimizers_are_refused():
    muon = configuration(1, 0, optimizer={"type": "Muon", "params": {"lr": 1e-3}})
    with pytest.raises(ModelError, match="one element of a parameter"):
        plait.initialize(build_plain(), muon)
    with pytest.raises(ModelError, match="creates no optimizer"):
        plait.parallelize(build_plain(), configuration(1, 0))
