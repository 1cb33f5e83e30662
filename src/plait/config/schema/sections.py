"""The three sections that describe a run of `plait train`: which model, which data, and how the run
goes.

They are pure descriptions: a path is not opened here, a model is not built, a default is a number
and never a look at the machine. Everything that depends on the file alone is checked here, so that
a wrong file is refused before any process starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from plait.config.schema.trackers import TrackerSpec
from plait.config.values.numbers import (
    MOST_PROCESSES,
    Flag,
    Fraction,
    LocalPlace,
    NotNegative,
    Place,
    Whole,
)
from plait.policy import Policy

MOST_TOKENS = 2**31 - 1
"""In a vocabulary or a sequence."""

DEFAULT_CHECKPOINT_SECONDS = 30 * 60
"""Default time between checkpoints, which is about the most that a killed run loses."""


class ModelSection(Policy):
    """The model: a Transformers configuration to train from scratch, or weights to go on from.
    Exactly one of `config` and `path`.
    """

    config: dict[str, Any] | None = None
    """A Transformers model configuration: `model_type` and any of its fields. Weights are
    initialised from `run.seed`, the same on every layout. `vocab_size` follows the tokenizer when
    it is left out.
    """
    path: Place | None = None
    """A folder with `config.json` and safetensors weights, or a name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """The type of the parameters that the optimizer updates. The type of the computation is set by
    `bf16` or `fp16`.
    """

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.path is None):
            raise ValueError(
                "a model is either `config` (trained from scratch) or `path` (goes on from"
                " weights); set exactly one of them"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError(
                '`config` names its architecture in `model_type`; add for example "model_type":'
                ' "llama"'
            )
        return self


class DataSection(Policy):
    """The text, its tokenizer, and how it is cut into sequences."""

    source: Literal["python-stdlib", "files", "jsonl", "datasets"] | None = None
    """Source of the text, which `plait train` requires. `files`: text files, one document each.
    `jsonl`: one JSON object per line, its text in `field`. `datasets`: a Hugging Face data set.
    `python-stdlib`: the sources of the running Python, which every machine has, to try a
    configuration."""
    paths: tuple[Place, ...] = ()
    """Files, folders or globs (`corpus/**/*.txt`) for `files` and `jsonl`; relative ones are taken
    from the working folder. For `datasets`, one folder written by `save_to_disk` or one name on the
    hub.
    """
    format: Literal["text", "chat", "instruct"] = "text"
    """Format of a row of `jsonl` or `datasets`. text: a text in `field`. chat: `messages`, a list
    of objects with `role` and `content`, put into the tokenizer's chat template, with the row's
    `tools` and `chat_template_kwargs`. instruct: `prompt` and `completion`, or `instruction`,
    `input` (which may be missing) and `output`: in the chat template, after the row's `system` and
    `history`, or one after the other where the tokenizer has no template. Pairs of preferences are
    for TRL's DPOTrainer.
    """
    ignored_columns: tuple[str, ...] = ()
    """Columns of `chat` and `instruct` that may be left out of account. Any other that is not read
    is refused.
    """
    field: str = "text"
    """The key (`jsonl`) or column (`datasets`) that holds the text."""
    scored: Literal["answers", "all"] = "answers"
    """Tokens of `chat` and `instruct` that the loss counts: those of the assistant's messages that
    do not have `"weight": 0`, or all.
    """
    append_end_of_text: Flag = False
    """End each row of `chat` and `instruct` with the tokenizer's end-of-text token, also where its
    chat template does not, so that the model learns to stop.
    """
    packing: Literal["documents"] | None = None
    """How documents become sequences. Left out: one after the other, cut at `sequence_length`
    wherever that is; attention sees all of a sequence. documents: as many as fit, whole, each with
    positions of its own, and attention stays within each; only one that is longer than
    `sequence_length` is cut, and what is left over is padding.
    """
    subset: str | None = None
    """Which configuration of a hub data set (`wikitext-2-raw-v1`)."""
    split: str = "train"
    """Which split of a data set to read. Validation text is held out of it, see
    `validation_fraction`.
    """
    streaming: Flag = False
    """Read the rows of `datasets` as they are needed, again for every epoch, and keep nothing: for
    what does not fit on the disk, or never ends. Every process reads and tokenises all rows. Needs
    a tokenizer, in `tokenizer` or `model.path`.
    """
    buffer_sequences: Annotated[Whole, Field(ge=1)] = 1024
    """With `streaming`: at least this many sequences are read and shuffled together. Validation
    text is held out of the first ones.
    """
    tokenizer: Place | None = None
    """A folder, a `tokenizer.json` or a hub name. Left out: the tokenizer in `model.path`; for a
    model from scratch, a byte-level BPE with `vocab_size` entries, trained on the training text and
    cached.
    """
    vocab_size: Annotated[Whole, Field(ge=257, le=MOST_TOKENS)] = 8192
    """Size of the tokenizer that is trained: 256 bytes, one end-of-text mark, and merges. Unused
    when a tokenizer is given.
    """
    sequence_length: Annotated[Whole, Field(ge=2, le=MOST_TOKENS)] = 256
    """Tokens in a training sequence. Documents are joined with an end-of-text mark between them and
    cut to this length.
    """
    validation_fraction: Fraction = 0.02
    """The share of documents held out for validation, chosen by a hash of each document: the same
    on every machine and in every run.
    """
    cache: LocalPlace | None = None
    """Where trained tokenizers and tokenised text are kept. Left out: `$PLAIT_CACHE`, or
    `~/.cache/plait`.
    """

    @field_validator("format", mode="before")
    @classmethod
    def _no_preferences(cls, value: object) -> object:
        if value == "preference":
            raise ValueError(
                "`plait train` has no loss of preferences; use TRL's DPOTrainer, wrapped by"
                " plait.hf.wrap"
            )
        return value

    @model_validator(mode="after")
    def _format_matches_source(self) -> Self:
        if self.format == "text":
            if self.ignored_columns or self.append_end_of_text:
                raise ValueError(
                    '`ignored_columns` and `append_end_of_text` belong to format "chat" and'
                    ' "instruct"; leave them out'
                )
            return self
        if self.source not in ("jsonl", "datasets"):
            raise ValueError(
                f'format "{self.format}" is of rows and source is "{self.source}"; set `source` to'
                ' "jsonl" or "datasets"'
            )
        if self.field != "text":
            raise ValueError(
                f'`field` is not read with format "{self.format}", whose columns have fixed names;'
                " leave it out"
            )
        return self

    @model_validator(mode="after")
    def _paths_match_source(self) -> Self:
        if self.source is None and self.paths:
            raise ValueError(
                '`paths` is read by a `source`, and there is none; set `source` to "files", "jsonl"'
                ' or "datasets"'
            )
        if self.source == "python-stdlib" and self.paths:
            raise ValueError(
                '`paths` is not read with source "python-stdlib"; set `source` to "files", "jsonl"'
                ' or "datasets"'
            )
        if self.source in ("files", "jsonl") and not self.paths:
            raise ValueError(
                f'source "{self.source}" needs at least one file, folder or glob; set `paths`'
            )
        if self.source == "datasets" and len(self.paths) != 1:
            raise ValueError(
                f'source "datasets" reads exactly one data set and `paths` has {len(self.paths)};'
                " name one folder or hub name"
            )
        if self.source != "datasets" and (self.subset is not None or self.split != "train"):
            raise ValueError(
                f'`subset` and `split` belong to source "datasets", not "{self.source}"; leave'
                " them out"
            )
        if self.source != "datasets" and self.streaming:
            raise ValueError(
                f'`streaming` belongs to source "datasets", not "{self.source}"; leave it out'
            )
        if (
            not self.streaming
            and self.buffer_sequences != type(self).model_fields["buffer_sequences"].default
        ):
            raise ValueError(
                "`buffer_sequences` is read with `streaming` alone; leave it out, or set"
                " `streaming` to true"
            )
        return self


class SampleSection(Policy):
    """A text that the model writes when the run ends."""

    prompt: str = Field(default="def ", min_length=1)
    """How the text begins."""
    tokens: Annotated[Whole, Field(ge=1)] = 64
    """How many tokens to add."""
    temperature: NotNegative = 0.8
    """0 takes the likeliest token each time; 1 samples from the model's own distribution."""
    top_k: Annotated[Whole, Field(ge=0)] = 50
    """Sample among the likeliest `top_k` tokens; 0 means all."""


class RunSection(Policy):
    """How long the run is, what it writes, and how often."""

    folder: LocalPlace = "runs/plait"
    """Where metrics, checkpoints, tokenizer and the resolved configuration are written. The same
    folder resumes.
    """
    steps: Annotated[Whole, Field(ge=1)] = 1000
    """Optimizer steps in the full run."""
    seed: Annotated[Whole, Field(ge=0)] = 0
    """Initial weights, order of the data, dropout and the sample follow from it."""
    processes: Annotated[Whole, Field(le=MOST_PROCESSES)] | Literal["auto"] = "auto"
    """Processes on this machine. `auto`: one a GPU; on a machine without GPUs two (one if it has a
    single core), or as many as the layout in `parallel` needs.
    """
    log_every: Annotated[Whole, Field(ge=1)] = 10
    """Steps between printed lines. The live display and `metrics.jsonl` have every step."""
    validate_every: Annotated[Whole, Field(ge=0)] = 0
    """Steps between validations; 0 validates only at the end."""
    validate_sequences: Annotated[Whole, Field(ge=1)] = 256
    """At most this many validation sequences are scored, the same ones each time and on every
    layout.
    """
    checkpoint_every: Annotated[Whole, Field(ge=0)] = 0
    """Steps between checkpoints; 0 leaves it to `checkpoint_minutes`. One is written at the end and
    when the run is interrupted.
    """
    checkpoint_minutes: NotNegative | None = None
    """Minutes after the last checkpoint, or the start, at which another one is written; 0 writes
    none by the clock. Left out: 30, and with `checkpoint_every` 0.
    """
    keep: Annotated[Whole, Field(ge=1)] = 2
    """How many checkpoints stay in the folder."""
    checkpoints: Place | None = None
    """Where checkpoints are written: a folder, or a store's URL (`s3://bucket/run`). Left out:
    `checkpoints/` in `folder`.
    """
    roll_backs: Annotated[Whole, Field(ge=0)] = 0
    """How often a run goes back to its last checkpoint after a step that faults.non_finite has
    raised for, and leaves its batch out then, or after replicas that differed. 0: such a step ends
    the run.
    """
    sample: SampleSection | None = None
    """A text written by the model at the end. Left out: none."""
    callbacks: tuple[str, ...] = ()
    """Your own functions, or classes of such, as `package.module:name`: called with (event, engine)
    for every event of `plait.events`, on every process. One that returns True ends the run after
    the next step, with a checkpoint.
    """
    trackers: tuple[TrackerSpec, ...] = ()
    """Trackers that record loss, learning rate, gradient norm and speed of every step, from the
    first process: `tensorboard`, `wandb`, `comet` and `csv_monitor`, or `{"wandb": {"project":
    "x"}}` with the settings of the section of that name in a DeepSpeed file.
    """

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds after which a checkpoint is due; 0 for none by the clock."""
        if self.checkpoint_minutes is not None:
            return self.checkpoint_minutes * 60
        return 0.0 if self.checkpoint_every else DEFAULT_CHECKPOINT_SECONDS

    @model_validator(mode="after")
    def _processes(self) -> Self:
        if self.processes != "auto" and self.processes < 1:
            raise ValueError(
                f"`processes` is {self.processes} and at least one process runs; use 1 or more, or"
                ' "auto"'
            )
        return self
