"""Full tensors of a sharded model, one bucket at a time, for a generator, broadcast or file.

Note [Order of gathers]
    Every rank iterates over the same list of names, so the all-gathers of shards and the broadcasts
    along a pipeline run in the same order. A rank that stops the iteration early leaves the others
    waiting: consume the iterator on every rank, or on none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait.cluster.small_messages import all_gather_objects
from plait.errors import InputError
from plait.parallel.techniques.data_parallel import free_gathered
from plait.sharded.model import ShardedModel
from plait.sizes import MIB

WeightBucket = dict[str, torch.Tensor]
"""Full tensors by name. Tied names share one tensor and are in one bucket."""


def iterate_weights(
    sharded: ShardedModel, *, bucket_bytes: int = 256 * MIB, trained_only: bool = False
) -> Iterator[WeightBucket]:
    """Yield every parameter and persistent buffer as a full tensor. Collective.

    All ranks receive the same buckets. Training is not changed. A rank needs memory for one bucket
    besides the model, unless the caller keeps earlier buckets.

    Args:
        sharded: The result of `plait.parallelize`, or `engine.sharded`.
        bucket_bytes: A bucket is full when its tensors have this many bytes. A larger tensor is a
            bucket of its own.
        trained_only: Yield only parameters that require a gradient.

    Yields:
        Detached tensors on this rank's device, in the dtypes of the model. If this rank has the
        full tensor already, the result shares the model's memory: copy it if it must outlive the
        next step.

    Raises:
        InputError: `bucket_bytes` is not positive, or the parameters are kept in files.
    """
    if bucket_bytes < 1:
        raise InputError(f"bucket_bytes = {bucket_bytes} must be at least 1")
    return gathered(
        sharded, lambda: local_tensors(sharded.model, trained_only), bucket_bytes=bucket_bytes
    )


def gathered(
    sharded: ShardedModel, tensors: Callable[[], Mapping[str, torch.Tensor]], *, bucket_bytes: int
) -> Iterator[WeightBucket]:
    """Yield the full tensors of some shards, as `iterate_weights` does. Collective.

    Args:
        sharded: A sharded model on the mesh of the shards.
        tensors: Returns this rank's tensors by name. Called after gathered parameters were freed.
        bucket_bytes: See `iterate_weights`.

    Raises:
        InputError: The parameters are kept in files.
    """
    if sharded.config.parameter_offload.device == "nvme":
        section = "param"
        if sharded.config.parameter_offload.with_states:
            section = "optimizer"
        raise InputError(
            f'iterate_weights: offload_{section}.device = "nvme" keeps the parameters in files; set'
            ' it to "none", or use plait.initialize and engine.save_checkpoint(folder),'
            " whose weights plait.load_trained(model, folder) reads"
        )
    return _buckets(sharded, tensors, bucket_bytes)


@dataclass(frozen=True)
class _TensorFacts:
    """Description of one tensor of a pipeline stage, with all names that are tied to it."""

    stage: int
    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype


def _buckets(
    sharded: ShardedModel, tensors: Callable[[], Mapping[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[WeightBucket]:
    free_gathered(sharded.model)
    local = tensors()
    bucket: WeightBucket = {}
    filled_bytes = 0

    for facts in _agreed_order(sharded, local):
        tensor_bytes = facts.shape.numel() * facts.dtype.itemsize
        if bucket and filled_bytes + tensor_bytes > bucket_bytes:
            yield bucket
            bucket = {}
            filled_bytes = 0

        full = _full_tensor(sharded, facts, local)
        bucket.update(dict.fromkeys(facts.names, full))
        filled_bytes += tensor_bytes
        # Only the bucket refers to it, so that a consumer can free the tensors that it has used.
        del full

    if bucket:
        yield bucket


def local_tensors(model: nn.Module, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of this rank's pipeline stages, by name.

    Args:
        model: The sharded model.
        trained_only: Return only parameters that require a gradient.
    """
    if trained_only:
        # Not from the state dict, which for the quantised base weights of an adapter has another
        # form.
        parameters = model.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}

    state = model.state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    }


def _agreed_order(sharded: ShardedModel, local: Mapping[str, torch.Tensor]) -> list[_TensorFacts]:
    """Return descriptions of the tensors of all stages, in one order on all ranks. Collective.

    A name belongs to the first stage that has it. See Note [Order of gathers].
    """
    group = sharded.mesh.group("pp")
    stage = 0 if group is None else group.rank()

    names_of: dict[int, list[str]] = {}
    for name, tensor in local.items():
        names_of.setdefault(id(tensor), []).append(name)

    stage_facts = []
    for tied in names_of.values():
        tensor = local[tied[0]]
        stage_facts.append(_TensorFacts(stage, tuple(tied), tensor.shape, tensor.dtype))
    if group is None:
        return stage_facts

    order: list[_TensorFacts] = []
    seen: set[str] = set()
    for facts in itertools.chain.from_iterable(all_gather_objects(stage_facts, group)):
        # The two ends of a pipeline both hold a weight that ties them.
        names = tuple(name for name in facts.names if name not in seen)
        if names:
            order.append(_TensorFacts(facts.stage, names, facts.shape, facts.dtype))
            seen.update(names)
    return order


def _full_tensor(
    sharded: ShardedModel, facts: _TensorFacts, local: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    group = sharded.mesh.group("pp")
    if group is None or group.rank() == facts.stage:
        tensor = local[facts.names[0]].detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full = full.to(sharded.device).contiguous()
    else:
        full = torch.empty(facts.shape, dtype=facts.dtype, device=sharded.device)

    if group is not None:
        dist.broadcast(full, group=group, group_src=facts.stage)
    return full
