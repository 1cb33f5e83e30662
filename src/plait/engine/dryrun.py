"""What a micro-batch keeps, found by running it without data: forward, loss and backward on fake tensors, which have shapes and no memory.

Everything that the real run does to a block is done here too (tensor parallelism, recompute, the dtype of computation), but for what moves
parameters around; collectives return at once. So the figures are those of the model's own code and of torch's own operators on that kind of
device, not of a formula. Nothing is communicated, allocated or changed.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import flop_registry

from plait._torch import FakeTensorMode, finished_work, process_group_of, tree_leaves, tree_map
from plait.cluster.mesh import Mesh
from plait.engine.batch import Forward, default_forward
from plait.engine.live import LiveStorages
from plait.engine.loss import Loss, causal_lm_loss
from plait.errors import ModelError
from plait.parallel.activations import ActivationFacts, BlockMode, ModeFacts
from plait.parallel.recompute import Recompute
from plait.parallel.technique import Parts
from plait.parallel.tensor import TensorParallel

OUTSIDE, AFTER, BACKWARD = -1, -2, -3
"""Units beside the blocks: before and between them; after the last one; made during backward."""


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a language model: `input_ids` and `labels` [samples, length], all targets, on meta."""
    ids = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def activation_facts(
    model: nn.Module,
    *,
    blocks: tuple[str, ...],
    mesh: Mesh,
    batch: Any,
    tensor_parallel: TensorParallel | None = None,
    recompute: Recompute | None = None,
    offload: bool = False,
    compute_dtype: torch.dtype | None = None,
    loss_fn: Loss = causal_lm_loss,
    forward: Forward = default_forward,
) -> ActivationFacts:
    """What one micro-batch like `batch` keeps on this rank of `mesh`, with every block in each mode. `model` is whole, as yet unsharded,
    and stays as it is. Raises ModelError where its code looks at values."""
    recompute = recompute or Recompute()
    modes: tuple[BlockMode, ...] = ("none", "selective", "full") if blocks else ("none",)

    def measure(mode: BlockMode, store: Nowhere | None) -> ModeFacts:
        return _measure(
            model,
            parts=lambda fake: Parts(model=fake, blocks=blocks, activation_store=store, offloaded_blocks=len(blocks) if store else 0),
            mesh=mesh,
            batch=batch,
            tensor_parallel=tensor_parallel or TensorParallel(),
            recompute=recompute.model_copy(update={"mode": mode, "every": 1, "assignment": (mode,) * len(blocks)}),
            compute_dtype=compute_dtype,
            loss_fn=loss_fn,
            forward=forward,
        )

    found = {}
    for mode in modes:
        found[mode] = measure(mode, None)
        if offload:
            store = Nowhere()
            resident = measure(mode, store).blocks
            stored = tuple(store.bytes.get(index, 0) for index in range(len(blocks)))
            found[mode] = replace(found[mode], resident=resident, stored=stored)
    return ActivationFacts(found)


def largest_over_tp(mesh: Mesh, *figures: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every figure, the largest of the tp axis. Slices may be uneven, and what is decided from figures must be decided alike: a block is
    recomputed by all of the axis's ranks or by none, because its collectives are repeated. Collective over tp."""
    group = mesh.group("tp")
    if group is None:
        return list(figures)
    tensor = torch.tensor([value for some in figures for value in some], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    agreed = iter(tensor.tolist())
    return [tuple(next(agreed) for _ in some) for some in figures]


def alike_over_tp(facts: ActivationFacts, mesh: Mesh) -> ActivationFacts:
    """The facts of the fullest rank of the tp axis (see `largest_over_tp`)."""
    found: dict[BlockMode, ModeFacts] = {}
    for mode, one in facts.modes.items():
        blocks, resident, stored, rest = largest_over_tp(mesh, one.blocks, one.resident, one.stored, (one.outside, one.logits, one.flops))
        outside, logits, flops = rest
        found[mode] = replace(one, blocks=blocks, resident=resident, stored=stored, outside=outside, logits=logits, flops=flops)
    return ActivationFacts(found)


def _measure(
    model: nn.Module,
    *,
    parts: Callable[[nn.Module], Parts],
    mesh: Mesh,
    batch: Any,
    tensor_parallel: TensorParallel,
    recompute: Recompute,
    compute_dtype: torch.dtype | None,
    loss_fn: Loss,
    forward: Forward,
) -> ModeFacts:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_copy(model, mesh.device, compute_dtype)
        applied = recompute.apply(tensor_parallel.apply(parts(fake), mesh), mesh)
        piece = tree_map(lambda x: torch.empty_like(x, device=mesh.device) if isinstance(x, torch.Tensor) else x, batch)
        known = [*fake.parameters(), *fake.buffers(), *(leaf for leaf in tree_leaves(piece) if isinstance(leaf, torch.Tensor))]
        live = DryRun(known=known)
        watch_blocks(fake, applied.blocks, live)
        for parameter in fake.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: live.forget([p.grad]))
        region = applied.tensor_region
        if region is not None:
            region.gather_logits = not (applied.loss_parallel and getattr(loss_fn, "split_logits", False))
        with explained(model), rows_are_sequences(), live:
            total, _ = loss_fn(forward(fake, piece), piece)
            kept = dict(live.bytes)
            live.unit = BACKWARD
            total.backward()
    return ModeFacts(
        blocks=tuple(kept.get(index, 0) for index in range(len(applied.blocks))),
        outside=kept.get(OUTSIDE, 0),
        logits=kept.get(AFTER, 0),
        flops=live.flops,
        traffic=dict(live.traffic),
        peak=live.peak,
    )


def watch_blocks(model: nn.Module, blocks: tuple[str, ...], live: LiveStorages) -> Callable[[], None]:
    """Tell `live` which block is running. A block's input belongs to it, whoever made it. Returns what removes the watch."""
    handles = []

    def entering(index: int) -> Callable[..., None]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor):
                live.claim(hidden, index)
            live.unit = index

        return enter

    def leaving(index: int) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: object, output: Any) -> None:
            live.unit = AFTER if index == len(blocks) - 1 else OUTSIDE
            if live.unit == AFTER:
                for leaf in tree_leaves(output)[:1]:
                    live.claim(leaf, AFTER)

        return leave

    for index, name in enumerate(blocks):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(entering(index), with_kwargs=True))
        handles.append(module.register_forward_hook(leaving(index)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


class DryRun(LiveStorages):
    """Counts operations and traffic too; collectives return at once."""

    def __init__(self, *, known: Any) -> None:
        super().__init__(known=known)
        self.flops = 0
        self.traffic: Counter[str] = Counter()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args)
        out = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _collective(self, func: Any, args: Any) -> Any:
        kind, whole, returns_tensors = _COLLECTIVES[func._opname]
        size = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(args[whole]) if isinstance(leaf, torch.Tensor))
        ranks = process_group_of(args).size()
        self.traffic[kind] += (2 if kind == "all_reduce" else 1) * size * (ranks - 1) // ranks
        return (args[0], finished_work()) if returns_tensors else finished_work()


class Nowhere:
    """A store that only counts."""

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()

    def begin(self) -> None:
        """As any store."""

    def open(self, index: int) -> _NowhereGroup:
        """Counts for block `index`."""
        return _NowhereGroup(self, index)

    def prefetcher(self) -> Callable[[], None]:
        """Nothing comes back ahead."""
        return lambda: None

    def drain(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Nothing is held."""


class _NowhereGroup:
    def __init__(self, store: Nowhere, index: int) -> None:
        self._store = store
        self._index = index

    def put(self, flat: torch.Tensor) -> tuple[int, torch.device]:
        self._store.bytes[self._index] += flat.numel()
        return flat.numel(), flat.device

    def get(self, handle: tuple[int, torch.device]) -> torch.Tensor:
        size, device = handle
        return torch.empty(size, dtype=torch.uint8, device=device)


_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, True),
    "_allgather_base_": ("all_gather", 0, True),
    "_reduce_scatter_base_": ("reduce_scatter", 1, True),
    "alltoall_base_": ("reduce_scatter", 1, False),  # how a reduce-scatter is carried out on gloo
}
"""Operator to kind, index of the whole tensor among its arguments, and whether it returns tensors beside its work."""


def fake_copy(model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> nn.Module:
    """A copy with fake tensors, under a FakeTensorMode; parameters in the dtype of computation, as `fully_shard` casts them."""
    memo: dict[int, Any] = {}

    def fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)

    for parameter in model.parameters():
        dtype = compute_dtype if parameter.is_floating_point() else None
        memo[id(parameter)] = nn.Parameter(fake(parameter, dtype), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for value in (*module._buffers.values(), *module.__dict__.values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake(value)
    return copy.deepcopy(model, memo)


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """A model whose code looks at values is refused in words."""
    try:
        yield
    except Exception as error:
        if "DataDependent" not in type(error).__name__ and "data_ptr" not in str(error):
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be run without data: its code looks at values ({type(error).__name__}), so what it keeps is "
            "not known beforehand; choose parallel.recompute.mode yourself in place of a budget"
        ) from error


@contextmanager
def rows_are_sequences() -> Iterator[None]:
    """Transformers looks at position ids for several sequences in a row, and builds a mask where it cannot look. Rows of one sequence,
    which the real model finds, need none."""
    masking = sys.modules.get("transformers.masking_utils")
    looks = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or looks is None:
        yield
        return
    masking.__dict__["find_packed_sequence_indices"] = lambda position_ids: None
    try:
        yield
    finally:
        masking.__dict__["find_packed_sequence_indices"] = looks
