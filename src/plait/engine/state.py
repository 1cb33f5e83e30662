"""The contents of a training state, saved to and loaded from a checkpoint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from plait import exact
from plait.checkpoint import model_content, optimizer_content
from plait.checkpoint.agreement import together
from plait.checkpoint.folder import Found, candidates
from plait.checkpoint.load import Reader, Verify, compare_model
from plait.checkpoint.places import Place
from plait.checkpoint.save import SEEN_WITHIN, Snapshot, snapshot
from plait.engine import generators, loader_state
from plait.engine.facts import EngineFacts
from plait.engine.loader_state import StatefulLoader
from plait.engine.resume import Group, Resume, configured_groups, schedule_facts
from plait.errors import CheckpointError, warn
from plait.parallel.data.data_parallel import free_gathered
from plait.sharded.step import Stepper

T = TypeVar("T")
_HOOKS = "hooks."


def snapshot_of(
    engine: EngineFacts,
    folder: Place,
    *,
    tag: str | None,
    client_state: dict[str, Any],
    loader: StatefulLoader | None = None,
) -> Snapshot:
    """Model, optimizer, schedule, loss scale, counters, generators, and where `loader` stands.
    Changes nothing, and copies no tensor. Collective.
    """
    stepper = engine.stepper
    tag = tag or f"step-{engine.global_steps:08d}"

    def here() -> tuple[
        Any,
        dict[str, torch.Tensor],
        optimizer_content.Content,
        Any,
        tuple[dict[str, torch.Tensor], dict[str, Any]],
    ]:
        client = exact.encode(client_state, "client_state")
        position = loader_state.saved(loader)
        content = optimizer_content.content(
            engine.model, stepper.optimizer, configured=_configured(stepper)
        )
        free_gathered(engine.model)
        schedule = schedule_facts(stepper.scheduler, stepper.schedule_source)
        return (
            client,
            position,
            content,
            schedule,
            model_content.content(engine.model, trained=held_by(stepper.optimizer)),
        )

    # What one rank alone cannot keep is told before the others wait for it.
    (client, position, content, schedule, (tensors, values)), _ = together(
        here, device=engine.device, doing=f"checkpoint {folder / tag}"
    )
    metadata = {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "optimizer": optimizer_content.merged(content.record, engine.mesh.group("pp")),
        "scheduler": schedule,
        "loss_scaler": stepper.scaler.state_dict() if stepper.scaler is not None else None,
        "zero_stage": engine.config.data_parallel.stage,
        "client_state": client,
        "loader": loader is not None,
    }
    return snapshot(
        folder,
        tag,
        mesh=engine.mesh,
        tensors=tensors | {f"optimizer.{name}": tensor for name, tensor in content.tensors.items()},
        own={f"{_HOOKS}{name}": tensor for name, tensor in engine.hooks.state().items()}
        | generators.states(engine.device)
        | position,
        values=values,
        metadata=metadata,
    )


def _configured(stepper: Stepper) -> list[Group]:
    """Return the configured values of all groups, and current ones of groups added later."""
    added = configured_groups(stepper.optimizer)[len(stepper.configured) :]
    stepper.configured.extend(added)
    return stepper.configured


def held_by(optimizer: torch.optim.Optimizer) -> set[torch.nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def load_engine(
    engine: EngineFacts,
    folder: Place,
    *,
    tag: str | None,
    verify: Verify,
    on_note: Callable[[str], None] | None = None,
    loader: StatefulLoader | None = None,
) -> tuple[Place, dict[str, Any]] | None:
    """The inverse, on any layout: the checkpoint and its client state; None where there is none.
    `on_note` gets a description of everything that resumes differently from how it was saved;
    without it the first rank issues a warning. On the same layout generators resume their state; on
    another one they are seeded again (`generator_seed`).
    """
    opened = _open(engine, folder, tag, verify)
    if opened is None:
        return None
    reader, notes = opened
    stepper = engine.stepper
    model = engine.model
    mesh = engine.mesh
    free_gathered(model)
    facts = reader.manifest.metadata

    def agreed(work: Callable[[], T]) -> T:
        return together(work, device=mesh.device, doing=f"checkpoint {reader.path}")[0]

    def compare() -> tuple[dict[str, Any], Resume, optimizer_content.Fill, list[dict[str, Any]]]:
        client = exact.decode(facts["client_state"], where="client_state")
        loader_state.refuse_misfit(loader, facts, then=reader.manifest.degrees, now=mesh.layout)
        compare_model(reader, model_shapes)
        record = facts["optimizer"]
        names = optimizer_content.parameter_names(model)
        resume = Resume(
            optimizer=stepper.optimizer,
            configured=_configured(stepper),
            names=[
                [names[p][0] for p in group["params"]] for group in stepper.optimizer.param_groups
            ],
            saved_groups=record["groups"],
            scheduler=stepper.scheduler,
            source=stepper.schedule_source,
            saved_schedule=facts["scheduler"],
            steps=facts["global_steps"] - facts["skipped_steps"],
        )
        groups = resume.groups()
        resume.notes += notes
        resume.notes += _training_changes(
            names,
            [p for group in stepper.optimizer.param_groups for p in group["params"]],
            record["groups"],
        )
        place = stepper.tier.place if stepper.tier is not None else None
        return (
            client,
            resume,
            optimizer_content.allocate(
                model, stepper.optimizer, reader.tensors, record, place=place
            ),
            groups,
        )

    tensors, _ = agreed(lambda: model_content.content(model, trained=held_by(stepper.optimizer)))
    model_shapes = model_content.shapes(tensors, mesh.group("pp"))
    client, resume, fill, groups = agreed(compare)
    agreed(
        lambda: reader.fill(
            tensors | {f"optimizer.{name}": tensor for name, tensor in fill.tensors.items()}
        )
    )
    model_content.put_values(model, reader.values)
    optimizer_content.put(stepper.optimizer, model, fill, facts["optimizer"], groups)
    resume.restore_schedule()
    same_layout = reader.manifest.degrees == mesh.layout.all_degrees
    own = agreed(lambda: reader.own(mesh.rank) if same_layout else {})
    if not generators.restore(engine.device, own):
        generators.seed(engine.config.seed, mesh, step=facts["global_steps"])
        resume.notes.append(
            "generators (dropout) are seeded anew from the seed and the step, because the"
            " checkpoint was written on another layout"
            if not same_layout
            else (
                "generators (dropout) are seeded anew from the seed and the step: the checkpoint"
                " has none for these devices"
            )
        )
    # What a rank keeps belongs to its own gradients: on another layout it starts anew, which costs
    # what one step loses.
    fits = facts["zero_stage"] == engine.config.data_parallel.stage
    saved = {
        name.removeprefix(_HOOKS): tensor for name, tensor in own.items() if name.startswith(_HOOKS)
    }
    for load in engine.hooks.load_state:
        load(saved if fits else {})
    loader_state.restore(loader, own)
    engine.global_steps = facts["global_steps"]
    engine.skipped_steps = facts["skipped_steps"]
    if stepper.scaler is not None and facts["loss_scaler"] is not None:
        stepper.scaler.load_state_dict(facts["loss_scaler"])
    for note in resume.notes:
        if on_note is not None:
            on_note(note)
        elif engine.rank == 0:
            warn(f"{reader.path.name}: {note}")
    return reader.path, client


def _open(
    engine: EngineFacts, folder: Place, tag: str | None, verify: Verify
) -> tuple[Reader, list[str]] | None:
    """The checkpoint to load, which is what was written; with `tag` None the newest that is.
    Collective.
    """
    mesh = engine.mesh
    notes = list[str]()

    def agreed(
        work: Callable[[], T], brings: Callable[[T], bytes] = lambda _: b""
    ) -> tuple[T, list[bytes]]:
        return together(work, brings, device=mesh.device, doing=f"checkpoint {folder}")

    def path_of(found: list[Found]) -> bytes:
        return hashlib.sha256(" ".join(one.path.name for one in found).encode()).digest()

    until = time.monotonic() + SEEN_WITHIN
    found, seen = agreed(lambda: candidates(folder, tag), path_of)
    while len(set(seen)) > 1 and any(
        brought[0]
        for brought in agreed(lambda: None, lambda _: bytes([time.monotonic() < until]))[1]
    ):
        # a file system between machines may show one of them an older list of names
        time.sleep(0.2)
        found, seen = agreed(lambda: candidates(folder, tag), path_of)
    agreed(lambda: _refuse_other_folders(folder, seen))

    def verified(one: Found) -> Reader:
        reader = Reader(one)
        reader.verify(verify, rank=mesh.rank, world=mesh.layout.world_size)
        return reader

    for index, one in enumerate(found):
        try:
            reader, _ = agreed(partial(verified, one))
        except CheckpointError as error:
            if index == len(found) - 1:
                raise
            notes.append(f"{one.path.name} was not loaded, because it is damaged: {error}")
            continue
        return reader, [*found[0].notes, *notes]
    return None


def _refuse_other_folders(folder: Place, seen: list[bytes]) -> None:
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise CheckpointError(
                f"rank {rank} finds other checkpoints in {folder} than rank 0; name a folder that"
                " all machines share"
            )


def _training_changes(
    names: Mapping[torch.nn.Parameter, list[str]],
    trained: Sequence[torch.nn.Parameter],
    groups: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Parameters that are trained only now, or no longer."""
    were = {name for group in groups for name in group["params"]}
    now = set(trained)
    began = [
        aliases[0]
        for parameter, aliases in names.items()
        if parameter in now and not were & set(aliases)
    ]
    ended = [
        aliases[0]
        for parameter, aliases in names.items()
        if parameter not in now and were & set(aliases)
    ]
    verbs = (
        (began, "trained now and were not then: their optimizer states begin anew"),
        (ended, "no longer trained: their states are dropped"),
    )
    return [
        f"{len(found)} parameters, first {found[0]}, are {verb}" for found, verb in verbs if found
    ]
