"""Megatron-LM's command line as a configuration: `["--tensor-model-parallel-size", "4", "--bf16",
"--lr", "1e-4"]`.

Flags become the tree of keys that they set (`megatron_flags` says which); from there on it is a
configuration like any other. A flag is reported under its own name. What flags leave out has
Megatron-LM's default where that is another than Plait's; an optimizer and its schedule are
described as soon as a flag says something of them, which then takes --lr.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.config.convert.megatron_flags import (
    DEFAULTS,
    DISTRIBUTED,
    FLAGS,
    LAYERS_PER_STAGE,
    OF_BF16,
    OF_FP16,
    OF_OPTIMIZER,
    Flag,
)
from plait.config.convert.translated import Said, Translated, put
from plait.config.dialects.keys import nearest
from plait.config.reading.source import scalar
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, Problem


def read_flags(tokens: Sequence[str]) -> Translated:
    """The tree that a list of flags sets. Raises ConfigError where the list is no list of flags;
    other problems are collected.
    """
    rows: list[Row] = []
    problems: list[Problem] = []
    said: Said = {}
    for shown, values in _split(tokens):
        flag = FLAGS.get(shown[2:].replace("-", "_"))
        if flag is None:
            problems.append(Problem(shown, None, "unknown flag", _remedy(shown)))
            continue
        try:
            value = _value(flag, values)
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            problems.append(Problem(shown, " ".join(values) or None, rule, remedy))
            continue
        if flag.status is Status.REFUSED and value not in flag.off:
            problems.append(Problem(shown, value if values else None, flag.why, flag.remedy))
        elif flag.status is Status.SUPPORTED:
            before = said.setdefault(flag.target, (shown, value))
            if before[1] != value:
                rule = f"{before[0]} says {before[1]!r}; both set {flag.target} and disagree"
                problems.append(Problem(shown, value, rule, "keep one of them"))
        rows.append(_row(shown, flag, value))
    return _finish(said, rows, problems)


def _finish(said: Said, rows: list[Row], problems: list[Problem]) -> Translated:
    _sharding(said, problems)
    _stages(said, problems)
    first = said.pop("optimizer.params.beta1", None)
    second = said.pop("optimizer.params.beta2", None)
    if first or second:
        given = first or second
        assert given is not None
        said["optimizer.params.betas"] = (
            given[0],
            [first[1] if first else 0.9, second[1] if second else 0.999],
        )
    written = {target: shown for target, (shown, _) in said.items()}
    defaults = {
        path: value for path, value in _defaults(said, problems).items() if path not in said
    }
    tree: dict[str, Any] = {}
    for target, value in {**{path: value for path, (_, value) in said.items()}, **defaults}.items():
        put(tree, target, value)
    return Translated(
        "the command line",
        tree,
        "Megatron",
        "flag",
        tuple(rows),
        tuple(problems),
        written,
        frozenset(defaults),
    )


def _sharding(said: Said, problems: list[Problem]) -> None:
    """The distributed optimizer is ZeRO 1, where no strategy of sharding says more."""
    distributed = said.pop(DISTRIBUTED, None)
    stage = said.get("zero_optimization.stage")
    if distributed is None or (
        stage is not None and stage[0] == "--data-parallel-sharding-strategy"
    ):
        return
    if stage is not None:
        rule = f"{stage[0]} says {stage[1]}; both set zero_optimization.stage and disagree"
        problems.append(Problem(distributed[0], distributed[1], rule, "keep one of them"))
        return
    said["zero_optimization.stage"] = distributed


def _stages(said: Said, problems: list[Problem]) -> None:
    """Layers of a virtual stage are the stages of a rank, for layers that are given."""
    asked = said.pop(LAYERS_PER_STAGE, None)
    if asked is None:
        return
    numbers = [asked[1], *(said.get(path, ("", 1))[1] for path in ("num_layers", "parallel.pp"))]
    if "num_layers" not in said or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers
    ):
        rule = (
            "the stages of a rank are --num-layers / --pipeline-model-parallel-size / this, and not"
            " all three are whole numbers"
        )
        problems.append(
            Problem(
                asked[0], asked[1], rule, "give them, or --num-virtual-stages-per-pipeline-rank"
            )
        )
        return
    each, layers, pp = numbers
    if layers % (pp * each):
        rule = (
            f"{layers} layers over {pp} x {each}: {layers} % {pp * each} = {layers % (pp * each)}"
        )
        problems.append(
            Problem(asked[0], each, rule, "use a number that divides the layers of a rank")
        )
        return
    said["parallel.pipeline.stages_per_rank"] = (asked[0], layers // pp // each)


def _defaults(said: Said, problems: list[Problem]) -> dict[str, Any]:
    """What Megatron-LM takes for flags that are left out, by path."""
    found = dict(DEFAULTS)
    if "fp16.enabled" in said:
        found |= OF_FP16
    if "bf16.enabled" in said:
        found |= OF_BF16
    if said.get("parallel.recompute.mode", ("", ""))[1] == "selective":
        found["parallel.recompute.keep"] = ["matmul"]
    described = [
        (path, shown)
        for path, (shown, _) in said.items()
        if path.startswith(("optimizer.", "scheduler."))
    ]
    if not described:
        return found
    if "optimizer.params.lr" not in said:
        rule = (
            f"{described[0][1]} describes an optimizer, and Megatron-LM has no default for its"
            " learning rate"
        )
        problems.append(Problem("--lr", None, rule, "give it"))
    kind = said.get("optimizer.type", ("", "AdamW"))[1]
    found["optimizer.type"] = kind
    found |= {
        f"optimizer.params.{name}": value for name, value in OF_OPTIMIZER.get(kind, {}).items()
    }
    return found | {
        "scheduler.type": "MegatronLR",
        "scheduler.params.decay_style": "linear",
        "scheduler.params.total_num_steps": "auto",
    }


def _row(shown: str, flag: Flag, value: Any) -> Row:
    if flag.status is Status.SUPPORTED:
        return Row(shown, value, Status.RENAMED, f"{flag.target} (Megatron's flag)", flag.target)
    if flag.status is Status.REFUSED and value in flag.off:
        return Row(
            shown,
            value,
            Status.IGNORED,
            f"this value asks for nothing; another would be refused: {flag.why}",
        )
    return Row(shown, value, flag.status, flag.why)


def _split(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """[("--lr", ["1e-4"]), ("--bf16", [])]. A value may follow its flag or be joined to it with
    `=`.
    """
    found: list[tuple[str, list[str]]] = []
    for token in tokens:
        if not isinstance(token, str):
            raise ConfigError(
                Problem("the command line", token, "flags and their values are texts", "quote it")
            )
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(token)
        else:
            raise ConfigError(
                Problem(
                    "the command line",
                    token,
                    "begins with a value and not with a flag",
                    "begin with a flag such as --bf16",
                )
            )
    return found


def _value(flag: Flag, values: list[str]) -> Any:
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
    return flag.convert(parsed) if flag.convert else parsed


def _remedy(shown: str) -> str:
    near = nearest(shown[2:], FLAGS)
    if near:
        return f"did you mean {' or '.join('--' + name.replace('_', '-') for name in near)}?"
    return (
        "leave it out, or set the key of the file that it stands for (`plait config schema` lists"
        " them)"
    )
