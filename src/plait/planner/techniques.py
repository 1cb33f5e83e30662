"""Techniques that the search may propose, and their restrictions per model family.

`parallel.order.UNSUPPORTED_COMBINATIONS` lists the pairs of techniques that do not work together.

`split_of` returns the restrictions of tensor, context and pipeline parallelism for a model family.
The engine decides from the model itself (`model.plans`); tests build every family of this module
and compare the results. For other families no tensor parallelism is planned, and the plan prints
the reason.

`parse_fixed` parses layout fields that a user fixes: `tp=4`, `stage=3`, `recompute=full`.

Note [Memory-saving options]
    The options that reduce the memory of a layout are recomputation, a chunked loss, and the
    optimizer on the host. A `MemoryOption` is one combination of their values. A layout is first
    estimated without options (the least computation) and with all of them (the least memory). These
    are the `ends` of `MemoryOptions`. Combinations between the ends are tried only for layouts that
    fit with all options but do not fit without options. The optimizer is moved to the host only if
    nothing else fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.cluster.layout import Layout
from plait.errors import ConfigError, Problem
from plait.model.experts import SPLIT_FAMILIES
from plait.parallel.context.families import FAMILIES
from plait.parallel.order import refuse_incompatible
from plait.parallel.schedules import schedule as tables
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.planner.architecture import Architecture
from plait.planner.hardware import DEVICE_FAMILIES, DeviceSpec, Numbers
from plait.planner.job import CONTEXT, RECOMPUTE, SCHEDULES, Layouts

SCHEDULE_NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved-1f1b",
    "interleaved-zb": "interleaved-zero-bubble",
    "zbv": "zbv",
    "dualpipev": "dualpipev",
}
"""Names of `parallel.schedules.schedule`, keyed by the planner's names of schedules.

Other schedules are estimated for published runs only.
"""
RECOMPUTE_NAMES = {
    "none": "none",
    "full": "full",
    "operators": "selective",
    "selective": "attention",
    "budget": "budget",
}
"""Names of `parallel.recompute.mode`, keyed by the planner's names of recomputation modes."""
RECOMPUTE_FIXED = ("none", "full", "selective")
"""Modes that a file can fix. A budget is only known after the plan has chosen it."""
SCHEDULE_INDEX = {
    name: SCHEDULES.index(planner_name) for planner_name, name in SCHEDULE_NAMES.items()
}
RECOMPUTE_INDEX = {
    RECOMPUTE_NAMES[planner_name]: index for index, planner_name in enumerate(RECOMPUTE)
}
"""Indices into RECOMPUTE by the names of the configuration. SCHEDULE_INDEX is that of SCHEDULES."""
SPLIT_BACKWARD = tuple(
    planner_name
    for planner_name, name in SCHEDULE_NAMES.items()
    if tables.SCHEDULES[name].splits_backward
)
"""Schedules that defer the gradients of weights, which ZeRO stage 3 refuses."""


@dataclass(frozen=True)
class AvailableTechniques:
    """Techniques and pipeline schedules that a plan may use."""

    pipeline: bool
    schedules: tuple[str, ...]
    """Names in SCHEDULES that a pipeline of several stages may use."""
    recompute: tuple[str, ...]
    """Names in RECOMPUTE."""
    offload: bool
    """True if the optimizer can be on the host."""
    compiled: bool
    """True if blocks are compiled, which some layouts do not support."""

    def refusal(self, *, tp: int, pp: int) -> str | None:
        """Return the reason why these degrees are not supported, or None if they are."""
        try:
            refuse_incompatible(
                TechniqueContext(Layout(pp=pp, tp=tp), (Compile(enabled=self.compiled),))
            )
        except ConfigError as error:
            return error.problems[0].rule
        return None

    def runs(self, schedule: str, *, pp: int, micro_batches: int, chunks: int, zero: int) -> bool:
        """Return True if `schedule` exists for these numbers and supports ZeRO stage `zero`."""
        if zero == 3 and schedule in SPLIT_BACKWARD:
            return False
        return micro_batches >= pp and not tables.problems_of(
            SCHEDULE_NAMES[schedule], pp=pp, microbatches=micro_batches, stages_per_rank=chunks
        )


def available_techniques(*, compiled: bool = False) -> AvailableTechniques:
    """Return the techniques that a plan may use, with or without compiled blocks."""
    kinds = ("none", "full") if compiled else ("none", "full", "operators", "budget")
    techniques = AvailableTechniques(True, tuple(SCHEDULE_NAMES), kinds, True, compiled)
    return replace(techniques, pipeline=techniques.refusal(tp=1, pp=2) is None)


WHOLE_ATTENTION = (
    "gpt2",
    "gpt_bigcode",
    "codegen",
    "bloom",
    "mpt",
    "phi3",
    "olmo2",
    "glm",
    "glm4",
)
"""Families with fused or jointly normalized queries, keys and values.

Their projections are split and the outputs gathered, so that every rank computes all heads.
"""
SPLIT = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "olmo",
    "granite",
    "cohere",
    "cohere2",
    "starcoder2",
    "gptj",
    "stablelm",
    "gpt_neox",
    "smollm3",
    "persimmon",
    "nemotron",
    "exaone4",
    "helium",
    "opt",
    *WHOLE_ATTENTION,
)
"""Families whose layers tensor parallelism can split."""
_NO_SEQUENCE = {"opt": "OPT's blocks flatten batch and sequence into one dimension before the MLP"}


@dataclass(frozen=True)
class Split:
    """Reasons why a model does not support tensor, sequence, context or pipeline parallelism.

    A reason is None if the model supports the technique.
    """

    tensor: str | None = None
    """Reason against tensor parallelism."""
    sequence: str | None = None
    """Reason against sequence parallelism."""
    replicates_attention: bool = False
    """True if tensor parallelism computes attention on all ranks. See `Job`."""
    context: str | None = None
    """Reason against context parallelism."""
    pipeline: str | None = None
    """Reason against pipeline stages."""
    with_experts: bool = False
    """True if tensor parallelism requires that ep splits the experts over its ranks.

    Otherwise each of these ranks would compute all experts.
    """


def split_of(model: Architecture) -> Split:
    """Return which kinds of parallelism a model does not support, with the reasons."""
    kind = str(model.model_type)
    context = None
    if kind not in FAMILIES:
        context = (
            f"{kind} is not among the families whose sequences can be split: {', '.join(FAMILIES)}"
        )
    split = Split(context=context, pipeline=str(model.uncut) or None)
    without_tensor = replace(split, sequence="no tensor parallelism")
    if model.experts and (kind not in SPLIT_FAMILIES or model.latent_rank):
        rule = f"the planner does not split attention of {kind}, which has experts"
        return replace(without_tensor, tensor=rule)
    if model.experts:
        return replace(split, with_experts=True)
    if kind not in SPLIT:
        rule = (
            f"the planner does not know how to split {kind}; `plait layout` derives it from the"
            " model itself"
        )
        return replace(without_tensor, tensor=rule)

    dropout = bool(model.dropout or model.attention_dropout or model.embedding_dropout)
    whole_attention = kind in WHOLE_ATTENTION
    sequence = _NO_SEQUENCE.get(kind)
    if sequence is None and dropout and whole_attention:
        sequence = (
            "the model has dropout, and every rank computes all heads, of which each rank would"
            " drop different elements"
        )

    if context is None and dropout:
        context = (
            "the model has dropout, and ranks with parts of a sequence draw other masks than one"
            " process"
        )
    return replace(split, sequence=sequence, replicates_attention=whole_attention, context=context)


LOSS_CHUNK = 1024
"""Tokens per chunk of the loss."""
ON_HOST = (0.25, 0.5, 0.75, 1.0)
"""Shares of the parameters whose optimizer states are on the host.

The other parameters are updated on the device, which is faster.
"""


@dataclass(frozen=True)
class MemoryOption:
    """Combination of memory-saving options, as values of fields of `Layouts`."""

    recompute: int = 0
    every: int = 1
    kept_operators: float = 0.0
    loss_chunk: int = 0
    offload: float = 0.0


@dataclass(frozen=True)
class MemoryOptions:
    """Combinations of memory-saving options that the search may try.

    See Note [Memory-saving options].
    """

    on_device: tuple[MemoryOption, ...]
    """Options with the optimizer on the device, the lightest first.

    If the optimizer is fixed to the host, these are the options with the optimizer on the host.
    """
    on_host: tuple[MemoryOption, ...]
    """Options with the optimizer on the host.

    There are none if the place of the optimizer is fixed, or if it cannot be the host.
    """

    @property
    def ends(self) -> tuple[MemoryOption, ...]:
        """Combinations that are tried first: the one without options, and those with least memory.

        Those with the least memory have the optimizer on the device or on the host, with or without
        recomputation. The ones without recomputation are for schedules with split backwards, which
        do not support it.
        """
        ends = [*self.on_device[:1]]
        for options in (self.on_device, self.on_host):
            without = [option for option in options if not option.recompute]
            ends += [*without[-1:], *options[-1:]]
        return tuple(dict.fromkeys(ends))

    def between(self, *, on_host: bool) -> tuple[MemoryOption, ...]:
        """Return the combinations that are not in `ends`, with the optimizer on host or device."""
        ends = self.ends
        options = self.on_host if on_host else self.on_device
        return tuple(option for option in options if option not in ends)


def memory_options(
    techniques: AvailableTechniques, device: DeviceSpec, fixed: Mapping[str, int]
) -> MemoryOptions:
    """Return the combinations of memory-saving options that a device and the fixed fields allow."""
    full, operators, budget = (RECOMPUTE.index(name) for name in ("full", "operators", "budget"))
    kinds = {
        "none": [MemoryOption()],
        "selective": [MemoryOption(RECOMPUTE.index("selective"))],
        "operators": [MemoryOption(operators, every) for every in (4, 2, 1)],
        "budget": [MemoryOption(budget, kept_operators=share) for share in (0.75, 0.5, 0.25)],
        "full": [MemoryOption(full, every) for every in (4, 3, 2, 1)],
    }
    if fixed.get("every", 1) > 1:
        # An interval has no meaning for blocks that do not recompute.
        kinds |= {"none": [], "selective": []}
    if "every" in fixed:
        kinds |= {
            "operators": [MemoryOption(operators, fixed["every"])],
            "full": [MemoryOption(full, fixed["every"])],
            "budget": [],
        }

    chunks = (fixed["loss_chunk"],) if "loss_chunk" in fixed else (0, LOSS_CHUNK)
    options: list[MemoryOption] = []
    for kind, choices in kinds.items():
        is_allowed = fixed.get("recompute", RECOMPUTE.index(kind)) == RECOMPUTE.index(kind)
        if kind in techniques.recompute and is_allowed:
            for choice in choices:
                options += [replace(choice, loss_chunk=tokens) for tokens in chunks]

    shares = (fixed["offload"] / 100,) if fixed.get("offload", 0) else ON_HOST
    on_host: tuple[MemoryOption, ...] = ()
    for share in shares:
        on_host += tuple(replace(option, offload=share) for option in options)

    # The memory of a CPU device is host memory already.
    has_offload = techniques.offload and int(device.family) != DEVICE_FAMILIES.index("cpu")
    if fixed.get("offload", 0):
        return MemoryOptions(on_host if has_offload else (), ())
    return MemoryOptions(tuple(options), on_host if has_offload and "offload" not in fixed else ())


def splits_backward(schedule: Numbers) -> NDArray[np.bool_]:
    """Return True if a schedule (an index into SCHEDULES) has split backwards."""
    return np.isin(np.asarray(schedule), [SCHEDULES.index(name) for name in SPLIT_BACKWARD])


def supports_options(layouts: Layouts) -> NDArray[np.bool_]:
    """Return for each layout whether it supports its memory-saving options.

    Split backwards do not support recomputation. A recomputation budget does not support expert
    parallelism. Optimizer states on the host require ZeRO stage 1 or higher, and no expert
    parallelism.
    """
    recompute = np.asarray(layouts.recompute)
    budget = recompute == RECOMPUTE.index("budget")
    split = np.asarray(layouts.ep) > 1
    on_host = np.asarray(layouts.offload) > 0

    return (
        ~((recompute > 0) & splits_backward(layouts.schedule))
        & ~(budget & split)
        & ~(on_host & (split | (np.asarray(layouts.stage) == 0)))
    )


def with_options(layouts: Layouts, options: tuple[MemoryOption, ...]) -> Layouts:
    """Return every layout with every combination of `options` that it supports."""
    count = np.size(layouts.tp)
    columns = {}
    for f in fields(MemoryOption):
        columns[f.name] = np.tile([getattr(option, f.name) for option in options], count)
    # Every layout with all of the options, then the next layout: [layouts * options].
    candidates = replace(layouts.take(np.repeat(np.arange(count), len(options))), **columns)
    return candidates.take(supports_options(candidates))


FIXABLE = (
    "tp",
    "pp",
    "sp",
    "vpp",
    "schedule",
    "cp",
    "context",
    "ep",
    "dp_replicate",
    "dp_shard",
    "stage",
    "recompute",
    "every",
    "offload",
    "loss_chunk",
    "micro_batch",
    "accumulation",
)
"""Fields that a user can fix."""
_MAX_DIGITS = 9
"""Digits of the largest degree or count that is accepted."""
_OTHER_NAMES = {
    "zero": "stage",
    "mbs": "micro_batch",
    "micro-batch": "micro_batch",
    "dp-shard": "dp_shard",
    "dp-replicate": "dp_replicate",
}
_NAMED_VALUES = {
    "schedule": {name: SCHEDULES.index(name) for name in ("none", *SCHEDULE_NAMES)}
    | SCHEDULE_INDEX,
    # Plans do not offer to recompute the core of attention alone.
    "recompute": {name: at for name, at in RECOMPUTE_INDEX.items() if name != "attention"},
    "context": {name: index for index, name in enumerate(CONTEXT)},
    "offload": {
        "none": 0,
        **{f"{share:.0%}": round(100 * share) for share in ON_HOST if share < 1},
        "all": 100,
    },
}
"""Values with names, as a configuration writes them."""
_BOUNDS = {"sp": (0, 1), "stage": (0, 3), "loss_chunk": (0, 10**_MAX_DIGITS - 1)}


def parse_fixed(texts: list[str] | tuple[str, ...]) -> dict[str, int]:
    """Parse strings such as `tp=4`, `stage=3`, `recompute=full`, or several separated by commas.

    Returns:
        Numbers keyed by layout field. Names become an index (`recompute`, `schedule`, `context`)
        or a percentage (`offload`).

    Raises:
        ConfigError: A field or value is unknown, or a field has two values.
    """
    fixed: dict[str, int] = {}
    for text in (part.strip() for argument in texts for part in argument.split(",")):
        name, _, value = text.partition("=")
        name = name.strip()
        value = value.strip()
        key = _OTHER_NAMES.get(name, name)
        if key not in FIXABLE or not value:
            raise ConfigError(
                Problem(
                    text,
                    None,
                    "must be FIELD=VALUE, where FIELD is a field of a layout",
                    f"use one of {', '.join(FIXABLE)}, for example tp=4",
                )
            )
        values = _NAMED_VALUES.get(key)
        if values is not None:
            if value not in values:
                raise ConfigError(
                    Problem(
                        name,
                        value,
                        "not a supported value",
                        f"use {', '.join(values)}",
                    )
                )
            number = values[value]
        else:
            if value.lower() in ("true", "false", "yes", "no"):
                value = str(int(value.lower() in ("true", "yes")))
            number = -1
            if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
                number = int(value)
            least, most = _BOUNDS.get(key, (1, 10**_MAX_DIGITS - 1))
            if not least <= number <= most:
                raise ConfigError(
                    Problem(
                        name,
                        value,
                        f"not a whole number from {least} to {most}",
                        f"write for example {name}={max(least, 1)}",
                    )
                )
        if fixed.get(key, number) != number:
            raise ConfigError(
                Problem(
                    name,
                    value,
                    "is given twice, with different values",
                    "keep one of them",
                )
            )
        fixed[key] = number

    return fixed


def format_fixed(fixed: Mapping[str, int]) -> str:
    """Return fixed fields as a string that `parse_fixed` can parse."""
    texts = []
    for key, value in fixed.items():
        names = {number: name for name, number in _NAMED_VALUES.get(key, {}).items()}
        texts.append(f"{key}={names.get(value, value)}")
    return ", ".join(texts)
