"""Who takes part, as data, and how a worker becomes one rank on one node.

All train the same Llama from the same weights and batches (`benchmarks.training_step.workload`). Two processes of one machine could share
memory, which two nodes cannot: Plait is told to use torch's collectives, DeepSpeed that it is alone on its node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from benchmarks.two_nodes.network import ADDRESSES, INTERFACE, enter


@dataclass(frozen=True)
class Baseline:
    """`compressed` baselines do not compute the same numbers as the others."""

    name: str
    title: str
    compressed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: str | None = None
    tensor: bool = False
    """The ranks share every product of one batch, so a step has half as many tokens. They take the link for one inside a machine: across
    machines tensor parallelism is refused."""
    adapts: bool = False
    """Looks at the links when it starts, so it starts anew at every rate."""

    @property
    def missing(self) -> bool:
        """Whether a package that it needs is not installed."""
        return self.requires is not None and find_spec(self.requires) is None


ALL = (
    Baseline("ddp", "DDP"),
    Baseline("ddp-powersgd", "DDP, PowerSGD of rank 4", compressed=True),
    Baseline("fully-shard", "fully_shard, kept"),
    Baseline("deepspeed-2", "DeepSpeed ZeRO 2", requires="deepspeed"),
    Baseline("plait-0", "Plait ZeRO 0, as it comes", options={"stage": 0}, adapts=True),
    Baseline(
        "plait-0-auto",
        "Plait ZeRO 0, compresses where it pays",
        compressed=True,
        options={"stage": 0, "compress_gradients": "auto"},
        adapts=True,
    ),
    Baseline(
        "plait-0-any",
        "Plait ZeRO 0, PowerSGD allowed too",
        compressed=True,
        options={"stage": 0, "compress_gradients": ["int8", "int4", "powersgd"]},
        adapts=True,
    ),
    Baseline("plait-2", "Plait ZeRO 2, as it comes", options={"stage": 2}),
    Baseline(
        "plait-2-auto",
        "Plait ZeRO 2, compresses where it pays",
        compressed=True,
        options={"stage": 2, "compress_gradients": "auto"},
        adapts=True,
    ),
    Baseline(
        "plait-tp", "Plait tensor parallel, no overlap", tensor=True, options={"stage": 0, "tp": 2}
    ),
    Baseline(
        "plait-tp-overlap",
        "Plait tensor parallel, all-reduces overlapped",
        tensor=True,
        options={"stage": 0, "tp": 2, "tensor_overlap": 4},
    ),
    Baseline(
        "plait-0-bf16",
        "Plait ZeRO 0, bf16 on the wire",
        compressed=True,
        options={"stage": 0, "communication_data_type": "bf16"},
    ),
    Baseline(
        "plait-0-int8",
        "Plait ZeRO 0, int8",
        compressed=True,
        options={"stage": 0, "compress_gradients": "int8"},
    ),
    Baseline(
        "plait-0-int4",
        "Plait ZeRO 0, int4",
        compressed=True,
        options={"stage": 0, "compress_gradients": "int4"},
    ),
    Baseline(
        "plait-0-powersgd",
        "Plait ZeRO 0, PowerSGD of rank 4",
        compressed=True,
        options={"stage": 0, "compress_gradients": "powersgd"},
    ),
)
BY_NAME = {one.name: one for one in ALL}


def start(
    argument: tuple[Baseline, Any, tuple[str, str]],
) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """In a worker: enter the node, build the baseline, and answer messages."""
    baseline, workload, nodes = argument
    rank = int(os.environ["RANK"])
    enter(nodes[rank])
    local, here = (rank, len(nodes)) if baseline.tensor else (0, 1)
    os.environ.update(
        MASTER_ADDR=ADDRESSES[0],
        GLOO_SOCKET_IFNAME=INTERFACE,
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(here),
        LOCAL_SIZE=str(here),
        GROUP_RANK=str(rank - local),
    )
    import torch

    from benchmarks.training_step.worker import Runner

    torch.set_num_threads(workload.threads)
    runner = Runner(_build(baseline, workload), workload)
    if baseline.tensor:
        runner.rank = 0  # all read the same batch
    return lambda message: getattr(runner, message[0])(**message[1])


def _build(baseline: Baseline, workload: Any) -> Any:
    if baseline.name.startswith("plait"):
        return _plait(workload, **baseline.options)
    from benchmarks.training_step import deepspeed_peer, torch_peers

    if baseline.name == "deepspeed-2":
        return deepspeed_peer.build(workload, stage=2)
    if baseline.name == "fully-shard":
        return torch_peers.fully_sharded(workload, freed=False)
    return torch_peers.ddp(workload) if baseline.name == "ddp" else _ddp_powersgd(workload)


def _plait(
    workload: Any, *, stage: int, communication_data_type: str | None = None, **parallel: Any
) -> Any:
    import plait
    from benchmarks.training_step.plait_entry import configuration
    from benchmarks.training_step.workload import build_model

    config = configuration(workload, stage=stage) | {"parallel": {"transport": "torch", **parallel}}
    if communication_data_type is not None:
        config["communication_data_type"] = communication_data_type
    engine = plait.initialize(build_model(workload), config, loss_fn=plait.causal_lm_loss)

    print(engine.communication, flush=True)  # to the log of the worker

    def step(batch: Any) -> tuple[float, float]:
        result = engine.train_batch(batch)
        if result.decided:
            print(result.decided, flush=True)
        return float(result.loss), float(result.grad_norm)

    return step


def _ddp_powersgd(workload: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.training_step.torch_peers import _step
    from benchmarks.training_step.workload import adamw_arguments, build_model

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_model(workload), broadcast_buffers=False)
    model.register_comm_hook(
        PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10), powerSGD_hook
    )
    return _step(
        model, torch.optim.AdamW(model.parameters(), **adamw_arguments(workload)), workload
    )
