"""Conversion of FSDP's version and sharding strategy to a ZeRO stage and a degree of sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.config.convert.fsdp_keys import HYBRID, STRATEGIES, reshard_settings, strategy_named
from plait.config.convert.translated import ForeignKey, Translation, parse_flag
from plait.config.schema.provenance import KeyReport, Status

STAGE = "zero_optimization.stage"
SHARD = "parallel.dp_shard"
STRATEGY = "sharding_strategy"
RESHARD = "reshard_after_forward"
SHARDING_KEYS = ("version", STRATEGY, RESHARD)
"""Keys that are read in this module, without the prefix `fsdp_`."""
_NOT_READ = (
    "`accelerate launch` takes FULL_SHARD all the same, the default of fsdp_sharding_strategy,"
    " which it reads first"
)


@dataclass(frozen=True)
class ShardingKeys:
    """Keys of FSDP that determine the sharding."""

    written: Mapping[str, tuple[str, Any]]
    """Keys by name without `fsdp_`: the key as written, and its value."""
    version: int
    """Version of FSDP if no key sets it."""
    processes_per_machine: int | None
    """Processes over which a hybrid strategy shards; None if they are not known."""
    launched: bool
    """True for a file of `accelerate launch`, which reads FSDP1's strategy under both names."""


def read_sharding(translation: Translation, keys: ShardingKeys) -> None:
    """Set the ZeRO stage and the degree of sharding. Problems are collected."""
    version = keys.version
    shown, value = keys.written.get("version", ("fsdp_version", None))
    if value is not None:
        if str(value) not in ("1", "2"):
            translation.refuse(shown, value, "FSDP has the versions 1 and 2", "use 2")
            return
        version = int(value)
        meaning = f"says how the other keys are read: those of FSDP{version}"
        translation.ignore(shown, value, meaning)

    # Both names may be given. `Translation.set` reports values that disagree.
    for name in (STRATEGY, RESHARD):
        if name not in keys.written:
            continue
        shown, value = keys.written[name]
        if value is None:
            continue
        if version == 1:
            _read_fsdp1(translation, keys, name)
        elif name == STRATEGY:
            _refuse_strategy_of_fsdp2(translation, shown, value)
        else:
            key = ForeignKey(shown, Status.SUPPORTED, "any", "", sets=reshard_settings)
            translation.translate_key(shown, key, parse_flag(value))


def _read_fsdp1(translation: Translation, keys: ShardingKeys, name: str) -> None:
    """Read a strategy of FSDP1, which Accelerate also accepts as `reshard_after_forward`."""
    shown, value = keys.written[name]
    # A boolean is the value of FSDP2.
    if isinstance(value, bool):
        rule = "is a strategy's name in FSDP1 (fsdp_version 1)"
        remedy = "use FULL_SHARD or SHARD_GRAD_OP, or fsdp_version 2"
        translation.refuse(shown, value, rule, remedy)
        return
    try:
        strategy = strategy_named(value)
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        translation.refuse(shown, value, rule, remedy)
        return

    stage = STRATEGIES[strategy]
    translation.set(STAGE, shown, stage)
    if strategy in HYBRID:
        _shard_within_machines(translation, keys, shown, value)
        return
    meaning = f"{STAGE} {stage}"
    if keys.launched and name == RESHARD and stage != 3 and STRATEGY not in keys.written:
        meaning += f" ({_NOT_READ})"
    translation.rows.append(KeyReport(shown, value, Status.RENAMED, meaning, STAGE))


def _shard_within_machines(
    translation: Translation, keys: ShardingKeys, shown: str, value: Any
) -> None:
    processes = keys.processes_per_machine
    if processes is None:
        rule = "shards inside of a machine, and the file does not say how many processes that is"
        remedy = "write full_shard, and set parallel.dp_shard in what is written"
        if keys.launched:
            remedy = "give num_processes and num_machines"
        translation.refuse(shown, value, rule, remedy)
        return
    translation.set(SHARD, shown, processes)
    meaning = f"{STAGE} and {SHARD} (the {processes} processes of a machine)"
    translation.rows.append(KeyReport(shown, value, Status.RENAMED, meaning, STAGE))


def _refuse_strategy_of_fsdp2(translation: Translation, shown: str, value: Any) -> None:
    """Refuse a strategy with FSDP2, which has none, unless it equals FSDP2's default."""
    try:
        strategy = strategy_named(value)
    except ValueError:
        strategy = ""
    if strategy == "FULL_SHARD":
        meaning = "FSDP2 does not read it; fsdp_reshard_after_forward decides"
        translation.ignore(shown, value, meaning)
        return
    rule = "is a key of FSDP1 and fsdp_version is 2, so Accelerate does not read it"
    remedy = "leave it out and write fsdp_reshard_after_forward, or use fsdp_version 1"
    translation.refuse(shown, value, rule, remedy)
