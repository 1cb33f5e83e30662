"""The content hash of what a model and an optimizer hold now, by other code than a checkpoint's: unsharded tensors, formed as a table."""

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
    """SplitMix64 of seed + 0, 1, 2 ... times the golden ratio; odd."""
    with np.errstate(over="ignore"):
        z = np.full(count, seed, dtype=np.uint64) + np.arange(count, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def lanes_of(name, tensor):
    """Of one tensor that is not sharded."""
    shape = tuple(tensor.shape)
    text = "\0".join(
        [name, str(tensor.dtype)[len("torch.") :], ",".join(str(size) for size in shape)]
    )
    digest = hashlib.blake2b(text.encode(), digest_size=40).digest()
    numbers = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 40, 8)]
    if not tensor.numel():
        return numbers[0], numbers[1]
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    table = raw.view(_WORD[tensor.element_size()]).astype(np.int64).view(np.uint64)
    table = table.reshape(int(np.prod(shape[:-1], dtype=int)), -1)
    weighed = (table * mixed(numbers[4], table.shape[1])).sum(axis=1, dtype=np.uint64)
    first, second = (
        (mixed(seed, len(weighed)) * weighed).sum(dtype=np.uint64) for seed in numbers[2:4]
    )
    return (numbers[0] + int(first)) & MASK, (numbers[1] + int(second)) & MASK


def total(tensors):
    """As a manifest has it."""
    sums = [sum(lanes[index] for lanes in tensors.values()) & MASK for index in range(2)]
    return b"".join(value.to_bytes(8, "little") for value in sums).hex()


def everywhere(here):
    """Those of all ranks by name; equal names have equal hashes. Collective."""
    rows: list[dict[str, Lanes]] = [here]
    if dist.get_world_size() > 1:
        rows = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, here)
    found: dict[str, Lanes] = {}
    for row in rows:
        for name, lanes in row.items():
            assert found.setdefault(name, lanes) == lanes, f"replicas of {name} differ"
    return found


def live_content(engine):
    """(model and optimizer, what ranks keep for themselves), as a manifest has them. Collective; changes nothing."""
    tensors: dict[str, Lanes] = {}
    names: dict[int, str] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
        tensors[f"model.{name}"] = lanes_of(f"model.{name}", full_tensor_on_cpu(parameter))
    for prefix, module in engine.model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                path = "model." + ".".join(part for part in (prefix, name) if part)
                tensors[path] = lanes_of(path, full_tensor_on_cpu(buffer))
    for parameter, states in engine.optimizer.state.items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                path = f"optimizer.state.{names[id(parameter)]}.{key}"
                tensors[path] = lanes_of(path, full_tensor_on_cpu(value))
    own = {
        f"hooks.{name}": tensor for name, tensor in engine.hooks.state().items()
    } | generators.states(engine.device)
    mine = {
        f"{engine.rank}.rank.{name}": lanes_of(f"{engine.rank}.rank.{name}", tensor)
        for name, tensor in own.items()
    }
    return total(everywhere(tensors)), total(everywhere(mine))
