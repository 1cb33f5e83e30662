"""A whole run from its configuration: what can be wrong is found first (`check`), then the engine is made and the loop runs (`run`).

`check` needs no process group: the command calls it before it starts any process. `run` is what every process does. Both print nothing;
they tell listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.config.resolve import Config, Resolved, resolve
from plait.config.sections import DataSection, ModelSection, RunSection
from plait.data.loader import Loader, validation_batches
from plait.data.prepare import Prepared, prepare
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.engine.loss import causal_lm_loss
from plait.errors import ConfigError, InputError, Problem
from plait.events import Event, Listener, RunStarted
from plait.model.blocks import find_blocks
from plait.parallel.pipeline import PipelineParts
from plait.train.build import Built, build_model, check_model
from plait.train.folder import RunFolder
from plait.train.loop import Job, Position, train
from plait.train.sample import sample
from plait.train.stop import StopRequest


@dataclass(frozen=True)
class Checked:
    """A run that can begin: its text is tokenised, its model fits, its folder holds nothing that contradicts it."""

    resolved: Resolved
    data: Prepared
    built: Built
    pipeline: PipelineParts | None
    """Schedule and stages; None without a pipeline."""
    folder: RunFolder
    identity: dict[str, Any]
    position: Position
    """Where the run goes on; 0 for a new one."""
    changes: list[str]
    """What the file says otherwise than at the last start, and may."""

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


def check(config: Config, *, world_size: int, cache: Path, say: Callable[[str], None], fresh: bool = False) -> Checked:
    """Everything about a run that can be known before its processes exist. Prepares the data, which may take a while: `say` is told.

    fresh: the run begins at step 0, whatever its folder holds; the caller sets that aside with `RunFolder.set_aside`.
    Raises ConfigError or InputError for what cannot run, and for a folder that holds a run of another model, text or seed.
    """
    model, data = _sections(config)
    # What the file alone shows comes before the text, which may take minutes to prepare.
    resolve(config, world_size=world_size)
    check_model(model)
    prepared = prepare(data, cache=cache, own_tokenizer=model.path, say=say)
    built = build_model(model, prepared.tokenizer, positions=_positions(data, config.run or RunSection(), prepared))
    resolved = resolve(config, world_size=world_size, hidden_size=built.hidden_size)
    blocks = find_blocks(built.model, resolved.blocks or None)
    resolved.tensor_parallel.check(built.model, blocks, tp=resolved.layout.tp)
    pipeline = resolved.pipeline_of(built.model, blocks)
    sequence_parallel = resolved.tensor_parallel.sequence_parallel
    resolved.recompute.check(built.model, blocks, compiled=resolved.compile.enabled, sequence_parallel=sequence_parallel)
    batch, have = resolved.batch.train_batch_size, len(prepared.train)
    if have < batch:
        rule = f"one step takes {batch} sequences and the text has {have} of {data.sequence_length} tokens"
        remedy = "name more text in data.paths, or lower the batch or data.sequence_length"
        raise ConfigError(Problem("train_batch_size", batch, rule, remedy))
    identity = {
        **built.identity,
        **prepared.identity,
        "data.sequence_length": data.sequence_length,
        "data.validation_fraction": data.validation_fraction,
        "optimizer.type": resolved.optimizer.type,
        "run.seed": resolved.seed,
    }
    folder = RunFolder(Path(resolved.run.folder))
    if fresh:
        return Checked(resolved, prepared, built, pipeline, folder, identity, Position(), changes=[])
    return Checked(resolved, prepared, built, pipeline, folder, identity, folder.position(identity), folder.changes(resolved))


def _sections(config: Config) -> tuple[ModelSection, DataSection]:
    missing = [
        Problem(name, None, "the file does not say it, and plait train builds the run from it", f"add it, for example {example}")
        for name, section, example in (
            ("model", config.model, '"model": {"config": {"model_type": "llama", "hidden_size": 320}}'),
            ("data", config.data, '"data": {"source": "python-stdlib"}'),
        )
        if section is None
    ]
    if config.model is None or config.data is None:
        raise ConfigError(*missing)
    return config.model, config.data


def _positions(data: DataSection, run: RunSection, prepared: Prepared) -> int:
    """The longest sequence that the model will see, in training and in the sample at the end."""
    if run.sample is None:
        return data.sequence_length
    prompt = len(prepared.tokenizer(run.sample.prompt, add_special_tokens=False)["input_ids"])
    if not prompt:
        raise ConfigError(Problem("run.sample.prompt", run.sample.prompt, "the tokenizer makes no token of it", "begin with some text"))
    return max(data.sequence_length, prompt + run.sample.tokens)


def run(checked: Checked, *, stop: StopRequest, listeners: Sequence[Listener]) -> int:
    """Train from where the run is, on this process. Collective. `listeners` hear this rank's events.

    Returns 0 when all steps are done, else the number of the signal that ended the run after a checkpoint.
    """
    resolved, section = checked.resolved, checked.section
    # The folder keeps what was measured of the links; where that is says nothing about the run, so the configuration does not have it.
    here = resolved.data_parallel.model_copy(update={"kept_links": str(checked.folder.links)})
    made = resolved.model_copy(update={"data_parallel": here})
    engine = initialize(checked.built.model, made, loss_fn=causal_lm_loss, weights=checked.built.weights, total_steps=section.steps)
    try:
        _same_everywhere(checked)
        notes: list[str] = []
        if checked.position.step:
            engine.load_checkpoint(checked.folder.checkpoints, on_note=notes.append)
        if engine.rank == 0:
            checked.folder.write(resolved, checked.data.tokenizer)

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)

        return train(_job(checked, engine, stop, emit, notes), checked.position)
    finally:
        engine.close()


def _same_everywhere(checked: Checked) -> None:
    """Machines may hold different copies of a file. Training on would silently train on something that no one asked for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = {**checked.identity, "position": asdict(checked.position)}
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        different = [name for name in mine if other.get(name) != everyone[0].get(name)]
        if different:
            raise InputError(
                f"rank {rank} differs from rank 0 in {', '.join(different)}: every machine needs the same text, tokenizer, model and "
                "checkpoints; use a shared file system, or copy them"
            )


def _job(checked: Checked, engine: Engine, stop: StopRequest, emit: Listener, notes: Sequence[str]) -> Job:
    resolved, section, data = checked.resolved, checked.section, checked.data

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

        def predict(tokens: torch.Tensor) -> torch.Tensor:
            output = engine.predict({"input_ids": tokens})
            return engine.from_output_stage(None if output is None else output.logits[0, -1])

        with engine.evaluating():
            return sample(predict, data.tokenizer, section.sample, seed=resolved.seed, device=engine.device)

    return Job(
        engine=engine,
        section=section,
        loader=Loader(data.train, resolved.batch.train_batch_size, resolved.seed, engine.dp_rank, engine.dp_size),
        validation=validation,
        sample=write if section.sample is not None else None,
        checkpoints=checked.folder.checkpoints,
        client_state={"identity": checked.identity},
        started=RunStarted(
            first_step=checked.position.step,
            last_step=section.steps,
            world_size=engine.world_size,
            parameters=checked.parameters,
            layout=str(resolved.layout),
            folder=str(checked.folder.path),
            communication=engine.parts.communication,
            resumed=tuple(notes),
        ),
        stop=stop,
        emit=emit,
    )
