"""Whether all ranks were given the same model, configuration and versions: asked once, before
anything is sent between them.

Ranks that differ would exchange tensors of other shapes, or the wrong ones of the same shape, and
no collective would detect it. What is compared is what the user built, before it is split, so it is
the same on every rank of every layout; of the optimizer, which is built afterwards, what a pipeline
stage has. Costs one all-gather of a digest; the facts are sent only where digests differ.
"""

from __future__ import annotations

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

from plait._torch.flat_collectives import all_gather_single
from plait._torch.modules import is_persistent
from plait.cluster.fake_group import is_fake
from plait.cluster.mesh import Mesh
from plait.config.resolving.resolve import Resolved
from plait.errors import InputError
from plait.version import __version__

Fact = tuple[str, str]
"""(what, how it is here)."""
_DIGEST_BYTES = 16
_OWN = ("sources", "model", "data", "run", "path", "kept_links")
"""Fields of a configuration that may differ from rank to rank: folders and files, and what a caller
who brings the model does not use.
"""
_LOOKED_AT = 2**20
"""Bytes at the beginning and at the end of a file."""
_SHOWN = 3
"""Different kinds of ranks that a message names."""


def refuse_different_ranks(
    model: nn.Module, resolved: Resolved, mesh: Mesh, *, weights: str | Path | None = None
) -> int:
    """Raise InputError, on all ranks, where `model` (not split yet), `resolved`, the code or the
    files in the folder `weights` differ, with the first difference. Returns the seed of rank 0's
    generator. Collective over all ranks; on a fake group, whose other ranks do not exist, nothing
    is asked.
    """
    facts = [
        *_versions(model),
        *_code(),
        *_settings("", resolved.model_dump()),
        *_model(model),
        *_files(weights),
    ]
    return _compare(facts, mesh, alike_over_stages=True)


def refuse_different_optimizers(
    optimizer: torch.optim.Optimizer, scheduler: Any, mesh: Mesh
) -> None:
    """The same for an optimizer and a schedule that the caller made. Stages of a pipeline may have
    other groups.
    """
    facts = [("the optimizer", type(optimizer).__qualname__)]
    for index, group in enumerate(optimizer.param_groups):
        facts.append((f"optimizer group {index}", f"with {len(group['params'])} parameters"))
        facts += [(f"`{name}` of optimizer group {index}", text) for name, text in _numbers(group)]
    if scheduler is not None:
        facts.append(("the schedule", type(scheduler).__qualname__))
        facts += [
            (f"`{name}` of the schedule", text) for name, text in _numbers(scheduler.state_dict())
        ]
    _compare(facts, mesh, alike_over_stages=False)


def _versions(model: nn.Module) -> Iterator[Fact]:
    yield "plait", __version__
    yield "torch", str(torch.__version__)
    yield "Python", platform.python_version()
    used = any(
        type(module).__module__.partition(".")[0] == "transformers" for module in model.modules()
    )
    if used and "transformers" in sys.modules:
        yield "transformers", str(sys.modules["transformers"].__version__)


@cache
def _code() -> tuple[Fact, ...]:
    """Of Plait, and of the script: machines may hold different copies of one version."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    script = Path(str(getattr(sys.modules.get("__main__"), "__file__", None)))
    facts = [("Plait's source files", digest.hexdigest())]
    if script.is_file():
        facts.append(
            (
                f"the script {script.name}",
                blake2b(script.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest(),
            )
        )
    return tuple(facts)


def _files(folder: str | Path | None) -> Iterator[Fact]:
    """Size, beginning and end of each file of weights: another model's, or another step's, differ
    in their first or last values.
    """
    for path in sorted(Path(folder).glob("*.safetensors")) if folder is not None else ():
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest = blake2b(size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
            for at in (0, max(0, size - _LOOKED_AT)):
                stream.seek(at)
                digest.update(stream.read(_LOOKED_AT))
        yield f"the file of weights {path.name}", digest.hexdigest()


def _settings(path: str, value: Any) -> Iterator[Fact]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if name not in _OWN:
                yield from _settings(f"{path}.{name}" if path else str(name), entry)
    else:
        yield f"setting `{path}`", repr(value)


def _model(model: nn.Module) -> Iterator[Fact]:
    first: dict[int, str] = {}
    for owner, module in model.named_modules():
        yield f"module `{owner}`" if owner else "the model", type(module).__qualname__
        prefix = f"{owner}." if owner else ""
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = prefix + leaf
            tied = first.setdefault(id(parameter), name)
            text = _form(parameter) + ("" if parameter.requires_grad else " frozen")
            yield f"`{name}`", text if tied == name else f"tied to `{tied}`"
        for leaf, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield (
                f"buffer `{prefix}{leaf}`",
                _form(buffer) + ("" if is_persistent(module, leaf) else " not persistent"),
            )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" + (
        " on meta" if tensor.is_meta else ""
    )


def _numbers(values: Mapping[str, Any]) -> Iterator[Fact]:
    """What can be compared: other values may hold addresses."""
    for name, value in values.items():
        shown = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(shown, bool | int | float | str | None) or (
            isinstance(shown, tuple | list)
            and all(isinstance(entry, bool | int | float | str | None) for entry in shown)
        ):
            yield name, repr(shown)


def _compare(facts: Sequence[Fact], mesh: Mesh, *, alike_over_stages: bool) -> int:
    world = mesh.layout.world_size
    seed = torch.initial_seed()
    if world == 1 or is_fake():
        return seed
    digest = blake2b(
        repr(list(facts)).encode(), digest_size=_DIGEST_BYTES
    ).digest() + seed.to_bytes(8, "little")
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(mesh.device)
    everyone = mine.new_empty(world * mine.numel())
    all_gather_single(everyone, mine)
    rows = [bytes(row) for row in everyone.view(world, -1).tolist()]
    stages = [
        0 if alike_over_stages else mesh.layout.coordinates(rank)["pp"] for rank in range(world)
    ]
    for stage in sorted(set(stages)):
        kinds: dict[bytes, list[int]] = {}
        for rank in range(world):
            if stages[rank] == stage:
                kinds.setdefault(rows[rank][:_DIGEST_BYTES], []).append(rank)
        if len(kinds) > 1:
            _name_difference(list(kinds.values()), facts, mesh)
    return int.from_bytes(rows[0][_DIGEST_BYTES:], "little")


def _name_difference(kinds: list[list[int]], facts: Sequence[Fact], mesh: Mesh) -> None:
    """`kinds`: equal ranks, by their lowest. Most ranks are taken to be right."""
    usual, *others = sorted(kinds, key=lambda ranks: (-len(ranks), ranks[0]))
    told = {}
    for ranks in (usual, *others[:_SHOWN]):
        box: list[Any] = [list(facts) if ranks[0] == mesh.rank else None]
        dist.broadcast_object_list(box, src=ranks[0], device=mesh.device)
        told[ranks[0]] = box[0]
    lines = [_difference(told[usual[0]], told[ranks[0]], usual, ranks) for ranks in others[:_SHOWN]]
    more = f"; and {len(others) - _SHOWN} more kinds of ranks" if len(others) > _SHOWN else ""
    raise InputError(
        f"ranks were given different things: {'; '.join(lines)}{more}. Every rank has to build the"
        " same model and optimizer, in the same order, with the same configuration and versions"
    )


def _difference(
    usual: list[Fact], other: list[Fact], usual_ranks: list[int], ranks: list[int]
) -> str:
    """The first, as text."""
    at = next(
        (i for i, pair in enumerate(zip(usual, other, strict=False)) if pair[0] != pair[1]),
        min(len(usual), len(other)),
    )
    (what, there), (own, here) = (
        facts[at] if at < len(facts) else ("nothing more", "") for facts in (usual, other)
    )
    one = _ranks(ranks)
    most = _ranks(usual_ranks)
    has, have = ("has" if len(found) == 1 else "have" for found in (ranks, usual_ranks))
    if what == own:
        return f"{one} {has} {own} {here}, {most} {have} {there}"
    known = {name for name, _ in usual}
    if own in known and what in {name for name, _ in other}:
        return f"{one} {has} {own} where {most} {have} {what}: the order differs"
    return f"{one} {has} {own} {here}".rstrip() + f" where {most} {have} {what} {there}".rstrip()


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
