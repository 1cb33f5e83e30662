"""Times of several ways to compute one training step, in the same two processes, round by round."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import plait
from benchmarks.common.command import command
from benchmarks.common.report import store
from benchmarks.common.workers import free_port

RANKS = 2
ROUNDS = 15
QUICK_TOKENS = 128
FIELDS = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 4096, "use_cache": False}
FIELDS |= {"num_attention_heads": 8, "num_key_value_heads": 8}
LARGEST_DIFFERENCE = 1e-3
"""Relative difference of float32 losses up to which two engines compute the same step."""

Step = Callable[[], float]
"""Runs a training step on this rank, and returns the loss."""
MakeSteps = Callable[[int, int], Mapping[str, Step]]
"""Takes the rank and the number of tokens. The first of its steps is the baseline."""


def build_model(kind: str, *, experts: str | None = None, **fields: Any) -> Any:
    """Return a small model of Transformers, with the same weights each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **FIELDS, **fields)
    return AutoModelForCausalLM.from_config(config, experts_implementation=experts)


def random_ids(tokens: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, FIELDS["vocab_size"], (1, tokens), generator=generator)


def plait_step(model: nn.Module, ids: torch.Tensor, parallel: Mapping[str, Any]) -> Step:
    """Return a step of Plait with AdamW on one micro-batch."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": parallel,
    }
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    return lambda: float(engine.train_batch({"input_ids": ids, "labels": ids}))


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def run(name: str, description: str | None, make_steps: MakeSteps, *, tokens: int) -> None:
    quick = command(name, description).parse_args().quick
    sizes = (1, QUICK_TOKENS) if quick else (ROUNDS, tokens)
    arguments = (name, make_steps, *sizes, free_port(), quick)
    mp.spawn(_work, args=arguments, nprocs=RANKS)


def _work(
    rank: int, name: str, make_steps: MakeSteps, rounds: int, tokens: int, port: int, quick: bool
) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    times = _time(make_steps(rank, tokens), rounds)
    if rank == 0:
        baseline = next(iter(times.values()))
        results = {}
        for engine, seconds in times.items():
            milliseconds = round(1e3 * statistics.median(seconds), 1)
            ratio = round(float(np.median(np.divide(seconds, baseline))), 3)
            results[engine] = {"milliseconds": milliseconds, "ratio": ratio}
            print(f"{engine:18s} {results[engine]}")
        if not quick:
            sizes = {"rounds": rounds, "tokens": tokens, "ranks": RANKS}
            store(name, {**sizes, "results": results}, "torch", "transformers")
    dist.barrier()
    dist.destroy_process_group()


def _time(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return seconds per round. Raises ValueError if losses differ."""
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(rounds + 1):
        losses = {}
        for engine, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            losses[engine] = step()
            if index:  # the first round is not counted
                times[engine].append(time.perf_counter() - began)
        expected = next(iter(losses.values()))
        allowed = LARGEST_DIFFERENCE * abs(expected)
        if any(abs(loss - expected) > allowed for loss in losses.values()):
            raise ValueError(f"the losses of round {index} differ: {losses}")
    return times
