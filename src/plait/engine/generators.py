"""Random generators of a rank: torch's on the CPU and the device, Python's and numpy's.

They are seeded from the layout, and their states are saved in checkpoints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch

from plait import exact
from plait.cluster.mesh import Mesh
from plait.hashing import seed_of

_CPU = "random.cpu"
_DEVICE = "random.device"
_OTHERS = "random.python"


def generator_seed(seed: int, mesh: Mesh, *, step: int = 0) -> int:
    """Return the seed of this rank's generators at a step.

    It differs between ranks whose activations differ (data-parallel ranks, context-parallel slices,
    pipeline stages). It is the same along tp, where activations are replicated.

    Args:
        seed: Seed of the run.
        mesh: Mesh of the ranks.
        step: Number of the step.
    """
    coordinates = mesh.coordinates
    return seed_of(f"{seed} {step} {mesh.dp_index} {coordinates['cp']} {coordinates['pp']}")


def seed(base: int, mesh: Mesh, *, step: int) -> None:
    """Seed all generators of this rank.

    Args:
        base: Seed of the run.
        mesh: Mesh of the ranks.
        step: Number of the step.
    """
    rank_seed = generator_seed(base, mesh, step=step)
    torch.manual_seed(rank_seed)
    random.seed(rank_seed)
    # The global generator of numpy, which data sets draw from. It accepts 32 bits.
    np.random.seed(rank_seed % 2**32)


def states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of all generators as uint8 tensors, by name."""
    numpy_state = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {
        "key": numpy_state["state"]["key"].tolist(),
        "pos": numpy_state["state"]["pos"],
    }
    others = exact.encode({"python": random.getstate(), "numpy": numpy_state}, "a generator")
    tensors = {
        _CPU: torch.get_rng_state(),
        _OTHERS: torch.tensor(list(json.dumps(others).encode()), dtype=torch.uint8),
    }
    if device.type != "cpu":
        tensors[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
    return tensors


def restore(device: torch.device, saved: Mapping[str, torch.Tensor]) -> bool:
    """Restore all generators of this rank.

    Args:
        device: Device of this rank.
        saved: The result of `states`, among other tensors.

    Returns:
        False, without any change, if a state is missing.
    """
    if not states(device).keys() <= saved.keys():
        return False
    others = exact.decode(json.loads(bytes(saved[_OTHERS].tolist())), where="a generator")
    torch.set_rng_state(saved[_CPU])
    random.setstate(others["python"])
    numpy_state = others["numpy"]
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(saved[_DEVICE], device)
    return True
