"""The contents of a training state, saved to and loaded from a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plait import exact
from plait.checkpoint import distributed, optimizer_content
from plait.cluster.mesh import Mesh
from plait.engine.facts import EngineFacts
from plait.engine.resume import Resume, schedule_facts
from plait.errors import warn
from plait.parallel.data.data_parallel import free_gathered


def save_engine(engine: EngineFacts, folder: Path, *, tag: str | None, client_state: dict[str, Any]) -> Path:
    """Model, optimizer, schedule, loss scale, counters, generators. Changes nothing."""
    stepper = engine.stepper
    client = exact.encode(client_state, "client_state")
    content = optimizer_content.content(engine.model, stepper.optimizer, configured=stepper.configured)
    facts = {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "optimizer": optimizer_content.merged(content.record, engine.mesh.group("pp")),
        "scheduler": schedule_facts(stepper.scheduler, stepper.schedule_source),
        "loss_scaler": stepper.scaler.state_dict() if stepper.scaler is not None else None,
        "layout": engine.mesh.layout.degrees,
        "zero_stage": engine.config.data_parallel.stage,
        "client_state": client,
    }
    free_gathered(engine.model)
    return distributed.save(
        folder,
        tag or f"step-{engine.global_steps:08d}",
        model=engine.model,
        optimizer=content.tensors,
        random=_random_states(engine),
        metadata=facts,
        per_rank_state=engine.hooks.state(),
    )


def load_engine(
    engine: EngineFacts, folder: Path, *, tag: str | None, on_note: Callable[[str], None] | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The inverse, on any layout: the checkpoint and its client state; None where there is none. `on_note` gets a description of everything
    that resumes differently from how it was saved; without it the first rank issues a warning. On the same layout generators resume their
    state; on another one they are seeded again (`generator_seed`)."""
    found = distributed.find(folder, tag)
    if found is None:
        return None
    stepper, model, mesh = engine.stepper, engine.model, engine.mesh
    free_gathered(model)
    facts, stored = distributed.read_metadata_file(found), distributed.read_stored(found)
    client = exact.decode(facts["client_state"], where="client_state")
    distributed.check(found, stored, model=model, group=mesh.group("pp"))
    record = facts["optimizer"]
    names = optimizer_content.parameter_names(model)
    resume = Resume(
        optimizer=stepper.optimizer,
        configured=stepper.configured,
        names=[[names[p][0] for p in group["params"]] for group in stepper.optimizer.param_groups],
        saved_groups=record["groups"],
        scheduler=stepper.scheduler,
        source=stepper.schedule_source,
        saved_schedule=facts["scheduler"],
        steps=facts["global_steps"] - facts["skipped_steps"],
    )
    groups = resume.groups()
    resume.notes += _training_changes(names, [p for group in stepper.optimizer.param_groups for p in group["params"]], record["groups"])
    place = stepper.tier.place if stepper.tier is not None else None
    fill = optimizer_content.allocate(model, stepper.optimizer, stored, record, place=place)
    same_layout = facts["layout"] == mesh.layout.degrees
    random = _random_states(engine)
    goes_on = same_layout and all(f"random.{key}" in stored for key in random)
    distributed.load(found, model=model, optimizer=fill.tensors, random=random if goes_on else {})
    optimizer_content.put(stepper.optimizer, model, fill, record, groups)
    resume.restore_schedule()
    if goes_on:
        _restore_random(engine, random)
    else:
        torch.manual_seed(generator_seed(engine.config.seed, mesh, step=facts["global_steps"]))
        resume.notes.append(
            "generators (dropout) are seeded anew from the seed and the step, because the checkpoint was written on another layout"
            if not same_layout
            else "generators (dropout) are seeded anew from the seed and the step: the checkpoint has none for these devices"
        )
    saved = distributed.load_per_rank_state(found)
    # What a rank keeps belongs to its own gradients: on another layout it starts anew, which costs what one step loses.
    fits = same_layout and facts["zero_stage"] == engine.config.data_parallel.stage
    for load in engine.hooks.load_state:
        load(saved if fits else {})
    engine.global_steps = facts["global_steps"]
    engine.skipped_steps = facts["skipped_steps"]
    if stepper.scaler is not None and facts["loss_scaler"] is not None:
        stepper.scaler.load_state_dict(facts["loss_scaler"])
    for note in resume.notes:
        if on_note is not None:
            on_note(note)
        elif engine.rank == 0:
            warn(f"{found.name}: {note}")
    return found, client


def _training_changes(
    names: Mapping[torch.nn.Parameter, list[str]], trained: Sequence[torch.nn.Parameter], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Parameters that are trained only now, or no longer."""
    were, now = {name for group in groups for name in group["params"]}, set(trained)
    began = [aliases[0] for parameter, aliases in names.items() if parameter in now and not were & set(aliases)]
    ended = [aliases[0] for parameter, aliases in names.items() if parameter not in now and were & set(aliases)]
    verbs = (
        (began, "trained now and were not then: their optimizer states begin anew"),
        (ended, "no longer trained: their states are dropped"),
    )
    return [f"{len(found)} parameters, first {found[0]}, are {verb}" for found, verb in verbs if found]


def generator_seed(seed: int, mesh: Mesh, *, step: int = 0) -> int:
    """The seed of this rank's generators at a step: another one wherever activations are others (data-parallel ranks, slices of sequences,
    pipeline stages), the same over tp, where they are replicated. It follows from the layout alone."""
    at = mesh.coordinates
    words = f"{seed} {step} {mesh.dp_index} {at['cp']} {at['pp']}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()[:8], "little") >> 1


def _random_states(engine: EngineFacts) -> dict[str, torch.Tensor]:
    states = {f"cpu.{engine.rank}": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states[f"cuda.{engine.rank}"] = torch.cuda.get_rng_state(engine.device)
    return states


def _restore_random(engine: EngineFacts, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states[f"cpu.{engine.rank}"])
    if engine.device.type == "cuda":
        torch.cuda.set_rng_state(states[f"cuda.{engine.rank}"], engine.device)
