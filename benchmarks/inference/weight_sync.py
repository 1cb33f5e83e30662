"""How long weights take from one layout to another, as a ratio to copying the same bytes the same way; on CPUs, float32, one thread a rank.

    python -m benchmarks.inference.weight_sync        ten minutes

The floor is as many bytes from memory that lies in one stretch to such memory, by the same processes and the same way: `copy_` inside of a
process, gloo's send and receive between processes, as one message to each rank or in several, whichever is fastest. It computes no hash. A
ratio is of the shortest of some calls, in turn, to the shortest of the floor, in time and in time of processors (both ranks'). `verify`
compares nothing, what leaves with what lies in the target's memory in the end, or this and computes a hash that is equal on every layout.

Where the layouts cut another dimension, a hand-over has to take columns out of rows; the floor has not: both of its sides are one stretch.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import xxhash

import plait
from benchmarks.common.machine import facts
from plait._torch.dtensor import local_tensor
from plait._torch.groups import make_gloo
from plait.inference.weight_sync.holdings import holding_of, tensors_of
from plait.inference.weight_sync.route import PIECE, pieces_of
from plait.inference.weight_sync.transfer import Verification

RESULT = Path(__file__).parents[2] / "benchmarks/results/weight_sync.json"
TIMES = 9
MESSAGES = (1 << 40, 32 << 20, 4 << 20)
"""Bytes of one, at most."""
Times = tuple[float, float]
"""Seconds, and seconds of processors."""
HOW: tuple[Verification, ...] = ("off", "hashes", "content")
OFF: dict[str, Any] = {"sequence_parallel": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "tp 2": {"parallel": {"tp": 2, **OFF}},
    "pp 2": {"parallel": {"pp": 2}},
}
PAIRS = [("ZeRO 3", "tp 2"), ("pp 2", "tp 2"), ("tp 2", "ZeRO 3")]


SIZES: dict[str, dict[str, int]] = {
    "15 M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2},
    "60 M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 12, "num_key_value_heads": 4},
    "250 M": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 9, "num_attention_heads": 24, "num_key_value_heads": 8},
}


def model(size: str) -> torch.nn.Module:
    """So many parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, **SIZES[size]))


def timed(*works: Callable[[], Any], barrier: Callable[[], Any] = lambda: None) -> list[Times]:
    """The shortest of each, in turn: other programs use the cores. Ranks begin and end together at a `barrier`."""
    times: list[list[Times]] = [[] for _ in works]
    for turn in range(TIMES + 1):
        for work, found in zip(works, times, strict=True):
            barrier()
            began, used = time.perf_counter(), time.process_time()
            work()
            used = time.process_time() - used
            barrier()
            if turn:
                found.append((time.perf_counter() - began, used))
    return [(min(wall for wall, _ in found), min(used for _, used in found)) for found in times]


def same_ranks(rank: int, port: int, size: str, pair: tuple[str, str], out: Any) -> None:
    """Both models on two ranks."""
    _start(rank, port)
    one, other = (plait.parallelize(model(size), {"train_micro_batch_size_per_gpu": 1, **LAYOUTS[name]}) for name in pair)
    sides = [holding_of(tensors_of(each.model, "")) for each in (one, other)]
    rows: list[Any] = [None, None]
    dist.all_gather_object(rows, sides)
    route = pieces_of([row[0] for row in rows], [row[1] for row in rows], same_ranks=True, mine=(("source", rank), ("target", rank)))
    sizes = {
        "inside": sum(p.size for p in route if p.source == p.target),
        "sent": sum(p.size for p in route if p.source == rank != p.target),
        "received": sum(p.size for p in route if p.target == rank != p.source),
    }
    buffers = {name: [torch.ones(max(size, 1), dtype=torch.uint8) for _ in range(2)] for name, size in sizes.items()}

    def floor(message: int) -> None:
        works = [dist.irecv(part, 1 - rank) for part in buffers["received"][0].split(message)] if sizes["received"] else []
        works += [dist.isend(part, 1 - rank) for part in buffers["sent"][0].split(message)] if sizes["sent"] else []
        buffers["inside"][0].copy_(buffers["inside"][1])
        for work in works:
            work.wait()

    floors = [partial(floor, message) for message in MESSAGES]
    times = timed(*floors, *(partial(plait.sync_weights, one, other, verify=how) for how in HOW), barrier=dist.barrier)
    out.put((rank, sum(local_tensor(t).nbytes for t in tensors_of(other.model, "").values()), times))
    one.close()
    other.close()
    dist.destroy_process_group()


def apart(rank: int, port: int, size: str, pair: tuple[str, str], out: Any) -> None:
    """A trainer and a generator of one process each."""
    torch.set_num_threads(1)
    one = model(size)
    count = sum(p.nbytes for p in one.parameters())
    flat = torch.ones(count, dtype=torch.uint8)
    store = dist.TCPStore("127.0.0.1", port + 1, 2, is_master=rank == 0)
    gloo = make_gloo(store, rank, 2, timedelta(seconds=60))

    def floor(message: int) -> None:
        for work in [(gloo.recv if rank else gloo.send)([part], 1 - rank, 0) for part in flat.split(message)]:
            work.wait()

    def barrier() -> None:
        gloo.allreduce([torch.zeros(1)]).wait()

    floors = [partial(floor, message) for message in MESSAGES]
    address = f"127.0.0.1:{port}"
    if rank == 0:
        with plait.WeightSender(one, address, receivers=1, timeout=60) as sender:
            out.put((rank, count, timed(*floors, *(partial(sender.send, verify=how) for how in HOW), barrier=barrier)))
    else:
        with plait.WeightReceiver(one, address, timeout=60) as receiver:
            out.put((rank, count, timed(*floors, *[receiver.receive] * len(HOW), barrier=barrier)))


def one_process(size: str) -> tuple[int, list[Times]]:
    """Two plain models."""
    one, other = model(size), model(size)
    count = sum(p.nbytes for p in one.parameters())
    flats = [torch.ones(count, dtype=torch.uint8) for _ in range(2)]

    def floor(message: int) -> None:
        for to, of in zip(*(flat.split(message) for flat in flats), strict=True):
            to.copy_(of)

    syncs = [partial(plait.sync_weights, one, other, verify=how) for how in HOW]
    return count, timed(*(partial(floor, message) for message in MESSAGES), *syncs)


def hash_rate() -> float:
    """Bytes that one core hashes in a second, of memory that is in no cache."""
    flat = torch.ones(256 << 20, dtype=torch.uint8)
    ((_, seconds),) = timed(lambda: [xxhash.xxh3_128_digest(part.numpy()) for part in flat.split(PIECE)])
    return flat.numel() / seconds


def _start(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def two(function: Any, size: str, pair: tuple[str, str]) -> tuple[int, list[Times]]:
    """The times of rank 0, and processor times of both."""
    context = mp.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = context.SimpleQueue()
    processes = [context.Process(target=function, args=(rank, port, size, pair, out)) for rank in range(2)]
    for process in processes:
        process.start()
    (_, count, mine), (_, _, others) = sorted(out.get() for _ in processes)
    for process in processes:
        process.join(10)
        process.kill()
    return count, [(wall, used + other) for (wall, used), (_, other) in zip(mine, others, strict=True)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Callable[[str], tuple[int, list[Times]]]] = {"two models of one process": one_process}
    for pair in PAIRS:
        rows[f"{pair[0]} to {pair[1]}, the same two ranks"] = partial(two, same_ranks, pair=pair)
    rows["one process to another"] = partial(two, apart, pair=("", ""))
    table: dict[str, Any] = {}
    for name, measured in rows.items():
        for size in SIZES:
            count, times = measured(size)
            row: dict[str, Any] = {"MB": round(count / 1e6)}
            for at, what in enumerate(("seconds", "processor seconds")):
                floor, own = min(one[at] for one in times[: len(MESSAGES)]), [one[at] for one in times[len(MESSAGES) :]]
                row[what] = {"floor": floor, **{how: round(one / floor, 2) for how, one in zip(HOW, own, strict=True)}}
            table.setdefault(name, {})[size] = row
            print(f"{name:38} {size:5} {row}", flush=True)
    found = {"machine": facts("torch", "xxhash"), "hash_bytes_per_s": hash_rate(), "rows": table}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
