"""The engines, and how a worker becomes one rank on one node.

Workers import it: what they run cannot be in `__main__` of a package.
"""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.steps import worker
from benchmarks.steps.baselines import Baseline
from benchmarks.steps.workload import Workload
from benchmarks.two_nodes.network import ADDRESSES, INTERFACE, enter

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "intermediate": 704, "heads": 4}
SIZES |= {"vocabulary": 2048, "sequence": 128}
PEERS = "benchmarks.steps.torch_peers"
ANY = ["int8", "int4", "powersgd"]


def _plait(name: str, title: str, **options: Any) -> Baseline:
    # Processes of one machine could share memory, which two nodes cannot.
    options = {"stage": 0, "transport": "torch", **options}
    return Baseline(name, f"Plait {title}", "benchmarks.steps.plait_entry:build", options)


BASELINES = (
    Baseline("ddp", "DDP", f"{PEERS}:ddp"),
    Baseline("ddp-powersgd", "DDP, PowerSGD of rank 4", f"{PEERS}:ddp_powersgd"),
    Baseline("fully-shard", "fully_shard, kept", f"{PEERS}:fully_sharded", {"freed": False}),
    Baseline(
        "deepspeed-2",
        "DeepSpeed ZeRO 2",
        "benchmarks.steps.deepspeed_peer:build",
        {"stage": 2},
        requires="deepspeed",
    ),
    _plait("plait-0", "ZeRO 0, defaults"),
    _plait("plait-0-auto", "ZeRO 0, compresses where it pays", compress_gradients="auto"),
    _plait("plait-0-any", "ZeRO 0, PowerSGD allowed too", compress_gradients=ANY),
    _plait("plait-2", "ZeRO 2, defaults", stage=2),
    _plait("plait-2-auto", "ZeRO 2, compresses where it pays", stage=2, compress_gradients="auto"),
    _plait("plait-tp", "tensor parallel, no overlap", tp=2),
    _plait("plait-tp-overlap", "tensor parallel, all-reduces overlapped", tp=2, tensor_overlap=4),
    _plait("plait-0-bf16", "ZeRO 0, bf16 on the wire", communication_data_type="bf16"),
    _plait("plait-0-int8", "ZeRO 0, int8", compress_gradients="int8"),
    _plait("plait-0-int4", "ZeRO 0, int4", compress_gradients="int4"),
    _plait("plait-0-powersgd", "ZeRO 0, PowerSGD of rank 4", compress_gradients="powersgd"),
)
BY_NAME = {baseline.name: baseline for baseline in BASELINES}
ADAPTIVE = ("plait-0", "plait-0-auto", "plait-0-any", "plait-2-auto")
"""They measure the links at their start, so they start again at every rate."""
USUAL = [baseline.name for baseline in BASELINES if "tp" not in baseline.options]


def start(argument: tuple[Baseline, Workload, tuple[str, str]]) -> Callable[[Any], Any]:
    """Enter the node of this rank in a worker, build the baseline, and return what answers."""
    baseline, workload, nodes = argument
    rank = int(os.environ["RANK"])
    enter(nodes[rank])
    # Tensor parallelism across machines is refused, so its ranks say that they share one.
    local_size = 1
    local_rank = 0
    if "tp" in baseline.options:
        local_size = len(nodes)
        local_rank = rank
    os.environ.update(
        MASTER_ADDR=ADDRESSES[0],
        GLOO_SOCKET_IFNAME=INTERFACE,
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_size),
        LOCAL_SIZE=str(local_size),
        GROUP_RANK=str(rank - local_rank),
    )
    return worker.start((baseline, workload))
