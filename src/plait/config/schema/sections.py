"""Plait's sections other than `parallel`, and DeepSpeed's tracker sections.

The sections are pure descriptions. They open no path, build no model and do not inspect the
machine. Rules that depend only on the file are checked here, so that an invalid file is refused
before any process starts. A check raises ValueError with the text `rule; remedy`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from plait.config.values import (
    MAX_PROCESSES,
    Finite,
    Flag,
    Fraction,
    Integer,
    LocalPath,
    NotNegative,
    PathOrURL,
)
from plait.policy import Policy

MAX_TOKENS = 2**31 - 1
"""Maximum of the vocabulary size and of the sequence length."""

DEFAULT_CHECKPOINT_SECONDS = 30 * 60
"""Default time between checkpoints. A killed run loses about this much work at most."""

MAX_TIMEOUT_SECONDS = 30 * 24 * 3600.0


class ModelSection(Policy):
    """Model: `config` to train from scratch, or `path` to continue from weights."""

    config: dict[str, Any] | None = None
    """Transformers model configuration: `model_type` and any of its fields. Weights are initialised
    from `run.seed`, identically for every layout. If `vocab_size` is omitted, it follows the
    tokenizer.
    """
    path: PathOrURL | None = None
    """Folder with `config.json` and safetensors weights, or a name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the parameters that the optimizer updates. `bf16` and `fp16` set the dtype of the
    computation.
    """

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.config is None) == (self.path is None):
            raise ValueError(
                "a model is either `config` (trained from scratch) or `path` (continued from"
                " weights); set exactly one of them"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError(
                '`config` names its architecture in `model_type`; add for example "model_type":'
                ' "llama"'
            )
        return self


class DataSection(Policy):
    """Training text, its tokenizer, and the division into sequences."""

    source: Literal["python-stdlib", "files", "jsonl", "datasets"] | None = None
    """Source of the training text, which `plait train` requires. `files`: text files, one document
    each. `jsonl`: one JSON object per line, with its text in `field`. `datasets`: a Hugging Face
    data set. `python-stdlib`: the sources of the running Python, which every machine has, to try a
    configuration.
    """
    paths: tuple[PathOrURL, ...] = ()
    """Files, folders or globs (`corpus/**/*.txt`) for `files` and `jsonl`, relative to the working
    folder. For `datasets`, one folder written by `save_to_disk` or one name on the hub.
    """
    format: Literal["text", "chat", "instruct"] = "text"
    """Format of the rows of `jsonl` and `datasets`. text: a text in `field`. chat: `messages`, a
    list of objects with `role` and `content`, formatted by the tokenizer's chat template with the
    row's `tools` and `chat_template_kwargs`. instruct: `prompt` and `completion`, or `instruction`,
    `input` (optional) and `output`. They are formatted by the chat template, after the row's
    `system` and `history`, or concatenated if the tokenizer has no template. Preference pairs are
    for TRL's DPOTrainer.
    """
    ignored_columns: tuple[str, ...] = ()
    """Columns of `chat` and `instruct` that are ignored. Any other unknown column is refused."""
    field: str = "text"
    """Key (`jsonl`) or column (`datasets`) that contains the text."""
    scored: Literal["answers", "all"] = "answers"
    """Tokens of `chat` and `instruct` that the loss includes: the assistant's messages except those
    with `"weight": 0` (answers), or all tokens.
    """
    append_end_of_text: Flag = False
    """End each row of `chat` and `instruct` with the tokenizer's end-of-text token, even if its
    chat template does not, so that the model learns to stop.
    """
    packing: Literal["documents"] | None = None
    """Packing of documents into sequences. If omitted, documents are concatenated and split at
    `sequence_length`, and attention sees the full sequence. documents: a sequence contains as many
    complete documents as fit, each with its own positions and its own attention. Only a document
    that is longer than `sequence_length` is split, and the remaining space is padding.
    """
    subset: str | None = None
    """Configuration of a hub data set (`wikitext-2-raw-v1`)."""
    split: str = "train"
    """Split of a data set. Validation text is held out of it, see `validation_fraction`."""
    streaming: Flag = False
    """Read the rows of `datasets` when they are needed, again in every epoch, and store nothing.
    For data sets that do not fit on the disk, or never end. Every process reads and tokenises all
    rows. Requires a tokenizer, in `tokenizer` or `model.path`.
    """
    buffer_sequences: Annotated[Integer, Field(ge=1)] = 1024
    """streaming: minimum number of sequences that are read and shuffled together. Validation text
    is held out of the first ones.
    """
    tokenizer: PathOrURL | None = None
    """Tokenizer: a folder, a `tokenizer.json` or a hub name. If omitted, the tokenizer in
    `model.path`. For a model from scratch, a byte-level BPE with `vocab_size` entries is trained on
    the training text and cached.
    """
    vocab_size: Annotated[Integer, Field(ge=257, le=MAX_TOKENS)] = 8192
    """Size of the tokenizer that is trained: 256 bytes, one end-of-text token, and merges. Unused
    if a tokenizer is given.
    """
    sequence_length: Annotated[Integer, Field(ge=2, le=MAX_TOKENS)] = 256
    """Tokens per training sequence. Documents are joined with an end-of-text token between them and
    split at this length.
    """
    validation_fraction: Fraction = 0.02
    """Share of the documents that is held out for validation. A hash of each document selects them,
    so that they are the same on every machine and in every run.
    """
    cache: LocalPath | None = None
    """Folder for trained tokenizers and tokenised text. If omitted, `$PLAIT_CACHE`, or
    `~/.cache/plait`.
    """

    def trained_vocabulary(self) -> int | None:
        """Return the size of the tokenizer that is trained, or None if a tokenizer is given."""
        return self.vocab_size if self.tokenizer is None else None

    # Before the check of the literal, whose error would not name the alternative.
    @field_validator("format", mode="before")
    @classmethod
    def _refuse_preferences(cls, value: object) -> object:
        if value == "preference":
            raise ValueError(
                "`plait train` has no preference loss; use TRL's DPOTrainer, wrapped by"
                " plait.hf.wrap"
            )
        return value

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        # Keys of another format are refused. They would have no effect.
        if self.format == "text":
            if self.ignored_columns or self.append_end_of_text:
                raise ValueError(
                    '`ignored_columns` and `append_end_of_text` belong to format "chat" and'
                    ' "instruct"; leave them out'
                )
            return self

        if self.source not in ("jsonl", "datasets"):
            raise ValueError(
                f'format "{self.format}" applies to rows, but source is "{self.source}"; set'
                ' `source` to "jsonl" or "datasets"'
            )
        if self.field != "text":
            raise ValueError(
                f'`field` is not read with format "{self.format}", whose columns have fixed names;'
                " leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        # Keys of another source are refused. They would have no effect.
        # A file may write the default explicitly.
        default_buffer = type(self).model_fields["buffer_sequences"].default
        rules = (
            (
                self.source is None and self.paths,
                '`paths` is read by a `source`, and there is none; set `source` to "files", "jsonl"'
                ' or "datasets"',
            ),
            (
                self.source == "python-stdlib" and self.paths,
                '`paths` is not read with source "python-stdlib"; set `source` to "files", "jsonl"'
                ' or "datasets"',
            ),
            (
                self.source in ("files", "jsonl") and not self.paths,
                f'source "{self.source}" needs at least one file, folder or glob; set `paths`',
            ),
            (
                self.source == "datasets" and len(self.paths) != 1,
                f'source "datasets" reads exactly one data set and `paths` has {len(self.paths)};'
                " name one folder or hub name",
            ),
            (
                self.source != "datasets" and (self.subset is not None or self.split != "train"),
                f'`subset` and `split` belong to source "datasets", not "{self.source}"; leave'
                " them out",
            ),
            (
                self.source != "datasets" and self.streaming,
                f'`streaming` belongs to source "datasets", not "{self.source}"; leave it out',
            ),
            (
                not self.streaming and self.buffer_sequences != default_buffer,
                "`buffer_sequences` is read only with `streaming`; leave it out, or set"
                " `streaming` to true",
            ),
        )
        for applies, rule in rules:
            if applies:
                raise ValueError(rule)
        return self


class RunSection(Policy):
    """Length, output and checkpoints of a run."""

    folder: LocalPath = "runs/plait"
    """Folder for metrics, checkpoints, tokenizer and the resolved configuration. A run with the
    same folder resumes.
    """
    steps: Annotated[Integer, Field(ge=1)] = 1000
    """Optimizer steps of the full run."""
    seed: Annotated[Integer, Field(ge=0)] = 0
    """Seed of the initial weights, the order of the data and dropout."""
    processes: Annotated[Integer, Field(le=MAX_PROCESSES)] | Literal["auto"] = "auto"
    """Number of processes on this machine. `auto`: one per GPU. On a machine without GPUs two (one
    if it has a single core), or as many as the layout in `parallel` needs.
    """
    log_every: Annotated[Integer, Field(ge=1)] = 10
    """Steps between printed lines. The live display and `metrics.jsonl` contain every step."""
    validate_every: Annotated[Integer, Field(ge=0)] = 0
    """Steps between validations; 0 validates only at the end."""
    validate_sequences: Annotated[Integer, Field(ge=1)] = 256
    """Maximum number of validation sequences. They are the same at every validation and for every
    layout.
    """
    checkpoint_every: Annotated[Integer, Field(ge=0)] = 0
    """Steps between checkpoints; 0 leaves the decision to `checkpoint_minutes`. A checkpoint is
    always written at the end and when the run is interrupted.
    """
    checkpoint_minutes: NotNegative | None = None
    """Minutes between checkpoints, counted from the last one or from the start; 0 writes none by
    the clock. If omitted, 30, or none by the clock if `checkpoint_every` is set.
    """
    keep: Annotated[Integer, Field(ge=1)] = 2
    """Number of checkpoints that are kept in the folder. Older ones are deleted."""
    checkpoints: PathOrURL | None = None
    """Folder or URL of a store (`s3://bucket/run`) for checkpoints. If omitted, `checkpoints/` in
    `folder`.
    """
    roll_backs: Annotated[Integer, Field(ge=0)] = 0
    """Maximum number of times that a run returns to its last checkpoint: after a step for which
    faults.non_finite raises, whose batch is then skipped, or if replicas differ. 0: the run ends
    instead.
    """
    callbacks: tuple[str, ...] = ()
    """Your own functions, or classes of functions, as `package.module:name`. They are called with
    (event, engine) for every event of `plait.events`, on every process. If one returns True, the
    run writes a checkpoint and ends after the next step.
    """

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds between checkpoints; 0 for no checkpoints by time."""
        if self.checkpoint_minutes is not None:
            return self.checkpoint_minutes * 60
        if self.checkpoint_every:
            return 0.0
        return DEFAULT_CHECKPOINT_SECONDS

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.processes != "auto" and self.processes < 1:
            raise ValueError(
                f"`processes` is {self.processes}, but a run needs at least one process; use 1 or"
                ' more, or "auto"'
            )
        return self


class ExpertsSection(Policy):
    """Options of the routers of mixture-of-experts models."""

    bias_update_rate: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    """Step size of the router bias, for models whose routers have a bias for every expert
    (DeepSeek-V3's `e_score_correction_bias`). After a step the bias grows by this amount for
    experts that received fewer tokens than the mean, and shrinks for experts that received more.
    DeepSeek-V3 was trained with 0.001. 0: biases are constant.
    """
    balance: Literal["micro_batch", "global"] = "micro_batch"
    """Tokens over which the balance loss of `model.config.output_router_logits` is computed.
    micro_batch: those of each process's micro-batch, as in Transformers. global: those of the
    micro-batches that all data-parallel processes compute at the same time.
    """
    z_loss: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    """Coefficient of a loss that keeps router logits small: the mean over tokens of the squared
    log-sum-exp of the logits, summed over layers (ST-MoE, which uses 1e-3). 0: no such loss.
    """


class FaultsSection(Policy):
    """Timeouts of collectives, and checks of every step."""

    timeout_seconds: Annotated[Finite, Field(ge=1, le=MAX_TIMEOUT_SECONDS)] = 600.0
    """Time that a process may wait for the others in a collective. The run then counts as hung and
    ends with the name of the process that is late. An existing process group keeps its own timeout.
    """
    non_finite: Literal["auto", "raise", "skip"] = "auto"
    """Treatment of a step whose loss or gradients are not finite, on all processes and before the
    update: "raise" ends the run, "skip" skips the step. "auto": skip if fp16 scales the loss and
    with bf16.check_grad_overflow, else raise. On a GPU, "auto" does not wait for the device in
    every step, and `plait train` raises after the update, before anything is saved. With fp16 an
    overflow of the gradients is always skipped, because it sets the loss scale.
    """
    check_collectives: Flag = False
    """Debug mode: before each collective, its processes compare operation, shapes, dtypes and
    source lines. Processes that issue different collectives end with an error that names both
    lines. It is several times slower and uses no shared memory.
    """
    compare_replicas_every: Annotated[Integer, Field(ge=0)] = 0
    """Steps between bitwise comparisons of the tensors that several processes hold as replicas. A
    flipped bit ends the run and is named. Tensors that are sharded over all processes have no
    replica. 0: never.
    """


def _parse_folder(value: Any) -> Any:
    """Convert "", DeepSpeed's notation for the working directory, to "."."""
    return "." if value == "" else value


Folder = Annotated[LocalPath, BeforeValidator(_parse_folder)]
"""Path of a folder on this machine. An empty path is the working folder."""
TrackerName = Literal["tensorboard", "wandb", "comet", "csv_monitor"]


class FileTrackerSection(Policy):
    """Settings of a tracker that writes files."""

    enabled: Flag = False
    """Write the numbers of every step, on the first process."""
    output_path: Folder = "."
    """Folder that contains the folder of the tracker. If omitted, it is `run.folder`, or the
    working folder in a file without `run`.
    """
    job_name: str = "DeepSpeedJobName"
    """Name of the folder of the tracker. If it is omitted in a file with `run`, the name of the
    tracker is used.
    """


class TensorboardSection(FileTrackerSection):
    """Settings of the TensorBoard tracker."""


class CsvMonitorSection(FileTrackerSection):
    """Settings of the tracker that writes one CSV file per metric, with a row per step."""


class WandbSection(Policy):
    """Settings of the Weights & Biases tracker."""

    enabled: Flag = False
    """Send the numbers of every step to Weights & Biases, from the first process."""
    project: str = "deepspeed"
    """Project of the run. If omitted in a file with `run`, `plait`."""
    group: str | None = None
    """Group of the run."""
    team: str | None = None
    """Entity that owns the project."""


class CometSection(Policy):
    """Settings of the Comet tracker.

    Comet reads the API key from COMET_API_KEY or from its own configuration file.
    """

    enabled: Flag = False
    """Send the numbers of every step to Comet, from the first process."""
    project: str | None = None
    """Project of the experiment."""
    workspace: str | None = None
    """Workspace of the project."""
    experiment_name: str | None = None
    """Name of the experiment."""
    experiment_key: str | None = None
    """Key of an experiment to continue."""
    online: Flag | None = None
    """Send the numbers immediately (true) or store them in a file (false). If omitted, true."""
    mode: Literal["get", "create", "get_or_create"] | None = None
    """`get` continues an experiment, `create` starts a new one. If omitted, Comet decides."""


SECTIONS: dict[TrackerName, type[Policy]] = {
    "tensorboard": TensorboardSection,
    "wandb": WandbSection,
    "comet": CometSection,
    "csv_monitor": CsvMonitorSection,
}
"""Section of each tracker."""


class TrackerSpec(Policy):
    """Enabled tracker of a run."""

    name: TrackerName
    """Name of the tracker's section."""
    settings: dict[str, Any]
    """Settings of the tracker, named as in its section."""
