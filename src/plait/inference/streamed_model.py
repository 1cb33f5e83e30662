"""Models that are larger than memory: choice of the streamed blocks, and loading.

Note [Choice of streamed blocks]
    As few blocks as possible are streamed. They are distributed evenly over the model, so that a
    streamed block can be copied while the blocks before it compute. Blocks that share a weight with
    another module stay in memory.

If the model's own files do not contain the streamed layers in the form that the computation uses,
temporary files with this form are written at the start, and removed when the process ends.

Note [Unused scratch folders]
    A process holds a lock on its folder as long as it lives. A folder without a lock belongs to a
    process that was killed, and the next command removes it.
"""

from __future__ import annotations

import copy
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from plait._torch.modules import direct_parameters
from plait.cluster.host_memory import move_to_huge_pages, trim_heap
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.adapters import base_tensor, is_adapters
from plait.inference.source import Source
from plait.inference.weight_files import StoredTensor, buffer_bytes, read_into, stored_tensors
from plait.inference.weight_stream import (
    SLOTS,
    WEIGHT_ALIGNMENT,
    WeightStream,
    block_bytes,
    pinned_bytes,
    streamed_parameters,
)
from plait.model.blocks import find_blocks
from plait.model.layers import first_names
from plait.parallel.micro_batches import default_forward
from plait.sharded.assemble import WeightFiller, checked_model, destroying_new_group, shard
from plait.sharded.load_weights import sources_of, stored_names, weight_files
from plait.sharded.model import ShardedModel
from plait.sizes import dtype_name, format_bytes, format_bytes_rounded_up

_PREFIX = "plait-layers-"
_MOUNTS = Path("/proc/self/mounts")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class StreamingPlan:
    """Blocks of a model that one process streams, and bytes of resident and streamed weights."""

    streamed: tuple[str, ...]
    """Names of the streamed blocks, in the order in which they run."""
    resident_bytes: int
    """Bytes of the weights that stay in memory."""
    slot_bytes: int
    """Bytes of the slots in which streamed blocks compute."""
    streamed_bytes: int
    """Bytes of the weights that are copied to slots in every forward."""
    on_host: tuple[str, ...] = ()
    """Streamed blocks that are kept in pinned host memory. The others are read from files."""
    read_bytes: int = 0
    """Part of `streamed_bytes` that is read from files."""


class BudgetTooSmall(InputError):
    """Raised if the budget is too small for the streamed layers and everything else."""


def tensors_of(source: Source, model: nn.Module) -> dict[str, StoredTensor]:
    """Return the locations of a model's weights in the files of a Transformers folder.

    Tensors of an adapter are left out, except for those that replace tensors of the base model.

    Args:
        source: The folder.
        model: Its model, on the meta device.

    Returns:
        Locations by the tensors' names in the model.
    """
    files = weight_files(source.folder)
    tensors: dict[str, StoredTensor] = {}
    for path in dict.fromkeys(files.values()):
        tensors |= stored_tensors(path)

    if source.adapter is None:
        # A base model that was saved alone has names without its prefix.
        stored_as = stored_names(model, files)
        renamed = {}
        for name in model.state_dict():
            stored_name = stored_as(name)
            if stored_name != name and stored_name in tensors:
                renamed[name] = tensors[stored_name]
        return tensors | renamed

    tensors |= source.adapter.replaced
    base_tensors = {}
    for name in model.state_dict():
        stored_name = base_tensor(name)
        if not is_adapters(name) and stored_name in tensors:
            base_tensors[name] = tensors[stored_name]
    return base_tensors


def tensors_in_files(source: Source, model: nn.Module) -> dict[str, StoredTensor]:
    """Return the locations of all stored tensors of a source.

    For a Transformers folder, the result is that of `tensors_of`. A checkpoint stores tensors in
    parts. In this case the result has the location of every part, with the key `FILE NAME`.
    """
    if source.checkpoint is None:
        return tensors_of(source, model)
    tensors = {}
    for path in sorted(Path(str(source.checkpoint.path)).glob("*.safetensors")):
        for name, tensor in stored_tensors(path).items():
            tensors[f"{path.name} {name}"] = tensor
    return tensors


def tensors_to_stream(
    source: Source | None, model: nn.Module
) -> tuple[dict[str, StoredTensor], str]:
    """Return the locations from which a model's weights are streamed.

    Args:
        source: Source of the weights, or None for a model without weights.
        model: The model, on the meta device.

    Returns:
        (locations by name, reason why streamed layers are first written to new files). The reason
        is empty if streamed layers are read from the source's files.

    Raises:
        InputError: The files belong to another model.
    """
    if source is None:
        return expected_tensors(model), ""
    if source.checkpoint is not None:
        return expected_tensors(model), "the tensors of a checkpoint lie in parts"

    stored = tensors_of(source, model)
    if source.adapter is None:
        # Only for its checks: missing and unknown tensors are errors.
        sources_of(
            model, model.state_dict(keep_vars=True), weight_files(source.folder), source.folder
        )
    for block in _movable_blocks(model):
        for leaf, parameter in streamed_parameters(model, block).items():
            name = f"{block}.{leaf}"
            tensor = stored.get(name)
            if tensor is None:
                raise InputError(
                    f"{name} is not in the folder's files under that name, so its layer cannot be"
                    " streamed; save the model again with save_pretrained"
                )
            if tensor.shape != tuple(parameter.shape):
                raise InputError(
                    f"{tensor.path}: {name} has the shape {list(tensor.shape)}, but the model needs"
                    f" {list(parameter.shape)}; check that the files belong to this model"
                )
            if tensor.dtype != parameter.dtype:
                computed = dtype_name(parameter.dtype)
                saved = dtype_name(tensor.dtype)
                reason = f"they compute in {computed}, and are stored in {saved}"
                return expected_tensors(model), reason
    return stored, ""


@destroying_new_group()
def load_streamed(
    source: Source,
    *,
    budget_bytes: int,
    other_bytes: int,
    host_bytes: int = 0,
    dtype: torch.dtype | None = None,
    scratch: Path | None = None,
) -> tuple[ShardedModel, StreamingPlan]:
    """Load a model in one process, with streamed blocks if it does not fit into the budget.

    If the source's files do not contain the streamed layers in the form that the computation uses
    (see `tensors_to_stream`), these layers are first written to temporary files.

    Args:
        source: Source of the model.
        budget_bytes: See `plan_streaming`.
        other_bytes: See `plan_streaming`.
        host_bytes: See `plan_streaming`.
        dtype: Dtype of the model. None means the dtype that it was saved in.
        scratch: Folder of temporary files. None means the system's.

    Raises:
        InputError: The model cannot be loaded.
    """
    model = source.model(dtype)
    stored, written = tensors_to_stream(source, model)
    planned = plan_streaming(
        model, stored, budget_bytes=budget_bytes, other_bytes=other_bytes, host_bytes=host_bytes
    )
    resolved = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}), world_size=1
    )
    checked = checked_model(model, resolved)
    with ExitStack() as stack:
        if written:
            stored = {}
            if planned.streamed:
                folder = stack.enter_context(scratch_folder(scratch, planned.streamed_bytes))
                stored = write_layers(source, model, planned.streamed, folder)
        # Before `shard`, which would allocate memory for parameters with elements.
        streamed_names = _make_empty(model, planned.streamed)
        mesh, parts, _ = shard(
            checked, weights=on_huge_pages(_resident_filler(source, stored, streamed_names))
        )
        model.requires_grad_(False)
        # The stream opens the temporary files before the folder is removed.
        if planned.streamed:
            stream = WeightStream(
                model, planned.streamed, stored, device=mesh.device, on_host=planned.on_host
            )
            parts = parts.with_hooks(stream)
    sharded = ShardedModel(
        parts, mesh, resolved, forward=default_forward, variable="plait generate"
    )
    return sharded, planned


def plan_streaming(
    model: nn.Module,
    stored: dict[str, StoredTensor],
    *,
    budget_bytes: int,
    other_bytes: int,
    host_bytes: int = 0,
) -> StreamingPlan:
    """Choose the blocks to stream, and those that stay in host memory.

    See Note [Choice of streamed blocks].

    Args:
        model: The model, on the meta device.
        stored: Locations of its weights.
        budget_bytes: Memory budget of the device that computes: of the GPU, or of the CPU.
        other_bytes: Part of the budget for the KV cache and activations.
        host_bytes: Host memory that may be pinned for weights. 0 if the CPU computes.

    Raises:
        InputError: The budget is too small even if all blocks that can be streamed are streamed, or
            the host memory is too small.
    """
    sizes = _movable_blocks(model)
    movable = list(sizes)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if total + other_bytes <= budget_bytes:
        return StreamingPlan((), total, 0, 0)

    slots = _slot_bytes(model, stored, movable, on_cpu=not host_bytes)
    outside = total - sum(sizes.values())
    available = budget_bytes - outside - other_bytes - slots
    if available < 0 or not movable:
        raise BudgetTooSmall(
            f"a budget of {format_bytes(budget_bytes)} is too small: adapters and the weights"
            f" outside the repeated layers need {format_bytes(outside)}, {SLOTS} layers need"
            f" {format_bytes(slots)}, and the KV cache and activations need"
            f" {format_bytes(other_bytes)};"
            f" pass at least {format_bytes_rounded_up(outside + slots + other_bytes)}, or ask for"
            " fewer tokens or prompts at once"
        )

    # Bytes of movable blocks that do not fit, in blocks of the largest size.
    excess = sum(sizes.values()) - available
    count = min(len(movable), max(1, -(-excess // max(sizes.values()))))
    chosen = _spread_evenly(movable, count)
    streamed_bytes = sum(sizes[name] for name in chosen)
    on_host = _blocks_on_host(model, stored, chosen, host_bytes)
    return StreamingPlan(
        chosen,
        total - streamed_bytes,
        slots,
        streamed_bytes,
        on_host,
        streamed_bytes - sum(sizes[name] for name in on_host),
    )


def _spread_evenly(names: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(names[(2 * index + 1) * len(names) // (2 * count)] for index in range(count))


def least_budget(model: nn.Module, stored: dict[str, StoredTensor], *, other_bytes: int) -> int:
    """Return the smallest budget in bytes with which a model can be streamed on the CPU."""
    sizes = _movable_blocks(model)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    slots = _slot_bytes(model, stored, list(sizes), on_cpu=True)
    return total - sum(sizes.values()) + slots + other_bytes


def _movable_blocks(model: nn.Module) -> dict[str, int]:
    """Return the sizes in bytes of the blocks that can be streamed: those without tied weights."""
    tied = first_names(model)
    sizes = {}
    for name in find_blocks(model):
        parameters = streamed_parameters(model, name)
        if not any(f"{name}.{leaf}" in tied for leaf in parameters):
            sizes[name] = sum(p.numel() * p.element_size() for p in parameters.values())
    return sizes


def _slot_bytes(
    model: nn.Module, stored: dict[str, StoredTensor], blocks: Sequence[str], *, on_cpu: bool
) -> int:
    """Return the total size of all slots, which on the CPU includes the buffers for file reads."""
    largest = max((block_bytes(model, name, stored, on_cpu=on_cpu) for name in blocks), default=0)
    buffers = buffer_bytes(largest) if on_cpu else 0
    return min(SLOTS, len(blocks)) * largest + buffers


def _blocks_on_host(
    model: nn.Module, stored: dict[str, StoredTensor], streamed: tuple[str, ...], host_bytes: int
) -> tuple[str, ...]:
    """Return the streamed blocks that are kept in pinned host memory.

    These are all streamed blocks if they fit. Otherwise they are blocks at even intervals, and the
    staging buffers of the remaining blocks take the rest of the memory.

    Raises:
        InputError: Not even the staging buffers fit.
    """
    if not host_bytes:
        return ()
    sizes = [pinned_bytes(block_bytes(model, name, stored, on_cpu=False)) for name in streamed]
    if sum(sizes) <= host_bytes:
        return streamed
    largest = max(sizes)
    # Each slot has a staging buffer of the size of the largest block.
    staging = min(SLOTS, len(sizes)) * largest
    if staging > host_bytes:
        raise InputError(
            f"{format_bytes(host_bytes)} of host memory are too little: {min(SLOTS, len(streamed))}"
            f" layers that are read from files take {format_bytes(staging)}; pass a larger"
            " --cpu-budget"
        )
    return _spread_evenly(streamed, (host_bytes - staging) // largest)


def expected_tensors(model: nn.Module) -> dict[str, StoredTensor]:
    """Return the tensors that the files of a model on the meta device should contain."""
    tensors = {}
    for name, p in model.named_parameters():
        if not is_adapters(name):
            size = p.numel() * p.element_size()
            tensors[name] = StoredTensor(Path(), 0, size, p.dtype, tuple(p.shape))
    return tensors


def _resident_filler(
    source: Source, stored: dict[str, StoredTensor], streamed: frozenset[str]
) -> WeightFiller:
    """Return a function that reads the weights that stay in memory."""

    def fill(
        model: nn.Module, *, unsplit_model: nn.Module, filled: Callable[[torch.Tensor], None]
    ) -> None:
        done = streamed | _read_in_place(model, stored, streamed)
        others = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if name not in done
        }
        for layer in _by_layer(others, find_blocks(unsplit_model)):
            source.fill(layer, unsplit_model=unsplit_model)
            trim_heap()
        for tensor in others.values():
            filled(tensor)

    return fill


def on_huge_pages(fill: WeightFiller) -> WeightFiller:
    """Return a function that moves a model to huge pages and then reads its weights with `fill`.

    Matrix products read weights faster from huge pages.
    """

    def filler(
        model: nn.Module, *, unsplit_model: nn.Module, filled: Callable[[torch.Tensor], None]
    ) -> None:
        move_to_huge_pages(model)
        fill(model, unsplit_model=unsplit_model, filled=filled)

    return filler


def _by_layer(
    tensors: dict[str, torch.Tensor], blocks: Sequence[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each layer together, and tensors outside the layers one by one.

    Tensors that are read together are in memory at the same time.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer = next((block for block in blocks if name.startswith(f"{block}.")), name)
        groups.setdefault(layer, {})[name] = tensor
    yield from groups.values()


def _read_in_place(
    model: nn.Module, stored: dict[str, StoredTensor], streamed: frozenset[str]
) -> frozenset[str]:
    """Read resident tensors directly into their memory, and return their names.

    A read through a mapping of the file would take twice the memory. Tensors on another device, and
    tensors that are stored in another dtype, are left out.
    """
    done = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        location = stored.get(name)
        if location is None or name in streamed or tensor.device.type != "cpu":
            continue
        if location.dtype != tensor.dtype or location.shape != tuple(tensor.shape):
            continue
        if not location.size or not tensor.is_contiguous():
            continue
        memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        file = os.open(location.path, os.O_RDONLY)
        try:
            read_into(file, memoryview(memory.data), location, threading.Event())
        finally:
            os.close(file)
        done.add(name)
    return frozenset(done)


def _make_empty(model: nn.Module, blocks: Sequence[str]) -> frozenset[str]:
    """Replace the parameters of streamed blocks with parameters without elements.

    Returns:
        The full names of the parameters.
    """
    names = []
    for block in blocks:
        for leaf, parameter in streamed_parameters(model, block).items():
            name = f"{block}.{leaf}"
            owner, _, attribute = name.rpartition(".")
            empty = torch.empty(0, dtype=parameter.dtype, device="meta")
            parameters = direct_parameters(model.get_submodule(owner))
            parameters[attribute] = nn.Parameter(empty, requires_grad=False)
            names.append(name)
    return frozenset(names)


def write_layers(
    source: Source, model: nn.Module, blocks: Sequence[str], folder: Path
) -> dict[str, StoredTensor]:
    """Write the weights of some blocks, one file per block.

    Only the weights of one block are in memory at a time.

    Args:
        source: Source of the weights.
        model: The model, on the meta device.
        blocks: Names of the blocks.
        folder: Folder of the new files.

    Returns:
        Locations of the tensors, by their names in the model.

    Raises:
        InputError: A file cannot be written.
    """
    copied = copy.deepcopy(model)
    locations: dict[str, StoredTensor] = {}
    shift = 0
    for number, name in enumerate(blocks):
        block = copied.get_submodule(name)
        block.to_empty(device=torch.device("cpu"))
        parameters = streamed_parameters(copied, name)
        # One at a time: parts of files that are read together are in memory together.
        for leaf, parameter in parameters.items():
            source.fill({f"{name}.{leaf}": parameter.data}, unsplit_model=model)
        written, shift = _save_aligned(
            {f"{name}.{leaf}": p.data.contiguous() for leaf, p in parameters.items()},
            folder / f"{number}.safetensors",
            shift,
        )
        locations |= written
        # The parameters are on the meta device again, so the block's memory is free.
        block.to_empty(device=torch.device("meta"))
        trim_heap()
    return locations


def _save_aligned(
    tensors: dict[str, torch.Tensor], path: Path, shift: int
) -> tuple[dict[str, StoredTensor], int]:
    """Save tensors so that the first one is aligned in the file.

    Direct I/O can then read its bytes to an address that is aligned for computation, see
    `WEIGHT_ALIGNMENT`.

    Args:
        tensors: The tensors, by name.
        path: Path of the new file.
        shift: Padding of the header that is tried first, such as that of the previous file.

    Returns:
        (locations of the tensors, padding of the header in bytes).
    """
    # A header ends at a multiple of 8, so one of two paddings is right.
    for padding in (shift, 8 - shift):
        try:
            save_file(tensors, path, {"header": "." * padding})
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"--scratch {path.parents[1]}: {getattr(error, 'strerror', None) or error}; name a"
                " folder with more free space"
            ) from None
        written = stored_tensors(path)
        if min(tensor.offset for tensor in written.values()) % WEIGHT_ALIGNMENT == 0:
            break
    return written, padding


@contextmanager
def scratch_folder(folder: Path | None, size: int) -> Iterator[Path]:
    """Create a temporary folder that is removed at the end of the context.

    Files that are open at the end can still be read. See Note [Unused scratch folders].

    Args:
        folder: Parent folder. None means the system's folder for temporary files.
        size: Number of free bytes that the folder must have.

    Raises:
        InputError: There is too little free space, the folder cannot be written to, or its file
            system is in memory.
    """
    parent = folder or Path(tempfile.gettempdir())
    try:
        free = shutil.disk_usage(parent).free
        file_system = _file_system(parent)
    except OSError as error:
        raise InputError(
            f"--scratch {parent}: {error.strerror}; name an existing folder on a disk"
        ) from None
    if file_system in _MEMORY_FILE_SYSTEMS:
        raise InputError(
            f"--scratch {parent}: its files are in memory ({file_system}), which the budget"
            " limits; name a folder on a disk"
        )
    if free < size:
        raise InputError(
            f"--scratch {parent}: {format_bytes(free)} are free, but the layers that are streamed"
            f" take {format_bytes(size)}; name a folder with more free space"
        )
    # See Note [Unused scratch folders].
    for other in parent.glob(f"{_PREFIX}*"):
        _remove_if_unused(other)
    try:
        scratch, lock = _create_locked(parent)
    except OSError as error:
        raise InputError(
            f"--scratch {parent}: {error.strerror}; name a folder that can be written to"
        ) from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _create_locked(parent: Path) -> tuple[Path, int]:
    """Create a folder, and return (folder, descriptor that holds its lock)."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        with suppress(OSError):  # without locks, nothing is removed on this file system
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_if_unused(folder: Path) -> None:
    """Remove a folder that no process has locked. See Note [Unused scratch folders]."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it belongs to another user, or has been removed
        return
    with suppress(OSError):  # it is in use, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, or an empty string if it is unknown."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    resolved = folder.resolve()
    mounts = []
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and resolved.is_relative_to(fields[1]):
            mounts.append((len(fields[1]), fields[2]))
    # The longest mount point is the innermost.
    return max(mounts, default=(0, ""))[1]
