"""One rank of a scene: measures links and compares ways as a run does at its start, and times every way anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.two_nodes.network import ADDRESSES, INTERFACE, enter


def start(
    argument: tuple[int, tuple[str, str] | None],
) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """`argument`: ranks a node, and the names of the two nodes; None is this machine as it is."""
    per_node, nodes = argument
    rank = int(os.environ["RANK"])
    if nodes is not None:
        enter(nodes[rank // per_node])
        os.environ.update(MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=INTERFACE)
    import torch
    import torch.distributed as dist

    from plait.cluster.mesh import split_by_node
    from plait.comm.measure import all_reduce_operations, compare_algorithms, measure_algorithms

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    # Two nodes that are one machine do share memory, which two machines would not.
    alone = nodes is None
    levels = (
        split_by_node([range(group.size())], [r // per_node for r in range(group.size())])
        if nodes is not None
        else None
    )

    def fit(*, seconds: float) -> Any:
        return measure_algorithms(
            "dp_replicate", group, levels, device=device, seconds=seconds, shared_memory=alone
        )

    def compare(*, names: Sequence[str], nbytes: int, seconds: float) -> dict[str, float]:
        return compare_algorithms(
            names, nbytes, group, levels, device=device, seconds=seconds, shared_memory=alone
        )

    def time_all(*, nbytes: int, seconds: float, rounds: tuple[int, int]) -> dict[str, list[float]]:
        """Way to its times, one a round; the order rotates. The first round is not counted."""
        ways = all_reduce_operations(
            group, levels, device=device, shared_memory=alone, lossy=False
        )(nbytes)
        names = list(ways)
        times: dict[str, list[float]] = {name: [] for name in names}
        going, done, began = torch.ones(1), -1, 0.0
        while bool(going):
            shift = done % len(names)
            for name in names[shift:] + names[:shift]:
                dist.barrier()
                before = time.perf_counter()
                ways[name]()
                if done >= 0:
                    times[name].append(time.perf_counter() - before)
            done += 1
            began = began or time.perf_counter()
            going.fill_(
                done < rounds[0] or (done < rounds[1] and time.perf_counter() - began < seconds)
            )
            dist.broadcast(going, 0)
        return times

    handlers: dict[str, Callable[..., Any]] = {"fit": fit, "compare": compare, "time_all": time_all}
    return lambda message: handlers[message[0]](**message[1])
