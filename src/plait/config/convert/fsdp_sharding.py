"""FSDP's version and strategy of sharding, as a stage of ZeRO and a degree of sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config.convert.fsdp_keys import HYBRID, STRATEGIES, resharded, strategy_named
from plait.config.convert.translated import ForeignKey, Reading, truth
from plait.config.schema.provenance import Row, Status
from plait.errors import Problem

STAGE = "zero_optimization.stage"
SHARD = "parallel.dp_shard"
STRATEGY = "sharding_strategy"
NAMES = ("version", STRATEGY, "reshard_after_forward")
"""The keys that are read here, without `fsdp_`."""
_NOT_READ = (
    "`accelerate launch` takes FULL_SHARD all the same, the default of fsdp_sharding_strategy,"
    " which it reads first"
)


def read_sharding(
    found: Reading,
    given: Mapping[str, tuple[str, Any]],
    *,
    version: int,
    group: int | None,
    launched: bool,
) -> None:
    """Say the stage that `given` (name without `fsdp_` -> (key as written, value)) asks for.

    version: FSDP's where none is given. group: processes of a machine, over which a hybrid strategy
    shards; None where they are not known. launched: by Accelerate, which reads a strategy under
    both names at version 1.
    """
    shown, written = given.get("version", ("fsdp_version", None))
    if written is not None:
        if str(written) not in ("1", "2"):
            found.refuse(shown, written, "FSDP has the versions 1 and 2", "use 2")
            return
        version = int(written)
        found.rows.append(
            Row(
                shown,
                written,
                Status.IGNORED,
                f"says how the other keys are read: those of FSDP{version}",
            )
        )
    for name in (STRATEGY, "reshard_after_forward"):
        if name in given and given[name][1] is not None:
            _read_strategy(found, given, name, version=version, group=group, launched=launched)


def _read_strategy(
    found: Reading,
    given: Mapping[str, tuple[str, Any]],
    name: str,
    *,
    version: int,
    group: int | None,
    launched: bool,
) -> None:
    (shown, value), older = given[name], name == STRATEGY
    if version == 2 and older:
        _of_another_version(found, shown, value)
        return
    if version == 2:
        found.take(
            shown, ForeignKey(shown, Status.SUPPORTED, "any", "", sets=resharded), truth(value)
        )
        return
    if isinstance(value, bool):
        found.refuse(
            shown,
            value,
            "is a strategy's name in FSDP1 (fsdp_version 1)",
            "use FULL_SHARD or SHARD_GRAD_OP, or fsdp_version 2",
        )
        return
    try:
        strategy = strategy_named(value)
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        found.refuse(shown, value, rule, remedy)
        return
    stage = STRATEGIES[strategy]
    found.say(STAGE, shown, stage)
    if strategy in HYBRID:
        _shard_inside_machines(found, shown, value, group, launched)
    else:
        note = f"{STAGE} {stage}"
        if launched and not older and stage != 3 and STRATEGY not in given:
            note += f" ({_NOT_READ})"
        found.rows.append(Row(shown, value, Status.RENAMED, note, STAGE))


def _shard_inside_machines(
    found: Reading, shown: str, value: Any, group: int | None, launched: bool
) -> None:
    if group is None:
        rule = "shards inside of a machine, and the file does not say how many processes that is"
        remedy = (
            "give num_processes and num_machines"
            if launched
            else "write full_shard, and set parallel.dp_shard in what is written"
        )
        found.refuse(shown, value, rule, remedy)
        return
    found.say(SHARD, shown, group)
    found.rows.append(
        Row(
            shown,
            value,
            Status.RENAMED,
            f"{STAGE} and {SHARD} (the {group} processes of a machine)",
            STAGE,
        )
    )


def _of_another_version(found: Reading, shown: str, value: Any) -> None:
    """FSDP2 has no strategies: Accelerate does not read this one."""
    try:
        strategy = strategy_named(value)
    except ValueError:
        strategy = ""
    if strategy == "FULL_SHARD":
        found.ignore(shown, value, "FSDP2 does not read it; fsdp_reshard_after_forward decides")
        return
    rule = "is a key of FSDP1 and fsdp_version is 2, so Accelerate does not read it"
    found.problems.append(
        Problem(
            shown,
            value,
            rule,
            "leave it out and write fsdp_reshard_after_forward, or use fsdp_version 1",
        )
    )
    found.rows.append(Row(shown, value, Status.REFUSED, rule))
