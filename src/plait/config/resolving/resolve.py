"""From a file to what runs: `load` reads and checks it, `resolve` ends every "auto" and fills in
what was left out.

Pure: no process group, no environment, no look at the machine; the number of processes is an
argument. What is resolved says of every value where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny
from torch import nn

from plait.cluster.layout import Layout
from plait.cluster.nccl import Library
from plait.config.dialects.examine import Examined, examine
from plait.config.dialects.foreign import refuse_flags, refuse_foreign
from plait.config.reading.source import Document, Source, parse_override, read
from plait.config.resolving import resolved_parts, techniques
from plait.config.resolving.batch import Batch
from plait.config.resolving.validation import validate
from plait.config.schema.config import Config
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.sections import DataSection, FaultsSection, ModelSection, RunSection
from plait.config.schema.trackers import TrackerSpec
from plait.errors import ConfigError, Problem, refuse
from plait.parallel.activations.activation_offload import ActivationOffload
from plait.parallel.activations.recompute import Recompute
from plait.parallel.compile import Compile
from plait.parallel.context.context_parallel import ContextParallel
from plait.parallel.data.compression import Compression
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.experts.expert_parallel import ExpertParallel
from plait.parallel.experts.routing import Routing
from plait.parallel.offload.optimizer_offload import OptimizerOffload
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.order import in_order
from plait.parallel.pipeline.pipeline_parallel import Pipeline
from plait.parallel.precision.mixed_precision import Precision
from plait.parallel.technique import Context, Technique
from plait.parallel.tensor.tensor_parallel import TensorParallel
from plait.parallel.tiles.tiled_mlp import TiledMLP
from plait.policy import Policy


class Resolved(Policy):
    """A configuration with nothing left open: no "auto", and None only where a field says what it
    means.
    """

    layout: Layout
    """Degrees of the parallel axes and the placement of ranks."""
    batch: Batch
    """How many samples, where."""
    tensor_parallel: TensorParallel
    """How layers are split over the tp axis."""
    context_parallel: ContextParallel
    """How sequences are cut over the cp axis."""
    expert_parallel: ExpertParallel = ExpertParallel()
    """How experts are split over the ep axis."""
    routing: Routing
    """How routers of experts are kept in balance."""
    pipeline: Pipeline
    """How the pp axis is used."""
    data_parallel: DataParallel
    """ZeRO stage, and how gradients are reduced."""
    compression: Compression
    """What is smaller on the way between data-parallel ranks."""
    precision: Precision
    """The dtypes of computation and reduction; None is the parameters' own."""
    compile: Compile
    """torch.compile."""
    recompute: Recompute
    """Which blocks recompute what."""
    tiled_mlp: TiledMLP = TiledMLP()
    """How many tokens of an MLP are computed at the same time."""
    activation_offload: ActivationOffload
    """Where blocks put what they save for backward."""
    optimizer_offload: OptimizerOffload
    """Where optimizer states and gradients live."""
    parameter_offload: ParameterOffload
    """Where the shards of parameters live."""
    library: Library = Library()
    """Settings of the GPUs' own library of collectives."""
    faults: FaultsSection = FaultsSection()
    """How long ranks wait, and what is checked in every step."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits exist at the same time; 0 is all."""
    added: tuple[SerializeAsAny[Technique], ...] = ()
    """Techniques that the caller brings, besides those of the file."""
    blocks: tuple[str, ...] = ()
    """Names or patterns of the repeated blocks; empty: found in the model."""
    gradient_clipping: float
    """The largest norm of all gradients together; 0 does not clip."""
    optimizer: OptimizerSpec
    """The optimizer."""
    scheduler: SchedulerSpec | None
    """The schedule of the learning rate; None is constant."""
    seed: int
    """Initial weights, the order of the data and dropout follow from it."""
    model: ModelSection | None
    """The model to build; None where the caller brings it."""
    data: DataSection | None
    """The text to read; None where the caller brings the batches."""
    run: RunSection
    """How long the run is, and what it writes."""
    trackers: tuple[TrackerSpec, ...] = ()
    """Trackers that are enabled, with all of their settings."""
    sources: Mapping[str, str]
    """Where each value came from: "file", "override", "default", "auto: ...", "derived: ...". By
    the name in the file, else by the path in this class.
    """

    def tracker_setting(self, spec: TrackerSpec) -> str:
        """Return the setting that enables a tracker."""
        in_run = any(entry.name == spec.name for entry in self.run.trackers)
        return "run.trackers" if in_run else f"{spec.name}.enabled"

    def assumed(self) -> str | None:
        """One sentence about what "auto" was filled with that a command line would decide
        (Transformers' TrainingArguments); None where nothing was.
        """
        names = [name for name, source in self.sources.items() if source == resolved_parts.ASSUMED]
        if not names:
            return None
        values = {**self.optimizer.params, **(self.scheduler.params if self.scheduler else {})}
        shown = ", ".join(f"{name} = {values.get(name.rpartition('.')[2])}" for name in names)
        return (
            f'"auto" is filled by Transformers\' own defaults: {shown}; write the values of your'
            " training command in the file"
        )

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The one list of them, in order, which the engine and the account iterate over. One that
        the caller brings and that splits the batch over cp takes the place of Plait's own.
        """
        values = (getattr(self, name) for name in type(self).model_fields)
        brought = any("cp" in technique.batch_axes for technique in self.added)
        own = (
            value
            for value in values
            if isinstance(value, Technique) and not (brought and isinstance(value, ContextParallel))
        )
        return in_order([*own, *self.added])

    def context(
        self,
        *,
        device_type: str = "cpu",
        model: nn.Module | None = None,
        blocks: tuple[str, ...] = (),
    ) -> Context:
        """What the techniques' checks ask; without a model, what they can know before it is
        built.
        """
        return Context(
            self.layout, self.techniques, self.batch.accumulation, device_type, model, blocks
        )


def load(source: Source | Config, overrides: Sequence[str] = ()) -> Config:
    """A checked configuration; it may still say "auto".

    `source` is a path to JSON (comments allowed) or YAML of Plait or DeepSpeed, a mapping, or
    DeepSpeed's base64. Files of Accelerate and of the Trainer's fsdp_config, and Megatron's flags,
    are refused with the command that converts them. `overrides` are `a.b=c` texts that win over the
    file, whatever name the file uses for the setting. Raises ConfigError with every problem.
    """
    if isinstance(source, Config):
        if overrides:
            raise ConfigError(
                Problem(
                    "overrides",
                    ", ".join(overrides),
                    "apply to a file or a mapping, not to a Config",
                    "load them together",
                )
            )
        return source
    return finish(*look(source, overrides))


def look(
    source: Source | Sequence[str], overrides: Sequence[str] = ()
) -> tuple[Document, Examined]:
    """The first half of `load`: every key looked up and problems collected, not raised.

    Raises ConfigError only where there are no keys to look at (no such file, no JSON, a file of
    another program) and for a malformed override.
    """
    if not isinstance(source, str | Path | Mapping | Sequence):
        raise TypeError(f"a configuration is a path or a mapping, not {type(source).__name__}")
    if not isinstance(source, str | Path | Mapping):
        refuse_flags(source)
    document = read(source)
    refuse_foreign(document)
    return document, examine(document, [parse_override(text) for text in overrides])


def finish(document: Document, found: Examined) -> Config:
    """The second half of `load`: the Config. Raises ConfigError with every problem of keys and of
    values.
    """
    return checked(found, found.tree).with_provenance(found.provenance(document.name))


def checked(found: Examined, tree: Mapping[str, Any]) -> Config:
    """`tree`, which is `found`'s or part of it, as a Config. Raises ConfigError with every problem
    of keys and of values.
    """
    problems = list(found.problems)
    try:
        config = validate(tree, written=found.written)
    except ConfigError as error:
        problems += error.problems
    refuse(problems)
    return config


def resolve(
    config: Config,
    *,
    world_size: int,
    hidden_size: int | None = None,
    total_steps: int | None = None,
    micro_batch_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Resolved:
    """Everything that `config` leaves open, for `world_size` processes.

    `hidden_size` decides an "auto" bucket, `total_steps` an "auto" length of the schedule (else
    `run.steps`), `micro_batch_size` is taken where the file gives no batch size. `auto` says what
    "auto" means by path ({"optimizer.params.lr": 1e-4, "bf16.enabled": True}), as Transformers'
    TrainingArguments do. Raises ConfigError with every problem.
    """
    draft = outline(
        config,
        world_size=world_size,
        hidden_size=hidden_size,
        total_steps=total_steps,
        micro_batch_size=micro_batch_size,
        auto=auto,
    )
    if draft.problems:
        raise ConfigError(*draft.problems)
    return Resolved(**draft.values, sources=draft.sources)


@dataclass(frozen=True)
class Outline:
    """What of a configuration can be resolved, and what is wrong with the rest."""

    values: Mapping[str, Any]
    """Field of Resolved to its value; without the fields that cannot be had."""
    sources: Mapping[str, str]
    problems: tuple[Problem, ...]


def outline(
    config: Config,
    *,
    world_size: int,
    hidden_size: int | None = None,
    total_steps: int | None = None,
    micro_batch_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Outline:
    """As `resolve`, with the problems beside what is right."""
    found = resolved_parts.Findings(config, dict(auto or {}))
    layout = found.attempt(lambda: resolved_parts.layout(found, world_size=world_size))
    batch = (
        found.attempt(
            lambda: resolved_parts.batch(found, dp=layout.dp, micro_batch_size=micro_batch_size)
        )
        if layout
        else None
    )
    precision = found.attempt(lambda: resolved_parts.precision(found))
    compression = (
        found.attempt(lambda: techniques.compression(found, precision))
        if precision is not None
        else None
    )
    data_parallel = None
    if precision is not None and compression is not None:
        shard = layout.dp_shard if layout is not None else 1
        scheme = compression.scheme
        data_parallel = found.attempt(
            lambda: techniques.data_parallel(
                found, precision, scheme, shard=shard, hidden_size=hidden_size
            )
        )
    optimizer = resolved_parts.optimizer(found)
    scheduler = resolved_parts.scheduler(found, optimizer, total_steps=total_steps)
    compiled = resolved_parts.compiled(found)
    recompute = found.attempt(lambda: techniques.recompute(found))
    offload = found.attempt(lambda: techniques.activation_offload(found))
    states = found.attempt(lambda: techniques.optimizer_offload(found))
    shards = found.attempt(lambda: techniques.parameter_offload(found))
    clipping = found.value(
        "gradient_clipping",
        config.gradient_clipping,
        1.0,
        "1.0, the default of DeepSpeed and of Transformers",
    )
    if layout and batch and precision and compression and data_parallel and states:
        found.attempt(
            lambda: techniques.refuse_in_backward(
                data_parallel,
                compression,
                layout,
                batch,
                precision,
                states,
                clipping=clipping,
                non_finite=config.faults.non_finite,
            )
        )
    tensor = techniques.tensor_parallel(found)
    pipeline = techniques.pipeline(found, layout) if layout is not None else None
    if layout and pipeline:
        found.attempt(lambda: techniques.refuse_overlap(tensor, pipeline, layout))
    if data_parallel and states:
        found.attempt(lambda: techniques.refuse_small_states(optimizer, data_parallel, states))
    if data_parallel and precision and layout:
        found.attempt(
            lambda: techniques.refuse_unsharded_optimizer(
                optimizer, data_parallel, precision, layout
            )
        )
    run = config.run or RunSection()
    tried: dict[str, Any] = {
        "layout": layout,
        "batch": batch,
        "pipeline": pipeline,
        "compression": compression,
        "data_parallel": data_parallel,
        "precision": precision,
        "recompute": recompute,
        "activation_offload": offload,
        "optimizer_offload": states,
        "parameter_offload": shards,
    }
    known: dict[str, Any] = {
        "tensor_parallel": tensor,
        "context_parallel": techniques.context_parallel(found),
        "routing": Routing(**config.experts.model_dump()),
        "compile": compiled,
        "library": Library(
            algorithm=config.parallel.nccl_algorithm, protocol=config.parallel.nccl_protocol
        ),
        "faults": config.faults,
        "loss_chunk_tokens": config.parallel.loss_chunk_tokens,
        "tiled_mlp": TiledMLP(tokens=config.parallel.mlp_tile_tokens),
        "blocks": config.parallel.blocks,
        "gradient_clipping": clipping,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "seed": run.seed,
        "model": config.model,
        "data": config.data,
        "run": run,
        "trackers": found.attempt(lambda: resolved_parts.trackers(config, run)) or (),
    }
    values = {name: value for name, value in tried.items() if value is not None} | known
    return Outline(values, found.sources, tuple(found.problems))
