"""Conversion of Megatron-LM's command line, such as `["--bf16", "--lr", "1e-4"]`.

`megatron_flags` lists the setting of each flag. Flags that are left out have Megatron-LM's default
if it differs from Plait's. The optimizer and its schedule are converted if any flag describes them;
--lr is then required.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.config.convert.megatron_flags import (
    BF16_DEFAULTS,
    DEFAULTS,
    DISTRIBUTED,
    FLAGS,
    FP16_DEFAULTS,
    LAYERS_PER_STAGE,
    OPTIMIZER_DEFAULTS,
    Flag,
)
from plait.config.convert.translated import Settings, TranslatedDocument, set_path
from plait.config.dialects.keys import nearest
from plait.config.reading.source import scalar
from plait.config.schema.provenance import KeyReport, Status
from plait.errors import ConfigError, Problem
from plait.units import is_count


def read_flags(tokens: Sequence[str]) -> TranslatedDocument:
    """Translate a list of flags. Problems of single flags are collected.

    Raises:
        ConfigError: The list does not consist of flags and their values.
    """
    rows: list[KeyReport] = []
    problems: list[Problem] = []
    settings: Settings = {}
    for name, values in _split(tokens):
        flag = FLAGS.get(name[2:].replace("-", "_"))
        if flag is None:
            problems.append(Problem(name, None, "unknown flag", _unknown_remedy(name)))
            continue
        try:
            value = _parse_value(flag, values)
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            problems.append(Problem(name, " ".join(values) or None, rule, remedy))
            continue

        if flag.status is Status.REFUSED and value not in flag.off:
            shown_value = value if values else None
            problems.append(Problem(name, shown_value, flag.why, flag.remedy))
        elif flag.status is Status.SUPPORTED:
            other, other_value = settings.setdefault(flag.target, (name, value))
            if other_value != value:
                rule = f"{other} says {other_value!r}; both set {flag.target} and disagree"
                problems.append(Problem(name, value, rule, "keep one of them"))
        rows.append(_row(name, flag, value))

    _combine_flags(settings, problems)
    return _build_document(settings, rows, problems)


def _combine_flags(settings: Settings, problems: list[Problem]) -> None:
    """Replace flags whose meaning depends on other flags by the settings that they stand for."""
    _set_stage(settings, problems)
    _set_stages_per_rank(settings, problems)

    # Megatron-LM has a flag for each of Adam's betas.
    first = settings.pop("optimizer.params.beta1", None)
    second = settings.pop("optimizer.params.beta2", None)
    beta = first or second
    if beta is not None:
        betas = [first[1] if first else 0.9, second[1] if second else 0.999]
        settings["optimizer.params.betas"] = (beta[0], betas)


def _build_document(
    settings: Settings, rows: list[KeyReport], problems: list[Problem]
) -> TranslatedDocument:
    defaults = _defaults(settings, problems)
    defaults = {path: value for path, value in defaults.items() if path not in settings}
    tree: dict[str, Any] = {}
    for path, (_, value) in settings.items():
        set_path(tree, path, value)
    for path, value in defaults.items():
        set_path(tree, path, value)
    return TranslatedDocument(
        "the command line",
        tree,
        "Megatron",
        "flag",
        tuple(rows),
        tuple(problems),
        {path: name for path, (name, _) in settings.items()},
        tuple(defaults),
    )


def _set_stage(settings: Settings, problems: list[Problem]) -> None:
    """Translate the distributed optimizer, which is ZeRO 1 unless a sharding strategy is given."""
    distributed = settings.pop(DISTRIBUTED, None)
    stage = settings.get("zero_optimization.stage")
    if distributed is None:
        return
    if stage is None:
        settings["zero_optimization.stage"] = distributed
    elif stage[0] != "--data-parallel-sharding-strategy":
        rule = f"{stage[0]} says {stage[1]}; both set zero_optimization.stage and disagree"
        problems.append(Problem(distributed[0], distributed[1], rule, "keep one of them"))


def _set_stages_per_rank(settings: Settings, problems: list[Problem]) -> None:
    """Translate the layers per virtual stage to stages per rank, which needs all layers."""
    flag = settings.pop(LAYERS_PER_STAGE, None)
    if flag is None:
        return
    name, layers_per_stage = flag
    _, layers = settings.get("num_layers", ("", None))
    _, pp = settings.get("parallel.pp", ("", 1))
    if not all(map(is_count, (layers_per_stage, layers, pp))):
        rule = (
            "the stages of a rank are --num-layers / --pipeline-model-parallel-size / this, and not"
            " all three are whole numbers"
        )
        remedy = "give them, or --num-virtual-stages-per-pipeline-rank"
        problems.append(Problem(name, layers_per_stage, rule, remedy))
        return

    divisor = pp * layers_per_stage
    if layers % divisor:
        rule = (
            f"{layers} layers over {pp} x {layers_per_stage}: {layers} % {divisor} ="
            f" {layers % divisor}"
        )
        remedy = "use a number that divides the layers of a rank"
        problems.append(Problem(name, layers_per_stage, rule, remedy))
        return
    settings["parallel.pipeline.stages_per_rank"] = (name, layers // divisor)


def _defaults(settings: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Return Megatron-LM's defaults that differ from Plait's, by path."""
    defaults = dict(DEFAULTS)
    if "fp16.enabled" in settings:
        defaults |= FP16_DEFAULTS
    if "bf16.enabled" in settings:
        defaults |= BF16_DEFAULTS
    # Megatron-LM's selective mode recomputes only the core of attention.
    _, mode = settings.get("parallel.recompute.mode", ("", ""))
    if mode == "selective":
        defaults["parallel.recompute.keep"] = ["matmul"]

    # Without a flag of the optimizer, the script builds its own.
    optimizer_flags = [
        name
        for path, (name, _) in settings.items()
        if path.startswith(("optimizer.", "scheduler."))
    ]
    if not optimizer_flags:
        return defaults
    if "optimizer.params.lr" not in settings:
        rule = (
            f"{optimizer_flags[0]} describes an optimizer, and Megatron-LM has no default for its"
            " learning rate"
        )
        problems.append(Problem("--lr", None, rule, "give it"))

    _, kind = settings.get("optimizer.type", ("", "AdamW"))
    defaults["optimizer.type"] = kind
    for name, value in OPTIMIZER_DEFAULTS.get(kind, {}).items():
        defaults[f"optimizer.params.{name}"] = value
    defaults["scheduler.type"] = "MegatronLR"
    defaults["scheduler.params.decay_style"] = "linear"
    defaults["scheduler.params.total_num_steps"] = "auto"
    return defaults


def _row(name: str, flag: Flag, value: Any) -> KeyReport:
    if flag.status is Status.SUPPORTED:
        return KeyReport(
            name, value, Status.RENAMED, f"{flag.target} (Megatron's flag)", flag.target
        )
    if flag.status is Status.REFUSED and value in flag.off:
        meaning = f"this value asks for nothing; another would be refused: {flag.why}"
        return KeyReport(name, value, Status.IGNORED, meaning)
    return KeyReport(name, value, flag.status, flag.why)


def _split(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the flags with their values: [("--lr", ["1e-4"]), ("--bf16", [])].

    A value follows its flag, or is joined to it with `=`.
    """
    flags: list[tuple[str, list[str]]] = []
    for token in tokens:
        if not isinstance(token, str):
            raise ConfigError(
                Problem("the command line", token, "flags and their values are texts", "quote it")
            )
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            _, values = flags[-1]
            values.append(token)
        else:
            rule = "begins with a value and not with a flag"
            remedy = "begin with a flag such as --bf16"
            raise ConfigError(Problem("the command line", token, rule, remedy))
    return flags


def _parse_value(flag: Flag, values: list[str]) -> Any:
    if flag.takes == "switch":
        if values:
            raise ValueError("takes no value; leave the value out")
        parsed: Any = True
    elif flag.takes == "values":
        parsed = values
    elif len(values) != 1:
        raise ValueError(f"takes one value and {len(values)} are given; write one after it")
    else:
        parsed = scalar(values[0])

    if flag.convert is None:
        return parsed
    return flag.convert(parsed)


def _unknown_remedy(name: str) -> str:
    matches = nearest(name[2:], FLAGS)
    if matches:
        names = ["--" + match.replace("_", "-") for match in matches]
        return f"did you mean {' or '.join(names)}?"
    return (
        "leave it out, or set the key of the file that it stands for (`plait config schema` lists"
        " them)"
    )
