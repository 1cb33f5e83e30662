"""Counts what a training step asks of a device: operators, copies, collectives and waits.

Note [What is counted]
    *Kernels* are the operators that torch dispatches to the device below autograd, as a dispatch
    mode sees them. Composite operators appear as their parts and a foreach operator appears once,
    as on a GPU. Views, allocations and collectives are left out, because they launch no kernel of
    the computation. An operator of FSDP (`fsdp::all_gather_copy_in`) counts as one.

    *Copies* are transfers between the host and the device. *Collectives* are the calls that reach
    a NCCL communicator; a group of messages is one call. *Waits* are the places where the program
    blocks until the device has reached a point.

    Copies, collectives and waits come from the simulated device (`tests/simulated_device`), which
    sees them from below whatever code has made them.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.step_counts import peers
from benchmarks.step_counts.layouts import Layout
from benchmarks.step_counts.peers import Sharding, Step, units_of
from benchmarks.steps.workload import batch, build_model

_COLLECTIVES = ("c10d", "_c10d_functional")
_WITHOUT_A_KERNEL = (
    *("_unsafe_view", "record_stream", "resize_", "set_"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    "_local_scalar_dense",  # a read by the program, counted as a wait
)
WARM = 4
"""Steps before the counted one: allocations, lazy states and schedules are settled by then."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step on one rank."""

    kernels: int
    copies: int
    collectives: int
    waits: int
    operators: dict[str, int]
    """Kernels by the name of their operator."""


class _OperatorCounter(TorchDispatchMode):
    """Counts the operators on tensors of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            # DTensor then runs the operators on local tensors, and those come here too.
            return NotImplemented

        result = func(*args, **kwargs)
        if _launches_a_kernel(func, args, kwargs, result):
            self.operators[func._schema.name.removeprefix("aten::")] += 1
        return result


def _launches_a_kernel(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    namespace = func._schema.name.partition("::")[0]
    if namespace in _COLLECTIVES or func._opname in _WITHOUT_A_KERNEL or func.is_view:
        return False
    tensors = [
        leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)
    ]
    devices = {tensor.device.type for tensor in tensors}
    # An operator with tensors of two devices is a copy between them.
    return devices == {"cuda"}


def count_step(step: Callable[[], object]) -> StepCounts:
    """Run one step and count it. Runs in a worker with a simulated device."""
    device: Any = sys.modules["simulated_device.on_torch"]
    before = _transfers(device)
    with _OperatorCounter() as counter:
        step()
    after = _transfers(device)

    transfers = {name: after[name] - count for name, count in before.items()}
    operators = counter.operators
    return StepCounts(kernels=operators.total(), operators=dict(operators), **transfers)


def _transfers(device: Any) -> dict[str, int]:
    copies = device.copies()
    return {
        "copies": copies["deferred"] + copies["waited"],
        "collectives": len(device.journal()),
        "waits": device.blocked()["all"],
    }


def plait_step(rank: int, world: int, layout: Layout) -> tuple[StepCounts, Sharding]:
    """Count a step of Plait, and return how it was sharded."""
    import plait

    engine = plait.initialize(
        build_model(layout.workload), layout.configuration(), loss_fn=plait.causal_lm_loss
    )
    shard = engine.sharded.parts.shard
    sharding = Sharding(units_of(engine.model), shard.compute_dtype, shard.reduce_dtype)
    counts = _counted(engine.train_batch, layout, rank)
    engine.close()
    return counts, sharding


def peer_step(rank: int, world: int, layout: Layout, sharding: Sharding) -> StepCounts:
    step: Step = getattr(peers, layout.peer)(layout, sharding, torch.device("cuda", rank))
    return _counted(step, layout, rank)


def _counted(step: Any, layout: Layout, rank: int) -> StepCounts:
    batches = [batch(layout.workload, step=number, rank=rank) for number in range(WARM + 1)]
    for warm in batches[:WARM]:
        step(warm)
    return count_step(lambda: step(batches[WARM]))
