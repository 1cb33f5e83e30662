"""`load` reads and checks a configuration; `resolve` replaces omitted and "auto" values.

Both are pure: they use no process group, no environment variable and no property of the machine.
The number of processes is an argument. A `Resolved` records the source of every value.

A file goes through four stages: `source.read`; `examine`, which translates its keys to those of the
schema; the checks of the schema, in which `validate_tree` turns pydantic's errors into Problems;
and `outline`, which calls the functions in `resolved_parts` and `techniques`.

Note [All problems are reported]
    A user should see all mistakes of a file at once. `examine` collects the problems of keys, and
    `validate_tree` those of values. `outline` calls the function of each part with
    `Findings.attempt`, which records the problems of the part. Parts that depend on a part with
    problems are skipped. `load` and `resolve` each raise a single ConfigError with all problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny, ValidationError
from pydantic_core import ErrorDetails
from torch import nn

from plait.cluster.layout import Layout
from plait.config.dialects import foreign, keys
from plait.config.dialects.examine import ExaminedDocument, examine
from plait.config.resolving import resolved_parts, techniques
from plait.config.resolving.resolved_parts import PLANNABLE_SETTINGS, Batch
from plait.config.schema.config import Config
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.sections import (
    DataSection,
    FaultsSection,
    ModelSection,
    RunSection,
    TrackerSpec,
)
from plait.config.source import Document, Source, parse_override, read
from plait.config.values import describe_error
from plait.errors import ConfigError, Problem, raise_problems
from plait.parallel.order import in_order
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.context_parallel import ContextParallel
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.experts import ExpertParallel, Routing
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import ActivationOffload, OptimizerOffload, ParameterOffload
from plait.parallel.techniques.pipeline_parallel import Pipeline
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.parallel.techniques.tiled_mlp import TiledMLP
from plait.policy import Policy


def load(source: Source | Config, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration. The result may still contain "auto".

    Args:
        source: Path of a JSON file (comments allowed) or YAML file of Plait or DeepSpeed, a
            mapping, or DeepSpeed's base64. A Config is returned unchanged. Files of Accelerate and
            of the Trainer's fsdp_config, and Megatron's flags, are refused. The error contains the
            command that converts them.
        overrides: Strings `a.b=c` that take precedence over the file, whatever name the file uses
            for the setting.

    Raises:
        ConfigError: The configuration is invalid. The error lists all problems.
    """
    if not isinstance(source, Config):
        return build_config(*examine_source(source, overrides))
    if overrides:
        raise ConfigError(
            Problem(
                "overrides",
                ", ".join(overrides),
                "apply to a file or a mapping, not to a Config",
                "pass the file or the mapping to `load` with the overrides",
            )
        )
    return source


def examine_source(
    source: Source | Sequence[str], overrides: Sequence[str] = ()
) -> tuple[Document, ExaminedDocument]:
    """Read a configuration and look up its keys: the first half of `load`.

    The result contains the problems.

    Raises:
        ConfigError: There are no keys to look up (no such file, invalid JSON, a file of another
            program), or an override is malformed.
    """
    if not isinstance(source, str | Path | Mapping | Sequence):
        raise TypeError(f"a configuration is a path or a mapping, not {type(source).__name__}")
    if not isinstance(source, str | Path | Mapping):
        # A list of texts is a command line of Megatron-LM.
        foreign.refuse_flags(source)
    document = read(source)
    examined = examine(document, [parse_override(text) for text in overrides])
    # A file of another program always has keys that Plait does not know.
    if examined.problems:
        foreign.refuse_foreign(document)
    return document, examined


def build_config(document: Document, examined: ExaminedDocument) -> Config:
    """Return the Config of a document: the second half of `load`.

    Raises:
        ConfigError: Keys or values are invalid. The error lists all problems.
    """
    return validate_tree(examined, examined.tree).with_provenance(
        examined.provenance(document.name)
    )


def validate_tree(examined: ExaminedDocument, tree: Mapping[str, Any]) -> Config:
    """Return a tree as a Config.

    Args:
        examined: Document whose problems are also reported.
        tree: Tree of `examined`, or a part of it.

    Raises:
        ConfigError: Keys or values are invalid. The error lists all problems.
    """
    problems = list(examined.problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # See Note [All problems are reported].
        problems += _value_problems(error.errors(include_url=False), examined.written)
    raise_problems(problems)
    return config


def _value_problems(errors: Sequence[ErrorDetails], written: Mapping[str, str]) -> list[Problem]:
    """Return the problems of pydantic's errors.

    pydantic reports an error per alternative of a union. The errors of a field become one problem.
    """
    errors_of: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        errors_of.setdefault(_field_path(error["loc"]), []).append(error)

    problems = []
    for field, details in errors_of.items():
        problems += _field_problems(written.get(field, field), details)
    return problems


def _field_path(location: tuple[int | str, ...]) -> str:
    """Return the longest known path in the location of an error.

    pydantic adds the names of alternatives and the positions in lists to the location.
    """
    longest = str(location[0]) if location else "the configuration"
    known = keys.known_paths()
    path = ""
    for name in location:
        path = f"{path}.{name}" if path else str(name)
        if path in known:
            longest = path
    return longest


def _field_problems(field: str, errors: list[ErrorDetails]) -> list[Problem]:
    value = errors[0]["input"]
    if errors[0]["type"] == "missing":
        return [Problem(field, None, "is required", "add it")]
    if errors[0]["type"] == "value_error":
        # Raised by a check of the schema, which may contain several problems.
        text = errors[0]["msg"].removeprefix("Value error, ")
        if isinstance(value, dict):
            # A whole section is not repeated in the message.
            value = None
        return [Problem(field, value, *_split(problem)) for problem in text.split(" Also: ")]
    if value == "auto" and field in PLANNABLE_SETTINGS:
        rule = "is answered by a plan, which only `plait train` makes automatically"
        return [
            Problem(
                field, value, rule, "run `plait plan FILE --out planned.json` and use planned.json"
            )
        ]

    descriptions = [describe_error(error) for error in errors]
    # Alternatives of a union can have the same rule.
    rules = dict.fromkeys(rule for rule, _ in descriptions)
    _, remedy = descriptions[0]
    return [Problem(field, value, f"must be {' or '.join(rules)}", remedy)]


def _split(text: str) -> tuple[str, str]:
    """Split a message `rule; remedy`, the form of the schema's own checks."""
    # The last semicolon, because a rule may contain others.
    rule, semicolon, remedy = text.rpartition("; ")
    if not semicolon:
        return text, "correct it"
    return rule, remedy


class Resolved(Policy):
    """Configuration in which every value is determined.

    It contains no "auto". A field is None only if its docstring says what None means.
    """

    layout: Layout
    """Degrees of the parallel axes and the placement of ranks."""
    batch: Batch
    """Batch sizes."""
    tensor_parallel: TensorParallel
    """Splitting of layers over the tp axis."""
    context_parallel: ContextParallel
    """Splitting of sequences over the cp axis."""
    expert_parallel: ExpertParallel = ExpertParallel()
    """Splitting of experts over the ep axis."""
    routing: Routing
    """Load balancing of the routers of experts."""
    pipeline: Pipeline
    """Pipeline schedule and stages of the pp axis."""
    data_parallel: DataParallel
    """ZeRO stage and reduction of gradients."""
    compression: Compression
    """Compression of the traffic between data-parallel ranks."""
    precision: Precision
    """Dtypes of computation and reduction; None is the dtype of the parameters."""
    compile: Compile
    """Settings of torch.compile."""
    recompute: Recompute
    """Activation checkpointing."""
    tiled_mlp: TiledMLP = TiledMLP()
    """Number of tokens for which an MLP is computed at a time."""
    activation_offload: ActivationOffload
    """Offload of the tensors that blocks save for backward."""
    optimizer_offload: OptimizerOffload
    """Storage tier of optimizer states and gradients."""
    parameter_offload: ParameterOffload
    """Storage tier of the parameter shards."""
    faults: FaultsSection = FaultsSection()
    """Timeouts of collectives, and checks of every step."""
    loss_chunk_tokens: int = 0
    """Number of tokens whose logits exist at the same time; 0 is all."""
    added: tuple[SerializeAsAny[Technique], ...] = ()
    """Techniques of the caller, in addition to those of the file."""
    blocks: tuple[str, ...] = ()
    """Names or patterns of the repeated blocks. If empty, they are searched in the model."""
    gradient_clipping: float
    """Maximum of the global gradient norm; 0 does not clip."""
    optimizer: OptimizerSpec
    """Type and parameters of the optimizer."""
    scheduler: SchedulerSpec | None
    """Learning rate schedule; None is a constant rate."""
    seed: int
    """Seed of the initial weights, the order of the data and dropout."""
    model: ModelSection | None
    """Model to build; None if the caller provides it."""
    data: DataSection | None
    """Training text to read; None if the caller provides the batches."""
    run: RunSection
    """Length and output of the run."""
    trackers: tuple[TrackerSpec, ...] = ()
    """Trackers that are enabled, with all of their settings."""
    sources: Mapping[str, str]
    """Source of each value: "file", "override", "default", "auto: ...", "derived: ...". The key is
    the name in the file, or else the path in this class.
    """

    def assumed(self) -> str | None:
        """Return a warning about "auto" values that Transformers' command line would determine.

        Returns:
            The warning, which lists the assumed values, or None if there are none.
        """
        names = [name for name, source in self.sources.items() if source == resolved_parts.ASSUMED]
        if not names:
            return None
        values = dict(self.optimizer.params)
        if self.scheduler is not None:
            values |= self.scheduler.params
        shown = ", ".join(f"{name} = {values.get(name.rpartition('.')[2])}" for name in names)
        return (
            f'"auto" is filled by Transformers\' own defaults: {shown}; write the values of your'
            " training command in the file"
        )

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """All techniques, in the order in which the engine and the memory ledger use them."""
        values = [getattr(self, name) for name in type(self).model_fields]
        configured = [value for value in values if isinstance(value, Technique)]
        # A technique of the caller that splits the batch over cp replaces Plait's own.
        if any("cp" in technique.batch_axes for technique in self.added):
            configured = [
                technique for technique in configured if not isinstance(technique, ContextParallel)
            ]
        return in_order([*configured, *self.added])

    def context(
        self,
        *,
        device_type: str = "cpu",
        model: nn.Module | None = None,
        blocks: tuple[str, ...] = (),
    ) -> TechniqueContext:
        """Return the context of the techniques' checks.

        Args:
            device_type: Type of the devices.
            model: Model, or None before it is built. Checks of the model are then skipped.
            blocks: Names of the repeated blocks.
        """
        return TechniqueContext(
            self.layout, self.techniques, self.batch.accumulation, device_type, model, blocks
        )


def resolve(
    config: Config,
    *,
    world_size: int,
    hidden_size: int | None = None,
    total_steps: int | None = None,
    micro_batch_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Resolved:
    """Determine every value that a configuration omits or sets to "auto".

    Args:
        config: Configuration.
        world_size: Number of processes.
        hidden_size: Hidden size of the model, for an "auto" gradient bucket.
        total_steps: Length of the run, for an "auto" schedule. If None, `run.steps`.
        micro_batch_size: Micro-batch size for a file without batch sizes.
        auto: Values that replace "auto", by path ({"optimizer.params.lr": 1e-4}), for example those
            of Transformers' TrainingArguments.

    Raises:
        ConfigError: The configuration is invalid. The error lists all problems.
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
    """Resolved values of a configuration, and the problems of those that could not be resolved."""

    values: Mapping[str, Any]
    """Values by field of Resolved. Fields that could not be resolved are missing."""
    sources: Mapping[str, str]
    """Source of each value, as in `Resolved`."""
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
    """Resolve a configuration as far as possible. See `resolve` for the arguments."""
    findings = resolved_parts.Findings(config, dict(auto or {}))
    # See Note [All problems are reported].
    attempt = findings.attempt

    layout = attempt(resolved_parts.layout, findings, world_size=world_size)
    batch = None
    if layout is not None:
        batch = attempt(
            resolved_parts.batch, findings, dp=layout.dp, micro_batch_size=micro_batch_size
        )
    precision = attempt(resolved_parts.precision, findings)
    compression = None
    if precision is not None:
        compression = attempt(techniques.compression, findings, precision)
    data_parallel = None
    if precision is not None and compression is not None:
        data_parallel = attempt(
            techniques.data_parallel,
            findings,
            precision,
            compression.scheme,
            shard=layout.dp_shard if layout is not None else None,
            hidden_size=hidden_size,
        )

    # These two record their problems and raise none, so that both always have a result.
    optimizer = resolved_parts.optimizer(findings)
    scheduler = resolved_parts.scheduler(findings, optimizer, total_steps=total_steps)
    recompute = attempt(techniques.recompute, findings)
    activation_offload = attempt(techniques.activation_offload, findings)
    optimizer_offload = attempt(techniques.optimizer_offload, findings)
    parameter_offload = attempt(techniques.parameter_offload, findings)
    clipping = findings.resolve_auto(
        "gradient_clipping",
        config.gradient_clipping,
        1.0,
        "1.0, the default of DeepSpeed and of Transformers",
    )

    # Combinations are checked only if all of their parts could be resolved.
    if layout and batch and precision and compression and data_parallel and optimizer_offload:
        attempt(
            techniques.refuse_in_backward,
            data_parallel,
            compression,
            layout,
            batch,
            precision,
            optimizer_offload,
            clipping=clipping,
            non_finite=config.faults.non_finite,
        )
    tensor = techniques.tensor_parallel(findings)
    pipeline = None
    if layout is not None:
        pipeline = techniques.pipeline(findings, layout)
        attempt(techniques.refuse_overlap, tensor, pipeline, layout)
    if data_parallel and optimizer_offload:
        attempt(techniques.refuse_small_states, optimizer, data_parallel, optimizer_offload)
    if data_parallel and precision and layout:
        attempt(techniques.refuse_unsharded_optimizer, optimizer, data_parallel, precision, layout)

    run = config.run or RunSection()
    parts: dict[str, Any] = {
        "layout": layout,
        "batch": batch,
        "pipeline": pipeline,
        "compression": compression,
        "data_parallel": data_parallel,
        "precision": precision,
        "recompute": recompute,
        "activation_offload": activation_offload,
        "optimizer_offload": optimizer_offload,
        "parameter_offload": parameter_offload,
    }
    values = {name: value for name, value in parts.items() if value is not None}
    values |= {
        "tensor_parallel": tensor,
        "context_parallel": techniques.context_parallel(findings),
        "routing": Routing(**config.experts.model_dump()),
        "compile": resolved_parts.compiled(findings),
        "faults": config.faults,
        "loss_chunk_tokens": config.parallel.loss_chunk_tokens,
        "tiled_mlp": TiledMLP(tokens=config.parallel.mlp_tile_tokens),
        "added": config.techniques,
        "blocks": config.parallel.blocks,
        "gradient_clipping": clipping,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "seed": run.seed,
        "model": config.model,
        "data": config.data,
        "run": run,
        "trackers": resolved_parts.trackers(config, run),
    }
    return Outline(values, findings.sources, tuple(findings.problems))
