"""Checks that ranks agree: on their inputs at the start, and on their replicas later.

Ranks with different models, configurations or versions would exchange tensors of different shapes,
or wrong tensors of the same shape, and no collective would detect it. The check of inputs runs
once, before anything else is sent between ranks. It compares the objects that the user built,
before they are split, so they must be equal on every rank of every layout. The optimizer is built
after the split, so it is compared only between the ranks of a pipeline stage. The check costs one
all-gather of a digest; the descriptions of the inputs are sent only if digests differ.

Replicas are computed from the same bits by the same operations, so a difference is a fault of
memory, of a processor, or of code that treats ranks differently. `compare_replicas` compares a sum
over the bits of every parameter and optimizer state. A tensor that is sharded over all mesh
dimensions has no replica and is not compared.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.groups import all_gather_single
from plait._torch.modules import is_persistent
from plait._torch.tensors import local_tensor
from plait.cluster.layout import AXES, EXPERT_AXES, STAGE_AXES
from plait.cluster.mesh import Mesh
from plait.cluster.process_groups import is_fake
from plait.cluster.small_messages import all_gather_bytes, all_gather_objects, max_over_ranks
from plait.comm.hang import format_ranks
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, InputError, NumbersError, Problem
from plait.parallel.parameter_layout import sharded_axes
from plait.sizes import dtype_name
from plait.version import __version__

Fact = tuple[str, str]
"""A subject and its value, both as text for a message."""


_DIGEST_BYTES = 16


_RANK_SPECIFIC = ("sources", "model", "data", "run", "path", "kept_links")
"""Fields of a configuration that may differ between ranks.

They are folders and files, and settings that are not used if the caller builds the model.
"""


_SAMPLED_BYTES = 2**20
"""Number of bytes that are compared at the start and at the end of a file of weights."""


_SHOWN_SETS = 3
"""Largest number of differing sets of ranks that a message describes."""


def refuse_different_ranks(
    model: nn.Module, resolved: Resolved, mesh: Mesh, *, weights: str | Path | None = None
) -> int:
    """If ranks differ, raise InputError with the first difference on all ranks. Collective.

    With a fake process group, whose other ranks do not exist, nothing is compared.

    Args:
        model: The model before it is split.
        resolved: The configuration.
        mesh: Mesh of the ranks.
        weights: Folder of safetensors whose files are compared too.

    Returns:
        The seed of rank 0's default random generator.
    """
    facts = [
        *_version_facts(model),
        *_code_facts(),
        *_setting_facts("", resolved.model_dump()),
        *_model_facts(model),
        *_file_facts(weights),
    ]
    return _compare(facts, mesh, equal_over_stages=True)


def refuse_different_optimizers(
    optimizer: torch.optim.Optimizer, scheduler: Any, mesh: Mesh
) -> None:
    """Raise InputError on all ranks if the caller's optimizer or LR schedule differs. Collective.

    Pipeline stages may have different parameter groups.
    """
    facts = [("the optimizer", type(optimizer).__qualname__)]
    for index, group in enumerate(optimizer.param_groups):
        facts.append((f"optimizer group {index}", f"with {len(group['params'])} parameters"))
        for name, text in _comparable_values(group):
            facts.append((f"`{name}` of optimizer group {index}", text))
    if scheduler is not None:
        facts.append(("the schedule", type(scheduler).__qualname__))
        for name, text in _comparable_values(scheduler.state_dict()):
            facts.append((f"`{name}` of the schedule", text))
    _compare(facts, mesh, equal_over_stages=False)


def _version_facts(model: nn.Module) -> Iterator[Fact]:
    yield "plait", __version__
    yield "torch", str(torch.__version__)
    yield "Python", platform.python_version()
    uses_transformers = any(
        type(module).__module__.partition(".")[0] == "transformers" for module in model.modules()
    )
    if uses_transformers and "transformers" in sys.modules:
        yield "transformers", str(sys.modules["transformers"].__version__)


@cache
def _code_facts() -> tuple[Fact, ...]:
    # Machines may have different copies of the same version.
    digest = blake2b(digest_size=_DIGEST_BYTES)
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    facts = [("Plait's source files", digest.hexdigest())]

    script = Path(str(getattr(sys.modules.get("__main__"), "__file__", None)))
    if script.is_file():
        script_digest = blake2b(script.read_bytes(), digest_size=_DIGEST_BYTES)
        facts.append((f"the script {script.name}", script_digest.hexdigest()))
    return tuple(facts)


def _setting_facts(path: str, value: Any) -> Iterator[Fact]:
    if not isinstance(value, Mapping):
        yield f"setting `{path}`", repr(value)
        return
    for name, entry in value.items():
        if name not in _RANK_SPECIFIC:
            yield from _setting_facts(f"{path}.{name}" if path else str(name), entry)


def _model_facts(model: nn.Module) -> Iterator[Fact]:
    first_names: dict[int, str] = {}
    for owner, module in model.named_modules():
        subject = "the model"
        prefix = ""
        if owner:
            subject = f"module `{owner}`"
            prefix = f"{owner}."
        yield subject, type(module).__qualname__

        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = prefix + leaf
            first_name = first_names.setdefault(id(parameter), name)
            if first_name != name:
                yield f"`{name}`", f"tied to `{first_name}`"
                continue
            suffix = "" if parameter.requires_grad else " frozen"
            yield f"`{name}`", _dtype_and_shape(parameter) + suffix

        for leaf, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            suffix = "" if is_persistent(module, leaf) else " not persistent"
            yield f"buffer `{prefix}{leaf}`", _dtype_and_shape(buffer) + suffix


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    suffix = " on meta" if tensor.is_meta else ""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{suffix}"


def _file_facts(folder: str | Path | None) -> Iterator[Fact]:
    # The size, the start and the end of a file are enough: files of another model, or of another
    # step, differ in their header or in their first or last values.
    if folder is None:
        return
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest = blake2b(size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
            for offset in (0, max(0, size - _SAMPLED_BYTES)):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLED_BYTES))
        yield f"the file of weights {path.name}", digest.hexdigest()


def _comparable_values(values: Mapping[str, Any]) -> Iterator[Fact]:
    # Other values may contain addresses in their representation.
    plain = bool | int | float | str | None
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        entries = value if isinstance(value, tuple | list) else [value]
        if all(isinstance(entry, plain) for entry in entries):
            yield name, repr(value)


def _compare(facts: Sequence[Fact], mesh: Mesh, *, equal_over_stages: bool) -> int:
    """Compare descriptions of inputs between ranks, and return rank 0's seed. Collective."""
    world = mesh.layout.world_size
    seed = torch.initial_seed()
    if world == 1 or is_fake():
        return seed

    # One row per rank: digest of the facts, then the seed, which may differ.
    digest = blake2b(repr(list(facts)).encode(), digest_size=_DIGEST_BYTES).digest()
    rows = all_gather_bytes(digest + seed.to_bytes(8, "little"), mesh.device)

    stages = [0] * world
    if not equal_over_stages:
        stages = [mesh.layout.coordinates(rank)["pp"] for rank in range(world)]
    for stage in sorted(set(stages)):
        ranks_of_digest: dict[bytes, list[int]] = {}
        for rank in range(world):
            if stages[rank] == stage:
                ranks_of_digest.setdefault(rows[rank][:_DIGEST_BYTES], []).append(rank)
        if len(ranks_of_digest) > 1:
            _raise_difference(list(ranks_of_digest.values()), facts, mesh)
    return int.from_bytes(rows[0][_DIGEST_BYTES:], "little")


def _raise_difference(rank_sets: list[list[int]], facts: Sequence[Fact], mesh: Mesh) -> None:
    """Raise the error that names the first differences. Collective.

    Args:
        rank_sets: Sets of ranks with equal facts. The largest set is taken to be right.
        facts: Descriptions of this rank's inputs.
        mesh: Mesh of the ranks.
    """
    usual, *others = sorted(rank_sets, key=lambda ranks: (-len(ranks), ranks[0]))
    facts_of: dict[int, list[Fact]] = {}
    for ranks in (usual, *others[:_SHOWN_SETS]):
        box: list[Any] = [list(facts) if ranks[0] == mesh.rank else None]
        dist.broadcast_object_list(box, src=ranks[0], device=mesh.device)
        facts_of[ranks[0]] = box[0]

    lines = [
        _describe_difference(facts_of[usual[0]], facts_of[ranks[0]], usual, ranks)
        for ranks in others[:_SHOWN_SETS]
    ]
    more = ""
    if len(others) > _SHOWN_SETS:
        more = f"; and {len(others) - _SHOWN_SETS} more sets of ranks"
    raise InputError(
        f"ranks have different inputs: {'; '.join(lines)}{more}. Every rank has to build the"
        " same model and optimizer, in the same order, with the same configuration and versions"
    )


def _describe_difference(
    usual: list[Fact], other: list[Fact], usual_ranks: list[int], ranks: list[int]
) -> str:
    """Return a description of the first fact that differs between two sets of ranks."""
    pairs = itertools.zip_longest(usual, other, fillvalue=("nothing more", ""))
    usual_fact, fact = next(pair for pair in pairs if pair[0] != pair[1])
    usual_subject, usual_value = usual_fact
    subject, value = fact

    others_have = _with_verb(ranks)
    most_have = _with_verb(usual_ranks)
    if subject == usual_subject:
        return f"{others_have} {subject} {value}, {most_have} {usual_value}"

    if subject in dict(usual) and usual_subject in dict(other):
        return f"{others_have} {subject} where {most_have} {usual_subject}: the order differs"
    # A value is empty at the end of the list.
    left = f"{others_have} {subject} {value}".rstrip()
    right = f"{most_have} {usual_subject} {usual_value}".rstrip()
    return f"{left} where {right}"


def _with_verb(ranks: list[int]) -> str:
    verb = "has" if len(ranks) == 1 else "have"
    return f"{format_ranks(ranks)} {verb}"


def refuse_without_replicas(resolved: Resolved) -> None:
    """Raise ConfigError if replicas are to be compared, but the layout has none."""
    layout = resolved.layout
    every = resolved.faults.compare_replicas_every
    if every and layout.dp_replicate == layout.cp == layout.tp == 1:
        raise ConfigError(
            Problem(
                "faults.compare_replicas_every",
                every,
                f"the layout has no replicas to compare: {layout}",
                "use 0, or a layout with dp_replicate, tp or cp",
            )
        )


Difference = tuple[str, str]
"""Name of a tensor, and a description of the ranks that differ."""


def compare_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, *, step: int
) -> None:
    """Compare all replicas of parameters and optimizer states. Collective over all ranks.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        mesh: Mesh of the ranks.
        step: Number of the step, for the error.

    Raises:
        NumbersError: Replicas differ. Raised on all ranks. The error names the first tensor and
            ranks.
    """
    local = _local_differences(model, optimizer, mesh)
    # Usually there is none. One number is cheaper to exchange than Python objects.
    if not max_over_ranks([len(local)], dist.group.WORLD, device=mesh.device)[0]:
        return
    name, description = next(itertools.chain.from_iterable(all_gather_objects(local)))
    error = NumbersError(
        f"step {step}: replicas of {name} differ: {description}. A bit was flipped there (memory,"
        " processor), or code treats ranks differently. Continue from the last checkpoint;"
        " if it happens again, leave that device out"
    )
    error.caused_by_batch = False
    raise error


def _local_differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh
) -> list[Difference]:
    """Return the first difference within each of this rank's groups, one per mesh dimension."""
    tensors = list(_tensors(model, optimizer))
    differences: list[Difference] = []
    for axis in (*AXES, *EXPERT_AXES):
        group = mesh.group(axis)
        if group is None or axis == "pp":
            continue
        replicated = [
            (name, tensor) for name, tensor, axes in tensors if _is_replicated(axes, over=axis)
        ]
        if not replicated:
            continue

        # sums: [tensors]; rows: [ranks, tensors]
        sums = torch.stack([bits_of(tensor) for _, tensor in replicated]).to(mesh.device)
        gathered = sums.new_empty(group.size() * sums.numel())
        all_gather_single(gathered, sums, group=group)
        rows = gathered.view(group.size(), -1).cpu()

        differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        if differing:
            first = differing[0]
            ranks = dist.get_process_group_ranks(group)
            description = _describe_minority(rows[:, first], ranks, axis)
            differences.append((replicated[first][0], description))
    return differences


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
    """Yield (name, local shard, mesh dimensions that shard the tensor) of every tensor."""
    for name, parameter in model.named_parameters():
        axes = sharded_axes(parameter)
        yield f"`{name}`", local_tensor(parameter), axes
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(value, torch.Tensor):
                continue
            # A plain state is shaped like the local shard of its parameter, or is a scalar.
            state_axes = sharded_axes(value)
            if not state_axes and value.numel() > 1:
                state_axes = axes
            yield f"`{key}` of `{name}`", local_tensor(value), state_axes


def _is_replicated(axes: tuple[str, ...], *, over: str) -> bool:
    """Return True if a tensor that is sharded over `axes` has replicas along dimension `over`.

    Experts use a second view of the ranks (EXPERT_AXES), and all other parameters the first.
    """
    other_view = STAGE_AXES if "ep" in axes else EXPERT_AXES
    return over not in axes and over not in other_view


_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for each element size in bytes."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum modulo 2**64 of a tensor's elements, whose bits are read as integers.

    One flipped bit changes the sum. The result is a 0-dimensional int64 tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGER_DTYPES[flat.element_size()]).sum(dtype=torch.int64)


def _describe_minority(sums: torch.Tensor, ranks: list[int], axis: str) -> str:
    """Return a description of the ranks whose sum differs from that of the majority.

    Args:
        sums: Sum of each rank, [ranks].
        ranks: Global rank numbers, in the same order.
        axis: Mesh dimension of the group.
    """
    values = sums.tolist()
    usual = max(set(values), key=values.count)
    usual_count = values.count(usual)
    others = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    if 2 * usual_count <= len(values):
        return f"{format_ranks(ranks)} along {axis}, of which none is the majority"
    return f"{_with_verb(others)} other bits than the {usual_count} others along {axis}"
