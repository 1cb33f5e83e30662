"""The random generators of a rank: torch's of the CPU and of its device, Python's and numpy's.
Where they begin, and what a checkpoint keeps of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch

from plait import exact
from plait.cluster.mesh import Mesh

_CPU = "random.cpu"
_DEVICE = "random.device"
_OTHERS = "random.python"


def generator_seed(seed: int, mesh: Mesh, *, step: int = 0) -> int:
    """The seed of this rank's generators at a step: another one wherever activations are others
    (data-parallel ranks, slices of sequences, pipeline stages), the same over tp, where they are
    replicated. It follows from the layout alone.
    """
    at = mesh.coordinates
    words = f"{seed} {step} {mesh.dp_index} {at['cp']} {at['pp']}"
    return (
        int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()[:8], "little") >> 1
    )


def seed(base: int, mesh: Mesh, *, step: int) -> None:
    """All of them, from the layout, the seed of the run and the step."""
    found = generator_seed(base, mesh, step=step)
    torch.manual_seed(found)
    random.seed(found)
    np.random.seed(found % 2**32)  # the global one, which data sets draw from


def states(device: torch.device) -> dict[str, torch.Tensor]:
    """Of all of them, as tensors."""
    own = dict(np.random.get_state(legacy=False))
    own["state"] = {"key": own["state"]["key"].tolist(), "pos": own["state"]["pos"]}
    others = exact.encode({"python": random.getstate(), "numpy": own}, "a generator")
    found = {
        _CPU: torch.get_rng_state(),
        _OTHERS: torch.tensor(list(json.dumps(others).encode()), dtype=torch.uint8),
    }
    if device.type != "cpu":
        found[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
    return found


def restore(device: torch.device, saved: Mapping[str, torch.Tensor]) -> bool:
    """Go on where they were; False, with nothing changed, where `saved` does not have all of
    them.
    """
    if not {_CPU, _OTHERS, *([_DEVICE] if device.type != "cpu" else [])} <= saved.keys():
        return False
    others = exact.decode(json.loads(bytes(saved[_OTHERS].tolist())), where="a generator")
    torch.set_rng_state(saved[_CPU])
    random.setstate(others["python"])
    own = others["numpy"]
    own["state"]["key"] = np.array(own["state"]["key"], dtype=np.uint32)
    np.random.set_state(own)
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(saved[_DEVICE], device)
    return True
