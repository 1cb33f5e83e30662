"""`sync_weights`: the weights of one model into another on the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from plait.checkpoint.agreement import together
from plait.cluster import accelerator
from plait.errors import CommunicationError, InputError
from plait.inference.weight_sync.holdings import holding_of, model_of, tensors_of
from plait.inference.weight_sync.route import Piece, pieces_of
from plait.inference.weight_sync.status import ReceivedWeights, check_newer, note, received_weights
from plait.inference.weight_sync.transfer import HASHES, Verification, checked, move


def sync_weights(source: Any, target: Any, *, version: int | None = None, verify: Verification = "full") -> ReceivedWeights | None:
    """Copy the weights of `source` into `target`, each on a layout of its own, over the same ranks; for a generator beside a trainer.

    Both are engines, what `plait.parallelize` returned, or plain modules; None on a rank that has none of it. Parameters and persistent
    buffers are copied, in the target's dtypes, a few pieces of a tensor at a time: 80 MiB at most beside the two models. `version` grows
    with every call (by default by 1 from 0); a stale one is refused. With `verify="full"` every rank hashes what leaves it and what lies in
    its target in the end, and these are compared; "sums" compares sums of every piece, which is faster; "off" compares nothing. Returns
    what the target has now (`version`, `content` of a full verification, `bytes`, `seconds`); None on a rank without one.

    Collective over all ranks. Raises InputError on all of them where the models differ or the version is stale, and CommunicationError
    where something else arrived than was sent; the target is then refused by `generate` until a later call succeeds.
    """
    began = time.perf_counter()
    check_verification(verify)
    have, want = model_of(source), model_of(target)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = _device(world)

    def prepared() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
        before = received_weights(want) if want is not None else None
        found = version if version is not None else before.version + before.is_complete if before is not None else 0
        if want is not None:
            check_newer(found, before)
        if want is not None and want is have:
            raise InputError("source and target are one model")
        return tensors_of(have, "source"), tensors_of(want, "target"), found if want is not None or version is not None else -1

    agree = partial(together, device=device, doing="sync_weights")
    (sources, targets, _), brought = agree(prepared, lambda found: found[2].to_bytes(8, "little", signed=True), raising=InputError)
    versions = {int.from_bytes(row[:8], "little", signed=True) for row in brought} - {-1}
    if len(versions) != 1:
        raise InputError(f"sync_weights: the ranks have the versions {sorted(versions)}; give every rank the same" if versions else NOBODY)
    (number,) = versions
    holdings = _of_all((holding_of(sources), holding_of(targets)), world)
    have_all, want_all = [row[0] for row in holdings], [row[1] for row in holdings]
    mine = (("source", rank), ("target", rank))
    route, _ = agree(lambda: pieces_of(have_all, want_all, same_ranks=True, mine=mine), raising=InputError)
    if want is not None:
        note(want, ReceivedWeights(number, "", 0, 0.0, is_complete=False))
    moved, _ = agree(
        lambda: move(route, sources, targets, _Default(device), source=rank, target=rank, verify=verify),
        raising=CommunicationError,
    )
    content = ""
    if verify != "off":
        rows = _of_all(({to: bytes(sum_) for to, sum_ in moved.sent.items()}, bytes(moved.counted)), world)
        sent, counted = [sums[rank] for sums, _ in rows if rank in sums], [one for _, one in rows]
        content, _ = agree(lambda: checked(moved.received, sent, counted), raising=CommunicationError)
    content = content if verify == "full" else ""
    return note(want, ReceivedWeights(number, content, moved.bytes, time.perf_counter() - began)) if want is not None else None


NOBODY = "sync_weights: no rank has a target"


def check_verification(verify: object) -> None:
    """Raise InputError for a word that is none."""
    if verify not in HASHES:
        raise InputError(f"verify = {verify!r} must be one of {', '.join(HASHES)}")


def _device(world: int) -> torch.device:
    """Where the default group takes tensors, the same kind on every rank."""
    if world == 1 or accelerator.BACKEND not in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device(accelerator.NAME, torch.accelerator.current_device_index())


def _of_all(mine: Any, world: int) -> list[Any]:
    if world == 1:
        return [mine]
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, mine)
    return rows


class _Default:
    """Messages of the default group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, tensor: torch.Tensor, piece: Piece) -> Callable[[], None]:
        return _waiting(dist.isend(tensor, piece.target), tensor)

    def receive(self, tensor: torch.Tensor, piece: Piece) -> Callable[[], None]:
        return _waiting(dist.irecv(tensor, piece.source), tensor)


def _waiting(work: dist.Work | None, tensor: torch.Tensor) -> Callable[[], None]:
    def wait() -> None:
        if work is not None:
            work.wait()
        tensor.numel()  # kept until here

    return wait
