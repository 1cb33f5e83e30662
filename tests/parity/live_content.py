"""Content hash of a live engine, independent of the code that writes checkpoints.

It works on unsharded tensors and computes the hash from a table of their words.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from plait.engine import generators
from plait.verify.parity import full_tensor_on_cpu

Lanes = tuple[int, int]
MASK = (1 << 64) - 1
_WORD = {1: "u1", 2: "<i2", 4: "<i4", 8: "<i4"}


def mixed(seed, count):
    """Return SplitMix64 of seed + 0, 1, 2 ... times the golden ratio, made odd."""
    with np.errstate(over="ignore"):
        steps = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = np.full(count, seed, dtype=np.uint64) + steps
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def lanes_of(name, tensor):
    """Return the two lanes of the hash of an unsharded tensor."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = "\0".join([name, dtype, ",".join(map(str, shape))])
    digest = hashlib.blake2b(text.encode(), digest_size=40).digest()
    numbers = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 40, 8)]
    if not tensor.numel():
        return numbers[0], numbers[1]

    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    table = raw.view(_WORD[tensor.element_size()]).astype(np.int64).view(np.uint64)
    table = table.reshape(int(np.prod(shape[:-1], dtype=int)), -1)
    rows = (table * mixed(numbers[4], table.shape[1])).sum(axis=1, dtype=np.uint64)
    lanes = []
    for start, seed in ((numbers[0], numbers[2]), (numbers[1], numbers[3])):
        total = (mixed(seed, len(rows)) * rows).sum(dtype=np.uint64)
        lanes.append((start + int(total)) & MASK)
    return tuple(lanes)


def total(tensors):
    """Return the sum of all lanes in the form of a manifest."""
    sums = [sum(lanes[index] for lanes in tensors.values()) & MASK for index in range(2)]
    return b"".join(value.to_bytes(8, "little") for value in sums).hex()


def everywhere(local_lanes):
    """Return the lanes of all ranks by name. Replicas must have equal ones. Collective."""
    rows: list[dict[str, Lanes]] = [local_lanes]
    if dist.get_world_size() > 1:
        rows = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, local_lanes)
    result: dict[str, Lanes] = {}
    for row in rows:
        for name, lanes in row.items():
            assert result.setdefault(name, lanes) == lanes, f"replicas of {name} differ"
    return result


def live_content(engine):
    """Return the two content hashes of a manifest for the live state. Collective.

    The first covers model and optimizer, the second what ranks keep for themselves.
    """
    tensors: dict[str, Lanes] = {}
    names: dict[int, str] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
        tensors[f"model.{name}"] = lanes_of(f"model.{name}", full_tensor_on_cpu(parameter))
    for prefix, module in engine.model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                path = f"model.{prefix}.{name}" if prefix else f"model.{name}"
                tensors[path] = lanes_of(path, full_tensor_on_cpu(buffer))
    for parameter, states in engine.optimizer.state.items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                path = f"optimizer.state.{names[id(parameter)]}.{key}"
                tensors[path] = lanes_of(path, full_tensor_on_cpu(value))

    rank_tensors = {f"hooks.{name}": tensor for name, tensor in engine.hooks.state().items()}
    rank_tensors |= generators.states(engine.device)
    rank_lanes: dict[str, Lanes] = {}
    for name, tensor in rank_tensors.items():
        path = f"{engine.rank}.rank.{name}"
        rank_lanes[path] = lanes_of(path, tensor)
    return total(everywhere(tensors)), total(everywhere(rank_lanes))
