"""A whole run from its configuration: what can be wrong is found first (`check`), then the engine
is made and the loop runs (`run`).

`check` needs no process group: the command calls it before it starts any process. `run` is what
every process does. Both print nothing; they notify listeners.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.checkpoint.agreement import together
from plait.checkpoint.folder import find
from plait.checkpoint.places import Place, place_of
from plait.cluster import accelerator
from plait.config.resolving.resolve import Resolved, resolve
from plait.config.schema.config import Config
from plait.config.schema.sections import DataSection, ModelSection, RunSection
from plait.data.loader import Batches, validation_batches
from plait.data.prepare import Prepared, prepare
from plait.data.streamed_loader import StreamedSequences
from plait.engine import generators
from plait.engine.build import Given, begin
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
from plait.parallel.pipeline.pipeline_parallel import PipelineParts
from plait.sharded.check import CheckedModel, checked_model
from plait.train.build import Built, build_model, check_model
from plait.train.callbacks import check_callbacks, load_callbacks
from plait.train.folder import RunFolder
from plait.train.loop import Position, TrainingContext, train
from plait.train.sample import sample
from plait.train.stop import StopRequest


@dataclass(frozen=True)
class ValidatedRun:
    """A run that can begin: its text is tokenised, its model fits, its folder holds nothing that
    contradicts it.
    """

    checked: CheckedModel
    """The model, with what can be refused refused."""
    data: Prepared
    built: Built
    folder: RunFolder
    identity: dict[str, Any]
    position: Position
    """Where the run goes on; 0 for a new one."""
    changes: list[str]
    """Settings that differ from the last start, where that is allowed."""

    @property
    def resolved(self) -> Resolved:
        """The configuration."""
        return self.checked.resolved

    @property
    def pipeline(self) -> PipelineParts | None:
        """Schedule and stages; None without a pipeline."""
        return self.checked.parts.noted(PipelineParts)

    @property
    def section(self) -> RunSection:
        """How the run goes."""
        return self.resolved.run

    @property
    def complete(self) -> bool:
        """Whether all steps were done by earlier runs of the command."""
        return self.position.step >= self.section.steps

    @property
    def parameters(self) -> int:
        """Number of parameters, each tied one counted once."""
        return sum(parameter.numel() for parameter in self.built.model.parameters())


def check(
    config: Config, *, world_size: int, cache: Path, say: Callable[[str], None], fresh: bool = False
) -> ValidatedRun:
    """Everything about a run that can be known before its processes exist. Prepares the data, which
    may take a while; `say` is called before each step.

    fresh: the run begins at step 0, whatever its folder holds; the caller sets that aside with
    `RunFolder.set_aside`. Raises ConfigError or InputError for what cannot run, and for a folder
    that holds a run of another model, text or seed.
    """
    model, data = _sections(config)
    # What the file alone shows comes before the text, which may take minutes to prepare.
    alone = resolve(config, world_size=world_size)
    check_all(alone.context(device_type=accelerator.available_type()))
    check_model(model)
    prepared = prepare(data, cache=cache, own_tokenizer=model.path, say=say)
    built = build_model(
        model, prepared.tokenizer, positions=_positions(data, config.run or RunSection(), prepared)
    )
    resolved = resolve(config, world_size=world_size, hidden_size=built.hidden_size)
    if data.packing == "documents":
        _check_documents(built.kind)
    checked = checked_model(built.model, resolved)
    batch = resolved.batch.train_batch_size
    if not isinstance(prepared.train, StreamedSequences) and (have := len(prepared.train)) < batch:
        rule = (
            f"one step takes {batch} sequences and the text has {have} of {data.sequence_length}"
            " tokens"
        )
        remedy = "name more text in data.paths, or lower the batch or data.sequence_length"
        raise ConfigError(Problem("train_batch_size", batch, rule, remedy))
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
    kept_at = resolved.run.checkpoints
    folder = RunFolder(
        user_path(resolved.run.folder, "run.folder"),
        _place(kept_at) if kept_at is not None else None,
    )
    position, changes = (
        (Position(), []) if fresh else (folder.position(identity), folder.changes(resolved))
    )
    for field, place in _written(resolved):
        require_folder(place, field)
    return ValidatedRun(checked, prepared, built, folder, identity, position, changes)


def _place(text: str) -> Place:
    return place_of(
        text if "://" in text else user_path(text, "run.checkpoints"), "run.checkpoints"
    )


def _written(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """(field, folder) of every folder that the run writes to."""
    yield "run.folder", resolved.run.folder
    if resolved.run.checkpoints is not None and "://" not in resolved.run.checkpoints:
        yield "run.checkpoints", resolved.run.checkpoints
    for field, place in (
        ("zero_optimization.offload_optimizer.nvme_path", resolved.optimizer_offload.path),
        ("zero_optimization.offload_param.nvme_path", resolved.parameter_offload.path),
        ("parallel.activation_offload.path", resolved.activation_offload.path),
    ):
        if place is not None:
            yield field, place


def check_schedule(resolved: Resolved) -> None:
    """Make the schedule of the learning rate for an optimizer of two small parameters, and look at
    its first steps. Raises ConfigError for one that cannot be made, or whose rates are not 0 or
    more.
    """
    if resolved.scheduler is None:
        return
    spec = resolved.scheduler
    steps = resolved.run.steps
    small = {
        name: nn.Parameter(torch.zeros(*shape))
        for name, shape in (("a.weight", (2, 2)), ("a.bias", (2,)))
    }
    optimizer = build_optimizer(resolved.optimizer, small.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a schedule that goes on without its optimizer
        schedule = build_scheduler(spec, optimizer, total_steps=steps)
        for step in range(1, min(steps, _LOOKED_AT) + 1):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if not all(0 <= rate < math.inf for rate in rates):
                rule = (
                    f"{spec.type} makes the learning rate of step {step} {rates[0]:g}, which is not"
                    " 0 or more"
                )
                raise ConfigError(
                    Problem("scheduler.params", spec.params, rule, "correct its values")
                )
            try:
                schedule.step()
            except (ValueError, ArithmeticError, TypeError) as error:
                rule = f"{spec.type} has no learning rate for step {step + 1} ({error})"
                raise ConfigError(
                    Problem("scheduler.params", spec.params, rule, "correct its values")
                ) from error


_LOOKED_AT = 200
"""Steps of a schedule."""


def _sections(config: Config) -> tuple[ModelSection, DataSection]:
    missing = [
        Problem(
            name,
            None,
            "the file does not have it, and plait train needs it",
            f"add it, for example {example}",
        )
        for name, section, example in (
            (
                "model",
                config.model,
                '"model": {"config": {"model_type": "llama", "hidden_size": 320}}',
            ),
            ("data", config.data, '"data": {"source": "files", "paths": ["corpus/*.txt"]}'),
        )
        if section is None
    ]
    if config.model is None or config.data is None:
        raise ConfigError(*missing)
    if config.data.source is None:
        rule = "the file does not say where the text comes from, and plait train needs it"
        remedy = (
            'set it to "files", "jsonl" or "datasets" with data.paths, or to "python-stdlib" to try'
            " the configuration"
        )
        raise ConfigError(Problem("data.source", None, rule, remedy))
    return config.model, config.data


def _check_documents(kind: str) -> None:
    """Raise ConfigError for a model that might let attention pass from one document of a row to
    another.
    """
    known = [family for family in FAMILIES if family not in WITHOUT_DOCUMENTS]
    if kind not in known:
        rule = (
            f"whether {kind} keeps attention within the documents of a row has not been compared"
            " with a row for each"
        )
        raise ConfigError(
            Problem(
                "data.packing",
                "documents",
                rule,
                f"leave it out, or use a model of {', '.join(known)}",
            )
        )


def _positions(data: DataSection, run: RunSection, prepared: Prepared) -> int:
    """The longest sequence that the model will see, in training and in the sample at the end."""
    if run.sample is None:
        return data.sequence_length
    prompt = len(prepared.tokenizer(run.sample.prompt, add_special_tokens=False)["input_ids"])
    if not prompt:
        raise ConfigError(
            Problem(
                "run.sample.prompt",
                run.sample.prompt,
                "the tokenizer makes no token of it",
                "begin with some text",
            )
        )
    return max(data.sequence_length, prompt + run.sample.tokens)


def run(checked: ValidatedRun, *, stop: StopRequest, listeners: Sequence[Listener]) -> int:
    """Train from where the run is, on this process. Collective. `listeners` hear this rank's
    events.

    Returns 0 when all steps are done, else the number of the signal that ended the run after a
    checkpoint, or ASKED where a callback did.
    """
    resolved = checked.resolved
    section = checked.section
    # The folder keeps what was measured of the links; its place does not affect the run, so the
    # configuration does not have it.
    here = resolved.data_parallel.model_copy(update={"kept_links": str(checked.folder.links)})
    made = resolved.model_copy(update={"data_parallel": here})
    ready = checked.checked.with_resolved(made)
    engine = begin(
        ready, Given(causal_lm_loss, weights=checked.built.weights, total_steps=section.steps)
    )
    # Python's and numpy's too: the process is the run's own
    generators.seed(engine.config.seed, engine.mesh, step=0)
    held = ExitStack()
    try:
        together(
            lambda: _claim(checked, held) if engine.rank == 0 else None,
            device=engine.device,
            doing="plait train",
        )
        _same_everywhere(checked)
        notes: list[str] = []
        position = checked.position
        batch = resolved.batch.train_batch_size
        loader = checked.data.loader(
            batch, resolved.seed, dp_rank=engine.dp_rank, dp_size=engine.dp_size
        )
        if position.step:  # of an older checkpoint, where the newest is damaged
            position = _load(engine, checked, loader, notes)
        if engine.rank == 0:
            checked.folder.write(resolved, checked.data.tokenizer, checked.built.weights)

        callbacks = load_callbacks(section.callbacks)
        if resolved.trackers:
            listeners = [*listeners, *_started_trackers(engine, held)]

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)
            for callback in callbacks:
                if callback(event, engine) is True:
                    stop.ask()

        left_out: set[int] = set()
        for left in range(section.roll_backs, -1, -1):
            try:
                return train(
                    _job(checked, engine, loader, stop, emit, notes, position, left_out), position
                )
            except NumbersError as error:
                engine.checkpoint_written(wait=True)  # so that all ranks find the same
                if not left or find(checked.folder.checkpoints) is None:
                    raise
                notes = [str(error)]
                position = _load(engine, checked, loader, notes)
                if error.of_batch and error.samples is not None:
                    left_out.add(error.samples)
                notes.append(
                    f"went back to step {position.step}; {left - 1} more times before the run ends"
                )
        raise AssertionError("the last time raises")
    finally:
        with held:
            engine.close()


def _load(engine: Engine, checked: ValidatedRun, loader: Batches, notes: list[str]) -> Position:
    """The engine and the loader as the newest checkpoint that can be read has them."""
    loaded = engine.load_checkpoint(checked.folder.checkpoints, on_note=notes.append)
    assert loaded is not None  # every rank has found it, see `_same_everywhere`
    loader.restore(loaded[1].get("loader", {}))
    return Position(loaded[1]["step"], loaded[1]["samples"])


def _started_trackers(engine: Engine, held: ExitStack) -> list[Listener]:
    """Start the trackers on the first rank. Where that fails, all ranks raise InputError.
    Collective.
    """
    started: list[Listener] = []

    def start() -> None:
        if engine.rank == 0:
            trackers = Trackers(engine.config)
            held.callback(trackers.close)
            started.append(trackers)

    together(start, device=engine.device, doing="starting the trackers", raising=InputError)
    return started


def _claim(checked: ValidatedRun, held: ExitStack) -> None:
    held.enter_context(checked.folder.claim())
    if checked.folder.position(checked.identity) != checked.position:
        raise InputError(
            f"{checked.folder.path}: another run has trained there since this one was checked; run"
            " the command again"
        )


def _same_everywhere(checked: ValidatedRun) -> None:
    """Machines may hold different copies of a file. Training on would silently train on something
    that no one asked for.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = {**checked.identity, "position": asdict(checked.position)}
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        different = [name for name in mine if other.get(name) != everyone[0].get(name)]
        if different:
            raise InputError(
                f"rank {rank} differs from rank 0 in {', '.join(different)}: every machine needs"
                " the same text, tokenizer, model and checkpoints; use a shared file system, or"
                " copy them"
            )


def _job(
    checked: ValidatedRun,
    engine: Engine,
    loader: Batches,
    stop: StopRequest,
    emit: Listener,
    notes: Sequence[str],
    start: Position,
    left_out: Collection[int],
) -> TrainingContext:
    resolved = checked.resolved
    section = checked.section
    data = checked.data

    def validation() -> Iterator[Mapping[str, torch.Tensor]]:
        return validation_batches(
            data.validation,
            limit=section.validate_sequences,
            micro=resolved.batch.micro_batch_size,
            dp_rank=engine.dp_rank,
            dp_size=engine.dp_size,
        )

    def write() -> str:
        assert section.sample is not None

        return sample(engine, data.tokenizer, section.sample, seed=resolved.seed)

    return TrainingContext(
        engine=engine,
        section=section,
        loader=loader,
        validation=validation,
        sample=write if section.sample is not None else None,
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
            notable_communication=engine.hooks.notable,
            resumed=tuple(notes),
        ),
        stop=stop,
        emit=emit,
        left_out=left_out,
    )
