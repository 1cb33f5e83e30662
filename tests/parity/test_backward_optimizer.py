"""Parameters updated inside of the backward: the bits of a step at its end, gradients of one unit at a time, checkpoints of any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError, ModelError
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.parity import cases
from tests.parity.digests import digest, digest_of
from tests.parity.tensor_parallel import settings


def configuration(world, stage, replicas, /, *, in_backward, **more):
    """Without what needs all gradients; the learning rate changes from step to step."""
    config = settings(world, more.pop("tp", 1), stage, replicas, 1, more.pop("sequence", False))
    parallel = {
        **config["parallel"],
        **more.pop("parallel", {}),
        "unused_parameters": False,
        "optimizer_in_backward": in_backward,
    }
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}}
    return {**config, "gradient_clipping": 0, "scheduler": schedule, "parallel": parallel, **more}


def both(rank, world, kind, arguments, more):
    """At the end of the backward and inside: everything that a step has, then a run that nobody looks at. Runs in a worker."""
    found = []
    for in_backward in (False, True):
        model = cases.build(kind, tied=True, dtype=torch.float32)
        engine = cases.engine(model, configuration(*arguments, in_backward=in_backward, **more))
        steps = cases.steps_for(kind, engine.dp_size, steps=2)
        trace = engine_trace(engine, steps)
        for step in steps:
            piece = step[engine.dp_rank]
            loss = engine(**piece).logits.sum() if kind != "plain" and not more else None
            if loss is not None:  # DeepSpeed's three calls
                engine.backward(loss)
                engine.step()
            else:
                engine.train_batch([piece])
        found.append(
            (digest(trace), digest_of(engine), all(p.grad is None for p in model.parameters()))
        )
    return found


BF16 = {"bf16": {"enabled": True, "check_grad_overflow": False}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
CASES: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("plain", (1, 0, 1), {}),
    ("llama", (1, 3, 1), BF16),
    ("llama", (2, 1, 1), {}),
    ("gpt2", (2, 2, 1), {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}),
    ("llama", (2, 3, 1), {**BF16, "parallel": {"recompute": {"mode": "full"}}}),
    ("qwen3", (4, 3, 2), {}),
    ("gpt2", (2, 0, 1), {"tp": 2}),
    ("llama", (2, 0, 1), {"tp": 2, "sequence": True}),
    ("llama", (4, 2, 1), {"tp": 2, "sequence": True, **BF16}),
    ("gpt2", (4, 3, 1), {"tp": 2, "parallel": {"recompute": {"mode": "selective"}}}),
    ("plain", (1, 0, 1), COMPILED),
]
PROOF: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("plain", (2, 3, 1), COMPILED),
    ("qwen3", (4, 1, 1), {"tp": 2}),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.proof) for case in PROOF)],
)
def test_same_bits(pool, kind, arguments, more):
    """Losses, norms, gradients, parameters and states; branches that a step leaves unused in one process."""
    for at_end, inside in pool.run(arguments[0], both, kind, arguments, more):
        assert inside == at_end


def resumed(rank, world, stage, folder, first, last, in_backward):
    """Steps `first` to `last` of the whole world's data, by any layout. Runs in a worker."""
    config = configuration(world, stage, 1, in_backward=in_backward)
    engine = plait.initialize(cases.build("llama", tied=True), config, loss_fn=plait.causal_lm_loss)
    assert (engine.load_checkpoint(folder) is not None) == (first > 0)
    for step in cases.steps_for("llama", 2, steps=4)[first:last]:
        rows = {name: torch.cat([pad(piece[name]) for piece in step]) for name in step[0]}
        size = 4 // world
        engine.train_batch(
            [{name: value[rank * size : (rank + 1) * size] for name, value in rows.items()}]
        )
    engine.save_checkpoint(folder)
    return [full_tensor_on_cpu(p) for p in engine.model.parameters()]


def pad(tensor):
    """To one length, with targets that do not count."""
    return nn.functional.pad(
        tensor, (0, 12 - tensor.shape[1]), value=-100 if bool((tensor == -100).any()) else 0
    )


def test_checkpoints_load_on_another_layout(pool, tmp_path):
    """Begun on two processes with updates in the backward, ended on one with a step at the end, and the other way around."""
    straight = pool.run(2, resumed, 2, str(tmp_path / "straight"), 0, 4, False)[0]
    pool.run(2, resumed, 2, str(tmp_path / "a"), 0, 2, True)
    torch.testing.assert_close(
        pool.run(1, resumed, 0, str(tmp_path / "a"), 2, 4, False)[0], straight, rtol=0, atol=1e-11
    )
    pool.run(1, resumed, 0, str(tmp_path / "b"), 0, 2, True)
    torch.testing.assert_close(
        pool.run(2, resumed, 3, str(tmp_path / "b"), 2, 4, True)[0], straight, rtol=0, atol=1e-11
    )


def test_a_gradient_in_parts_is_found():
    """The first part has been applied when the second comes."""
    model = cases.build("plain", tied=True, dtype=torch.float32)
    engine = plait.initialize(model, configuration(1, 0, 1, in_backward=True))
    piece = cases.steps_for("plain", 1)[0][0]
    engine.backward(engine(piece["input_ids"]).logits.sum())
    with pytest.raises(ModelError, match="came in two parts"):
        engine.backward(engine(piece["input_ids"]).logits.sum())
    engine.close()
    engine = plait.initialize(
        cases.build("plain", tied=True, dtype=torch.float32),
        configuration(1, 0, 1, in_backward=True),
    )
    engine.backward(engine(piece["input_ids"]).logits.mean(), weight=3)
    with pytest.raises(InputError, match="divides when all weights are known"):
        engine.step()
    engine.close()


def test_what_it_does_not_go_with():
    """All at once; an optimizer that is not elementwise when it is there."""
    config = {
        **configuration(4, 2, 1, in_backward=True),
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
    config["zero_optimization"] = {
        "stage": 2,
        "offload_optimizer": {"device": "nvme", "nvme_path": "x"},
    }
    with pytest.raises(ConfigError) as caught:
        resolve(load(config), world_size=4)
    said = str(caught.value)
    for part in (
        "accumulation",
        "clipping",
        "check_grad_overflow",
        "unused",
        "parallel.pp",
        "nvme",
        "compressed",
    ):
        assert part in said, part
    for stage, tree in ((0, {}), (2, {"fp16": {"enabled": True}})):
        with pytest.raises(ConfigError, match="buckets" if stage == 0 else "float16"):
            resolve(load({**configuration(4, stage, 1, in_backward=True), **tree}), world_size=4)
    model = cases.build("plain", tied=True, dtype=torch.float32)
    muon = {
        **configuration(1, 0, 1, in_backward=True),
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
    }
    with pytest.raises(ModelError, match="one element of a parameter"):
        plait.initialize(model, muon)
    model = cases.build("plain", tied=True, dtype=torch.float32)
    with pytest.raises(ModelError, match="creates no optimizer"):
        plait.parallelize(model, configuration(1, 0, 1, in_backward=True))
