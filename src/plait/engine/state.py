"""Training state that is saved to and loaded from a checkpoint.

A checkpoint has the model, the optimizer, the LR schedule, the loss scale, counters, random
generators, the states of step hooks, and the position of the user's data loader. A loader is any
object with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader. Each rank
has its own loader, so the loaders' states fit only the layout on which they were saved.

Note [Errors of one rank]
    Work that may fail on a single rank runs in `run_on_all_ranks`. All ranks then raise the error,
    instead of waiting for the failed rank in the next collective.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from plait import exact
from plait.checkpoint import states
from plait.checkpoint.folder import CheckpointFolder, candidates
from plait.checkpoint.load import Reader, Verify, compare_model
from plait.checkpoint.places import Place
from plait.checkpoint.save import VISIBLE_WITHIN_SECONDS, Snapshot, snapshot
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.comm.failures import run_on_all_ranks
from plait.config.resolving.resolve import Resolved
from plait.engine import generators
from plait.engine.resume import Group, Resume, configured_groups, schedule_facts
from plait.errors import CheckpointError, InputError, warn
from plait.parallel.hooks import Hooks
from plait.parallel.parts import Parts
from plait.parallel.techniques.data_parallel import free_gathered
from plait.sharded.model import ShardedModel
from plait.sharded.step import Stepper

T = TypeVar("T")


_LOADER = "loader"


_HOOKS = "hooks."
"""Prefix of the names of the tensors of step hooks."""


class StatefulLoader(Protocol):
    """A data loader that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: numbers, strings, lists, mappings and small tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""


class EngineFacts:
    """Properties of an engine that are derived from its attributes. Base class of `Engine`.

    Attributes:
        sharded: The model on its layout, with the hooks of its steps.
        config: The resolved configuration.
        stepper: Optimizer step of the model.
        global_steps: Number of steps so far, skipped ones included.
        skipped_steps: Number of steps that were skipped.
    """

    sharded: ShardedModel
    config: Resolved
    stepper: Stepper
    global_steps: int
    skipped_steps: int

    @property
    def parts(self) -> Parts:
        """The model after all techniques were applied, and the techniques' notes."""
        return self.sharded.parts

    @property
    def hooks(self) -> Hooks:
        """Hooks of a step."""
        return self.sharded.hooks

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks."""
        return self.sharded.mesh

    @property
    def model(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self.sharded.model

    module = model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer over this rank's shards."""
        return self.stepper.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """LR scheduler, or None."""
        return self.stepper.scheduler

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.mesh.layout.world_size

    @property
    def dp_rank(self) -> int:
        """Index of the slice of the batch that this rank reads."""
        return self.mesh.dp_index

    @property
    def dp_size(self) -> int:
        """Number of slices of the batch."""
        return self.mesh.layout.dp

    def train_batch_size(self) -> int:
        """Return the number of samples per step over all ranks."""
        return self.config.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per micro-batch on one rank."""
        return self.config.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per step."""
        return self.config.batch.accumulation


def snapshot_of(
    engine: EngineFacts,
    folder: Place,
    *,
    tag: str | None,
    client_state: dict[str, Any],
    loader: StatefulLoader | None = None,
) -> Snapshot:
    """Return the state of an engine for a checkpoint, without copying any tensor. Collective.

    The state contains the model, optimizer, LR schedule, loss scale, counters, random generators,
    and the position of the data loader.

    Args:
        engine: The engine.
        folder: Folder of checkpoints.
        tag: Name of the checkpoint, or None for the default.
        client_state: Plain data of the caller.
        loader: This rank's data loader, or None.

    Raises:
        CheckpointError: Something cannot be saved. It is raised on all ranks.
    """
    stepper = engine.stepper
    tag = tag or f"step-{engine.global_steps:08d}"

    def collect() -> _RankContent:
        client = exact.encode(client_state, "client_state")
        position = _loader_state(loader)
        content = states.optimizer_content(
            engine.model, stepper.optimizer, configured=_configured(stepper)
        )
        # An evaluation may have left parameters gathered. The shards are saved.
        free_gathered(engine.model)
        schedule = schedule_facts(stepper.scheduler, stepper.schedule_source)
        tensors, values = states.model_content(
            engine.model, trained=trained_parameters(stepper.optimizer)
        )
        return _RankContent(client, position, content, schedule, tensors, values)

    # See Note [Errors of one rank].
    local, _ = run_on_all_ranks(
        collect, device=engine.device, activity=f"checkpoint {folder / tag}"
    )
    metadata = {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "optimizer": states.merge_stages(local.optimizer.record, engine.mesh.group("pp")),
        "scheduler": local.schedule,
        "loss_scaler": stepper.scaler.state_dict() if stepper.scaler is not None else None,
        "zero_stage": engine.config.data_parallel.stage,
        "client_state": local.client,
        "loader": loader is not None,
    }
    hook_tensors = {f"{_HOOKS}{name}": tensor for name, tensor in engine.hooks.state().items()}
    return snapshot(
        folder,
        tag,
        mesh=engine.mesh,
        tensors=local.tensors | _optimizer_tensors(local.optimizer.tensors),
        rank_tensors=hook_tensors | generators.states(engine.device) | local.loader,
        values=local.values,
        metadata=metadata,
    )


@dataclass(frozen=True)
class _RankContent:
    """State of one rank for a checkpoint, before the states of all ranks are combined."""

    client: Any
    loader: dict[str, torch.Tensor]
    optimizer: states.OptimizerContent
    schedule: Any
    tensors: dict[str, torch.Tensor]
    """Parameters and buffers of the model."""
    values: dict[str, Any]
    """Extra state of the model that is not tensors."""


def refuse_stateless(loader: Any, call: str) -> None:
    """Raise InputError for a loader that cannot save its position.

    Args:
        loader: The argument of a call.
        call: Name of the call, for the message.
    """
    missing = []
    for name in ("state_dict", "load_state_dict"):
        if not callable(getattr(loader, name, None)):
            missing.append(name)
    if missing:
        raise InputError(
            f"{call}: loader: {type(loader).__name__} has no {missing[0]}, so its position cannot"
            " be saved; use torchdata's StatefulDataLoader, or leave `loader` out"
        )


def _loader_state(loader: StatefulLoader | None) -> dict[str, torch.Tensor]:
    """Return the state of this rank's loader as a tensor: uint8, [bytes]. Empty without a loader.

    Raises:
        CheckpointError: The state is not plain data.
    """
    if loader is None:
        return {}
    text = json.dumps(exact.encode(loader.state_dict(), "loader.state_dict()"))
    return {_LOADER: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _configured(stepper: Stepper) -> list[Group]:
    """Return the configured values of all groups.

    For a group that was added later, these are the values that it has now.
    """
    stepper.configured.extend(configured_groups(stepper.optimizer)[len(stepper.configured) :])
    return stepper.configured


def trained_parameters(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _optimizer_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"optimizer.{name}": tensor for name, tensor in tensors.items()}


def load_engine(
    engine: EngineFacts,
    folder: Place,
    *,
    tag: str | None,
    verify: Verify,
    on_note: Callable[[str], None] | None = None,
    loader: StatefulLoader | None = None,
) -> tuple[Place, dict[str, Any]] | None:
    """Load a checkpoint into an engine, on any layout. Collective.

    If the layout is that of the checkpoint, generators resume their saved states. Otherwise they
    are seeded again (`generator_seed`).

    Args:
        engine: The engine.
        folder: Folder of checkpoints.
        tag: Name of the checkpoint. None: the newest one that is not damaged.
        verify: How much of the checkpoint is compared with its hashes.
        on_note: Called on every rank with a description of each difference between the saved and
            the resumed state. Without it the first rank warns.
        loader: This rank's data loader, or None.

    Returns:
        The path of the checkpoint and its client state, or None if there is no checkpoint.

    Raises:
        CheckpointError: The checkpoint does not fit the engine, or is damaged.
    """
    opened = open_checkpoint(engine, folder, tag, verify)
    if opened is None:
        return None
    reader, notes = opened
    stepper = engine.stepper
    model = engine.model
    mesh = engine.mesh
    free_gathered(model)
    facts = reader.manifest.metadata

    def agreed(work: Callable[[], T]) -> T:
        # See Note [Errors of one rank].
        return run_on_all_ranks(work, device=mesh.device, activity=f"checkpoint {reader.path}")[0]

    trained = trained_parameters(stepper.optimizer)
    tensors, _ = agreed(lambda: states.model_content(model, trained=trained))
    shapes = states.model_shapes(tensors, mesh.group("pp"))
    comparison = agreed(lambda: _compare(engine, reader, shapes, loader))
    resume = comparison.resume
    resume.notes += notes

    agreed(lambda: reader.fill(tensors | _optimizer_tensors(comparison.fill.tensors)))
    states.put_values(model, reader.values)
    states.load_states(
        stepper.optimizer, model, comparison.fill, facts["optimizer"], comparison.groups
    )
    resume.restore_schedule()
    resume.notes += _training_changes(
        states.parameter_names(model), trained, facts["optimizer"]["groups"]
    )

    # Each rank has its own generators, so their states fit the same layout only.
    same_layout = reader.manifest.degrees == mesh.layout.all_degrees
    rank_state = agreed(lambda: reader.rank_tensors(mesh.rank) if same_layout else {})
    if not generators.restore(engine.device, rank_state):
        generators.seed(engine.config.seed, mesh, step=facts["global_steps"])
        reason = ", because the checkpoint was written on another layout"
        if same_layout:
            reason = ": the checkpoint has none for these devices"
        resume.notes.append(f"generators (dropout) are reseeded from the seed and the step{reason}")
    _load_hooks(engine, rank_state, zero_stage=facts["zero_stage"])
    _restore_loader(loader, rank_state)
    engine.global_steps = facts["global_steps"]
    engine.skipped_steps = facts["skipped_steps"]
    if stepper.scaler is not None and facts["loss_scaler"] is not None:
        stepper.scaler.load_state_dict(facts["loss_scaler"])

    for note in resume.notes:
        if on_note is not None:
            on_note(note)
        elif engine.rank == 0:
            warn(f"{reader.path.name}: {note}")
    return reader.path, comparison.client


def open_checkpoint(
    engine: EngineFacts, folder: Place, tag: str | None, verify: Verify
) -> tuple[Reader, list[str]] | None:
    """Open a checkpoint and verify it. Collective.

    If `tag` is None, open the newest checkpoint that is not damaged.

    Returns:
        The reader, and descriptions of the damaged checkpoints that were skipped.
    """
    mesh = engine.mesh
    notes = list[str]()

    def agreed(
        work: Callable[[], T], encode_result: Callable[[T], bytes] = lambda _: b""
    ) -> tuple[T, list[bytes]]:
        # See Note [Errors of one rank].
        return run_on_all_ranks(
            work, encode_result, device=mesh.device, activity=f"checkpoint {folder}"
        )

    def names_digest(checkpoints: list[CheckpointFolder]) -> bytes:
        names = [checkpoint.path.name for checkpoint in checkpoints]
        return hashlib.sha256(" ".join(names).encode()).digest()

    # A file system between machines may show an older list of names to one of them for a while.
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    checkpoints, digests = agreed(lambda: candidates(folder, tag), names_digest)
    while len(set(digests)) > 1:
        # Clocks differ between machines, and all ranks must stop together.
        _, has_time = agreed(lambda: None, lambda _: bytes([time.monotonic() < deadline]))
        if not any(flag[0] for flag in has_time):
            break
        time.sleep(0.2)
        checkpoints, digests = agreed(lambda: candidates(folder, tag), names_digest)
    agreed(lambda: _refuse_other_folders(folder, digests))

    def verified(checkpoint: CheckpointFolder) -> Reader:
        reader = Reader(checkpoint)
        reader.verify(verify, rank=mesh.rank, world=mesh.layout.world_size)
        return reader

    for index, checkpoint in enumerate(checkpoints):
        try:
            reader, _ = agreed(partial(verified, checkpoint))
        except CheckpointError as error:
            if index == len(checkpoints) - 1:
                raise
            notes.append(f"{checkpoint.path.name} was not loaded, because it is damaged: {error}")
            continue
        return reader, [*checkpoints[0].notes, *notes]
    return None


def _refuse_other_folders(folder: Place, digests: list[bytes]) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"rank {rank} and rank 0 find different checkpoints in {folder}; name a folder that"
                " all machines share"
            )


@dataclass(frozen=True)
class _Comparison:
    """Result of comparing a checkpoint with an engine, before anything is changed."""

    client: dict[str, Any]
    resume: Resume
    groups: list[Group]
    """Values for the optimizer's parameter groups."""
    fill: states.Fill
    """Allocated optimizer states."""


def _compare(
    engine: EngineFacts,
    reader: Reader,
    shapes: Mapping[str, tuple[int, ...]],
    loader: StatefulLoader | None,
) -> _Comparison:
    """Compare a checkpoint with an engine, and allocate the optimizer's states.

    Raises:
        CheckpointError: The checkpoint does not fit the engine.
    """
    stepper = engine.stepper
    facts = reader.manifest.metadata
    record = facts["optimizer"]
    client = exact.decode(facts["client_state"], where="client_state")
    if loader is not None:
        _refuse_unfit_loader(reader, engine.mesh.layout)
    compare_model(reader, shapes)

    names = states.parameter_names(engine.model)
    resume = Resume(
        optimizer=stepper.optimizer,
        configured=_configured(stepper),
        names=[_first_names(group, names) for group in stepper.optimizer.param_groups],
        saved_groups=record["groups"],
        scheduler=stepper.scheduler,
        source=stepper.schedule_source,
        saved_schedule=facts["scheduler"],
        steps=facts["global_steps"] - facts["skipped_steps"],
    )
    groups = resume.groups()
    resume.refuse_other_kinds(groups, str(reader.path))
    place = stepper.tier.place if stepper.tier is not None else None
    fill = states.allocate(engine.model, stepper.optimizer, reader.tensors, record, place=place)
    states.refuse_other_kinds(
        engine.model, stepper.optimizer, reader.tensors, record, str(reader.path)
    )
    return _Comparison(client, resume, groups, fill)


def _refuse_unfit_loader(reader: Reader, layout: Layout) -> None:
    """Raise CheckpointError if a checkpoint has no state for this rank's loader."""
    if not reader.manifest.metadata.get(_LOADER):
        raise CheckpointError(
            "load_checkpoint(loader=...): the checkpoint was saved without a loader; leave"
            " `loader` out"
        )
    saved_degrees = reader.manifest.degrees
    if dict(saved_degrees) != layout.all_degrees:
        different = ", ".join(
            f"{axis} {saved_degrees.get(axis, 1)} -> {degree}"
            for axis, degree in layout.all_degrees.items()
            if saved_degrees.get(axis, 1) != degree
        )
        raise CheckpointError(
            "load_checkpoint(loader=...): the checkpoint has the position of one loader per rank,"
            f" but the layout has changed ({different}), so samples would be left out or repeated;"
            " use the same layout, or leave `loader` out and start the epoch again"
        )


def _first_names(group: Mapping[str, Any], names: Mapping[nn.Parameter, list[str]]) -> list[str]:
    return [names[parameter][0] for parameter in group["params"]]


def _training_changes(
    names: Mapping[nn.Parameter, list[str]],
    trained: set[nn.Parameter],
    groups: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Describe which parameters are newly trained and which are no longer trained.

    Args:
        names: Names of every parameter of the model, several for tied ones.
        trained: Parameters that the optimizer updates.
        groups: Parameter groups of the checkpoint.
    """
    saved_names = {name for group in groups for name in group["params"]}
    added = []
    removed = []
    for parameter, aliases in names.items():
        was_trained = bool(saved_names & set(aliases))
        if parameter in trained and not was_trained:
            added.append(aliases[0])
        if parameter not in trained and was_trained:
            removed.append(aliases[0])

    notes = []
    if added:
        notes.append(
            f"{len(added)} parameters, first {added[0]}, are trained now and were not when the"
            " checkpoint was written: their optimizer states start empty"
        )
    if removed:
        notes.append(
            f"{len(removed)} parameters, first {removed[0]}, are no longer trained: their states"
            " are dropped"
        )
    return notes


def _load_hooks(
    engine: EngineFacts, rank_state: Mapping[str, torch.Tensor], *, zero_stage: int
) -> None:
    """Restore the states of step hooks.

    A state (such as a residual of compressed gradients) belongs to the gradients that this rank
    had. On another layout or ZeRO stage, hooks start from their initial state. At most the state of
    one step is lost.
    """
    saved: dict[str, torch.Tensor] = {}
    if zero_stage == engine.config.data_parallel.stage:
        for name, tensor in rank_state.items():
            if name.startswith(_HOOKS):
                saved[name.removeprefix(_HOOKS)] = tensor
    for load in engine.hooks.load_state:
        load(saved)


def _restore_loader(loader: StatefulLoader | None, rank_state: Mapping[str, torch.Tensor]) -> None:
    if loader is not None:
        text = bytes(rank_state[_LOADER].cpu().tolist())
        loader.load_state_dict(exact.decode(json.loads(text), where="loader"))
