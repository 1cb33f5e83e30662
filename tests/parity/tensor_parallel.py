"""Training runs with tensor parallelism, and the same in one process, for the tests that compare the two."""

from __future__ import annotations

from functools import cache
from typing import Any

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import Trace, compare, engine_trace, worst
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, SEED, plain_trace
from tests.parity.data_parallel import materialised as one_process_model
from tests.pool import Pool

FAMILIES = [
    "llama",
    "qwen3",
    "gemma",
    "gemma2",
    "mistral",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "gptj",
    "bloom",
    "falcon",
    "stablelm",
]


def settings(
    world: int,
    tp: int,
    stage: int,
    replicas: int,
    accumulation: int,
    sequence: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A configuration file."""
    dp = world // tp
    parallel = {
        "tp": tp,
        "dp_replicate": replicas if stage else dp,
        "dp_shard": dp // replicas if stage else 1,
        "sequence_parallel": sequence,
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": {**parallel, **more},
        "run": {"seed": SEED},
    }


def train(rank: int, world: int, kind: str, tied: bool, config: dict[str, Any]) -> Trace | None:
    """Runs in a worker."""
    dp = world // config["parallel"]["tp"]
    model = cases.build(kind, tied=tied)
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        trace = engine_trace(
            engine, cases.steps_for(kind, dp * config["gradient_accumulation_steps"])
        )
    return trace if rank == 0 else None


@cache
def reference(kind: str, tied: bool, micro_batches: int) -> Trace:
    """One plain process on the whole batch."""
    return plain_trace(one_process_model(kind, tied=tied), cases.steps_for(kind, micro_batches))


def check(
    pool: Pool, world: int, kind: str, tied: bool, config: dict[str, Any], *, bar: float = 1e-10
) -> float:
    """Train and compare; the largest difference."""
    found = pool.run(world, train, kind, tied, config)[0]
    dp = world // config["parallel"]["tp"]
    difference = worst(
        compare(reference(kind, tied, dp * config["gradient_accumulation_steps"]), found)
    )
    assert difference.ok(bar), f"{difference.name}: {difference.error}"
    return difference.error


def plan(kind: str) -> dict[str, Any]:
    """The plain model is told its plan."""
    if kind not in ("plain", "frozen"):
        return {}
    return {
        "plan": {
            "embed": "embedding_rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "vocab_head",
        }
    }
