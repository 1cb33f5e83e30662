"""What a training state is made of, and its way to and from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plait.checkpoint import distributed
from plait.cluster.mesh import Mesh
from plait.parallel import compression
from plait.parallel.data import free_gathered

if TYPE_CHECKING:
    from plait.engine.engine import Engine


def save_engine(engine: Engine, folder: Path, *, tag: str | None, client_state: dict[str, Any]) -> Path:
    """Model, optimizer, schedule, loss scale, counters, generators."""
    stepper = engine.stepper
    facts = {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "scheduler": stepper.scheduler.state_dict() if stepper.scheduler is not None else None,
        "loss_scaler": stepper.scaler.state_dict() if stepper.scaler is not None else None,
        "layout": engine.mesh.layout.degrees,
        "zero_stage": engine.parts.stage,
        "client_state": client_state,
    }
    free_gathered(engine.model)
    return distributed.save(
        folder,
        tag or f"step-{engine.global_steps:08d}",
        model=engine.model,
        optimizer=stepper.optimizer,
        random=_random_states(engine),
        facts=facts,
        private=compression.states(engine.parts),
    )


def load_engine(engine: Engine, folder: Path, *, tag: str | None) -> tuple[Path, dict[str, Any]] | None:
    """The inverse, on any layout. Generators are restored only where this rank existed when it was saved; else they are seeded anew from
    the configuration, the step and the rank."""
    found = distributed.find(folder, tag)
    if found is None:
        return None
    stepper = engine.stepper
    free_gathered(engine.model)
    random = _random_states(engine)
    facts = distributed.read_facts(found)
    if distributed.load(found, model=engine.model, optimizer=stepper.optimizer, random=random):
        _restore_random(engine, random)
    else:
        torch.manual_seed(dropout_seed(engine.config.seed, engine.mesh, step=facts["global_steps"]))
    saved = distributed.load_private(found)
    # Errors belong to a rank's own gradients: on another layout they start anew, which costs what one step loses.
    if saved and facts["layout"] == engine.mesh.layout.degrees and facts["zero_stage"] == engine.parts.stage:
        compression.restore(engine.parts, saved)
    engine.global_steps = facts["global_steps"]
    engine.skipped_steps = facts["skipped_steps"]
    if stepper.scheduler is not None and facts["scheduler"] is not None:
        stepper.scheduler.load_state_dict(facts["scheduler"])
    if stepper.scaler is not None and facts["loss_scaler"] is not None:
        stepper.scaler.load_state_dict(facts["loss_scaler"])
    return found, facts["client_state"]


def dropout_seed(seed: int, mesh: Mesh, *, step: int = 0) -> int:
    """The seed of this rank's generators: different where activations are, over data-parallel ranks and pipeline stages, equal over tp."""
    return seed + 1_000_003 * (mesh.dp_index + 1) + 7_919_000_003 * mesh.coordinates["pp"] + step


def _random_states(engine: Engine) -> dict[str, torch.Tensor]:
    states = {f"cpu.{engine.rank}": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states[f"cuda.{engine.rank}"] = torch.cuda.get_rng_state(engine.device)
    return states


def _restore_random(engine: Engine, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states[f"cpu.{engine.rank}"])
    if engine.device.type == "cuda":
        torch.cuda.set_rng_state(states[f"cuda.{engine.rank}"], engine.device)
