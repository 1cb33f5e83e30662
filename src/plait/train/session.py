"""Complete training run of a configuration.

`check` finds mistakes before the processes of a run start, so it needs no process group. `run`
trains in every process. Both print nothing; they notify listeners. `run_warnings` returns warnings
about settings that are valid but probably not intended.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint.folder import find_checkpoint
from plait.checkpoint.places import place_of
from plait.cluster import accelerator
from plait.cluster.small_messages import all_gather_objects
from plait.comm.failures import run_on_all_ranks
from plait.config.resolving.resolve import Resolved, resolve
from plait.config.schema.config import Config
from plait.config.schema.sections import DataSection, ModelSection, RunSection
from plait.data.loader import BatchSource, validation_batches
from plait.data.prepare import PreparedData, prepare
from plait.data.streamed_text import StreamedSequences
from plait.engine import generators
from plait.engine.build import InitializeArguments, build_engine
from plait.engine.engine import Engine
from plait.engine.trackers import Trackers, check_trackers
from plait.errors import ConfigError, InputError, NumbersError, Problem
from plait.events import Event, Listener, RunStarted
from plait.files import require_folder, user_path
from plait.losses.loss import causal_lm_loss
from plait.optim.lr_schedules import build_scheduler
from plait.optim.optimizer import build_optimizer
from plait.parallel.context.families import FAMILIES, WITHOUT_DOCUMENTS
from plait.parallel.order import check_all
from plait.parallel.techniques.pipeline_parallel import PipelinePlan
from plait.sharded.assemble import CheckedModel, checked_model
from plait.train.callbacks import check_callbacks, load_callbacks
from plait.train.language_model import BuiltModel, build_model, check_model
from plait.train.loop import Position, StopRequest, TrainingContext, train
from plait.train.run_folder import RunFolder

_CHECKED_STEPS = 200
"""Number of steps for which the learning-rate schedule is evaluated before the run."""


@dataclass(frozen=True)
class ValidatedRun:
    """Run that can start: its text is tokenised, its model fits, and its folder does not conflict.

    Attributes:
        checked: The model and its resolved configuration, after all checks.
        data: The tokenised text.
        built: The model on the meta device and the facts about it.
        folder: Folder of the run.
        identity: Model, text and seed, which must stay the same when the run is resumed.
        position: Position from which the run continues. It is the start for a new run.
        changes: Settings that differ from the last start, where that is allowed.
    """

    checked: CheckedModel
    data: PreparedData
    built: BuiltModel
    folder: RunFolder
    identity: dict[str, Any]
    position: Position
    changes: list[str]

    @property
    def resolved(self) -> Resolved:
        """Resolved configuration."""
        return self.checked.resolved

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Pipeline schedule and stages, or None without a pipeline."""
        return self.checked.parts.plans.pipeline

    @property
    def section(self) -> RunSection:
        """Section `run` of the configuration."""
        return self.resolved.run

    @property
    def complete(self) -> bool:
        """True if previous runs of the command have completed all steps."""
        return self.position.step >= self.section.steps

    @property
    def parameters(self) -> int:
        """Number of parameters, each tied parameter counted once."""
        return sum(parameter.numel() for parameter in self.built.model.parameters())


def check(
    config: Config, *, world_size: int, cache: Path, say: Callable[[str], None], fresh: bool = False
) -> ValidatedRun:
    """Run all checks of a run that need no processes.

    This prepares the data, which may take a while.

    Args:
        config: The configuration.
        world_size: Number of processes of the run.
        cache: Folder for tokenised text.
        say: Progress callback. Receives a line before each part of the preparation that takes time.
        fresh: Whether to begin at step 0 even if the folder holds a run. The caller sets that run
            aside with `RunFolder.set_aside`.

    Raises:
        ConfigError: A setting cannot work, or the folder holds a run of another model, text or
            seed.
        InputError: A file or folder cannot be used.
    """
    model, data = _require_sections(config)
    # Mistakes that the configuration shows by itself come before the text, which may take minutes
    # to prepare.
    preliminary = resolve(config, world_size=world_size)
    check_all(preliminary.context(device_type=accelerator.available_type()))
    check_model(model)
    prepared = prepare(data, cache=cache, model_tokenizer=model.path, report=say)
    built = build_model(model, prepared.tokenizer, positions=data.sequence_length)
    resolved = resolve(config, world_size=world_size, hidden_size=built.hidden_size)
    if data.packing == "documents":
        _check_packing(built.kind)
    checked = checked_model(built.model, resolved)
    _check_amount_of_text(resolved, data, prepared)
    check_schedule(resolved)
    check_callbacks(resolved.run.callbacks)
    check_trackers(resolved)
    identity = {
        **built.identity,
        **prepared.identity,
        "data.sequence_length": data.sequence_length,
        "data.validation_fraction": data.validation_fraction,
        "optimizer.type": resolved.optimizer.type,
        "run.seed": resolved.seed,
    }

    checkpoints = None
    if resolved.run.checkpoints is not None:
        text = resolved.run.checkpoints
        checkpoints = place_of(
            text if "://" in text else user_path(text, "run.checkpoints"), "run.checkpoints"
        )
    folder = RunFolder(user_path(resolved.run.folder, "run.folder"), checkpoints)
    position = Position()
    changes: list[str] = []
    if not fresh:
        position = folder.position(identity)
        changes = folder.changes(resolved)
    for field, path in _written_folders(resolved):
        require_folder(path, field)
    return ValidatedRun(checked, prepared, built, folder, identity, position, changes)


def _check_amount_of_text(resolved: Resolved, data: DataSection, prepared: PreparedData) -> None:
    """Raise ConfigError if the text has too few sequences for one step."""
    # The length of a stream is not known.
    if isinstance(prepared.train, StreamedSequences):
        return
    batch = resolved.batch.train_batch_size
    available = len(prepared.train)
    if available < batch:
        raise ConfigError(
            Problem(
                "train_batch_size",
                batch,
                f"one step takes {batch} sequences, but the text has only {available}"
                f" sequences of {data.sequence_length} tokens",
                "add more text to data.paths, or lower the batch or data.sequence_length",
            )
        )


def _written_folders(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Yield (configuration key, path) of every folder that the run writes to."""
    yield "run.folder", resolved.run.folder
    if resolved.run.checkpoints is not None and "://" not in resolved.run.checkpoints:
        yield "run.checkpoints", resolved.run.checkpoints
    for field, path in (
        ("zero_optimization.offload_optimizer.nvme_path", resolved.optimizer_offload.path),
        ("zero_optimization.offload_param.nvme_path", resolved.parameter_offload.path),
        ("parallel.activation_offload.path", resolved.activation_offload.path),
    ):
        if path is not None:
            yield field, path


def check_schedule(resolved: Resolved) -> None:
    """Evaluate the first steps of the learning-rate schedule with two small parameters.

    Raises:
        ConfigError: The schedule cannot be created, or a rate is negative or not finite.
    """
    if resolved.scheduler is None:
        return
    spec = resolved.scheduler
    steps = resolved.run.steps
    parameters = {
        "a.weight": nn.Parameter(torch.zeros(2, 2)),
        "a.bias": nn.Parameter(torch.zeros(2)),
    }
    optimizer = build_optimizer(resolved.optimizer, parameters.items())
    with warnings.catch_warnings():
        # torch warns that the schedule steps without its optimizer.
        warnings.simplefilter("ignore")
        schedule = build_scheduler(spec, optimizer, total_steps=steps)
        for step in range(1, min(steps, _CHECKED_STEPS) + 1):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if not all(0 <= rate < math.inf for rate in rates):
                raise ConfigError(
                    Problem(
                        "scheduler.params",
                        spec.params,
                        f"in step {step}, {spec.type} has the learning rate {rates[0]:g}, which"
                        " must be at least 0",
                        "correct its values",
                    )
                )
            try:
                schedule.step()
            except (ValueError, ArithmeticError, TypeError) as error:
                raise ConfigError(
                    Problem(
                        "scheduler.params",
                        spec.params,
                        f"{spec.type} has no learning rate for step {step + 1} ({error})",
                        "correct its values",
                    )
                ) from error


def _require_sections(config: Config) -> tuple[ModelSection, DataSection]:
    """Return the sections `model` and `data`.

    Raises:
        ConfigError: One of them, or `data.source`, is missing.
    """
    problems = []
    rule = "the file does not have it, but plait train needs it"
    if config.model is None:
        example = '"model": {"config": {"model_type": "llama", "hidden_size": 320}}'
        problems.append(Problem("model", None, rule, f"add it, for example {example}"))
    if config.data is None:
        example = '"data": {"source": "files", "paths": ["corpus/*.txt"]}'
        problems.append(Problem("data", None, rule, f"add it, for example {example}"))
    if config.model is None or config.data is None:
        raise ConfigError(*problems)

    if config.data.source is None:
        raise ConfigError(
            Problem(
                "data.source",
                None,
                "the file does not set the source of the text, and plait train needs it",
                'set it to "files", "jsonl" or "datasets" with data.paths, or to "python-stdlib"'
                " to try the configuration",
            )
        )
    return config.model, config.data


def _check_packing(kind: str) -> None:
    """Raise ConfigError for a model whose attention may cross documents in a packed row."""
    tested_kinds = [family for family in FAMILIES if family not in WITHOUT_DOCUMENTS]
    if kind not in tested_kinds:
        raise ConfigError(
            Problem(
                "data.packing",
                "documents",
                f"{kind} has not been tested to keep attention within the documents of a packed"
                " row",
                f"leave it out, or use a model of {', '.join(tested_kinds)}",
            )
        )


def run(checked: ValidatedRun, *, stop: StopRequest, listeners: Sequence[Listener]) -> int:
    """Train from the position of the run. Collective.

    Args:
        checked: Result of `check`.
        stop: Request to stop, which the caller has entered as a context.
        listeners: Receive the events of this rank.

    Returns:
        0 if all steps are done, else the signal that ended the run after a checkpoint, or
        STOP_REQUESTED if a callback ended it.
    """
    resolved = checked.resolved
    section = checked.section
    # The folder caches the measured links. Its path does not affect the run, so it is not a
    # setting of the configuration.
    data_parallel = resolved.data_parallel.model_copy(
        update={"kept_links": str(checked.folder.links)}
    )
    model = checked.checked.with_resolved(
        resolved.model_copy(update={"data_parallel": data_parallel})
    )
    engine = build_engine(
        model,
        InitializeArguments(
            causal_lm_loss, weights=checked.built.weights, total_steps=section.steps
        ),
    )
    # The generators of Python and numpy are also seeded, because the process belongs to this run.
    generators.seed(engine.config.seed, engine.mesh, step=0)
    resources = ExitStack()
    try:
        _claim_folder(checked, engine, resources)
        _check_same_on_all_ranks(checked)
        notes: list[str] = []
        position = checked.position
        batch = resolved.batch.train_batch_size
        loader = checked.data.loader(
            batch, resolved.seed, dp_rank=engine.dp_rank, dp_size=engine.dp_size
        )
        if position.step:
            # Returns an earlier position if the newest checkpoint is damaged.
            position = _load_checkpoint(engine, checked, loader, notes)
        if engine.rank == 0:
            checked.folder.write(resolved, checked.data.tokenizer, checked.built.weights)

        callbacks = load_callbacks(section.callbacks)
        if resolved.trackers:
            listeners = [*listeners, *_start_trackers(engine, resources)]

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)
            for callback in callbacks:
                if callback(event, engine) is True:
                    stop.ask()

        left_out: set[int] = set()
        for remaining in range(section.roll_backs, -1, -1):
            context = _training_context(
                checked, engine, loader, stop, emit, notes, position, left_out
            )
            try:
                return train(context, position)
            except NumbersError as error:
                # Finish the checkpoint in progress, so that all ranks find the same newest one.
                engine.checkpoint_written(wait=True)
                if not remaining or find_checkpoint(checked.folder.checkpoints) is None:
                    raise
                notes = [str(error)]
                position = _load_checkpoint(engine, checked, loader, notes)
                if error.caused_by_batch and error.samples is not None:
                    left_out.add(error.samples)
                notes.append(
                    f"went back to step {position.step}; {remaining - 1} more times before the run"
                    " ends"
                )
        raise AssertionError("the last attempt raises")
    finally:
        with resources:
            engine.close()


def _load_checkpoint(
    engine: Engine, checked: ValidatedRun, loader: BatchSource, notes: list[str]
) -> Position:
    """Load the newest readable checkpoint into engine and loader. Collective."""
    loaded = engine.load_checkpoint(checked.folder.checkpoints, on_note=notes.append)
    # Every rank has found it, see `_check_same_on_all_ranks`.
    assert loaded is not None
    state = loaded[1]
    loader.restore(state.get("loader", {}))
    return Position(state["step"], state["samples"])


def _start_trackers(engine: Engine, resources: ExitStack) -> list[Listener]:
    """Start the trackers on the first rank. Collective.

    Raises:
        InputError: A tracker cannot start. All ranks raise it.
    """
    started: list[Listener] = []

    def start() -> None:
        if engine.rank == 0:
            trackers = Trackers(engine.config)
            resources.callback(trackers.close)
            started.append(trackers)

    run_on_all_ranks(
        start, device=engine.device, activity="starting the trackers", error_class=InputError
    )
    return started


def _claim_folder(checked: ValidatedRun, engine: Engine, resources: ExitStack) -> None:
    """Lock the folder on the first rank. All ranks raise if that fails. Collective."""

    def claim() -> None:
        if engine.rank != 0:
            return
        resources.enter_context(checked.folder.claim())
        if checked.folder.position(checked.identity) != checked.position:
            raise InputError(
                f"{checked.folder.path}: another run has trained in it since this one was checked;"
                " run the command again"
            )

    run_on_all_ranks(claim, device=engine.device, activity="plait train", error_class=InputError)


def _check_same_on_all_ranks(checked: ValidatedRun) -> None:
    """Raise InputError if ranks differ in model, text or position. Collective.

    Machines may have different copies of a file. Without this check the run would silently train on
    unintended inputs.
    """
    identity = {**checked.identity, "position": asdict(checked.position)}
    identities = all_gather_objects(identity)
    for rank, other in enumerate(identities):
        different = [name for name in identity if other.get(name) != identities[0].get(name)]
        if different:
            raise InputError(
                f"rank {rank} differs from rank 0 in {', '.join(different)}: every machine needs"
                " the same text, tokenizer, model and checkpoints; use a shared file system, or"
                " copy them"
            )


def _training_context(
    checked: ValidatedRun,
    engine: Engine,
    loader: BatchSource,
    stop: StopRequest,
    emit: Listener,
    notes: Sequence[str],
    start: Position,
    left_out: Collection[int],
) -> TrainingContext:
    resolved = checked.resolved
    section = checked.section
    return TrainingContext(
        engine=engine,
        section=section,
        loader=loader,
        validation=partial(
            validation_batches,
            checked.data.validation,
            limit=section.validate_sequences,
            micro=resolved.batch.micro_batch_size,
            dp_rank=engine.dp_rank,
            dp_size=engine.dp_size,
        ),
        checkpoints=checked.folder.checkpoints,
        client_state={"identity": checked.identity},
        started=RunStarted(
            first_step=start.step,
            last_step=section.steps,
            world_size=engine.world_size,
            parameters=checked.parameters,
            layout=str(resolved.layout),
            folder=str(checked.folder.path),
            communication=engine.communication,
            notable_communication=engine.hooks.non_default_description,
            resumed=tuple(notes),
        ),
        stop=stop,
        emit=emit,
        left_out=left_out,
    )


WARMUP_PARAMETERS = ("warmup_num_steps", "num_warmup_steps")
"""Names of the warm-up steps in schedulers of DeepSpeed and of Transformers."""


def run_warnings(resolved: Resolved, *, processes: int, cores: int, on_gpus: bool) -> list[str]:
    """Return one line per questionable setting.

    Args:
        resolved: Configuration of the run.
        processes: Number of processes on this machine.
        cores: Number of CPU cores of this machine.
        on_gpus: Whether the processes compute on GPUs.
    """
    lines = []
    steps = resolved.run.steps
    warmup_steps = _warmup_steps(resolved)
    if warmup_steps >= steps:
        assert resolved.scheduler is not None
        lines.append(
            f"scheduler {resolved.scheduler.type} warms up for {warmup_steps:,} steps and the run"
            f" has {steps:,}: its full learning rate is never reached; lower the warm-up below"
            f" {steps:,}, or raise run.steps"
        )

    if not on_gpus and processes > 2 * cores:
        lines.append(
            f"{processes} processes share {cores} cores and no GPU: each step takes about"
            f" {processes / cores:.0f} times as long as with one process per core; lower"
            " --nproc-per-node, or run.processes and the degrees in parallel"
        )
    return lines


def _warmup_steps(resolved: Resolved) -> int:
    if resolved.scheduler is None:
        return 0
    values = [resolved.scheduler.params.get(name) for name in WARMUP_PARAMETERS]
    return max((value for value in values if isinstance(value, int)), default=0)
