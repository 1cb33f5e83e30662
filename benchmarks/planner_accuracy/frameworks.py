"""Frameworks of published runs (`data/frameworks.yaml`), and the learned speeds of their kernels
(`data/stacks.json`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from plait.planner import constants
from plait.planner.constants import Priors
from plait.planner.job import ATTENTION, Framework, plait

DATA = Path(__file__).parent / "data"
STACKS = DATA / "stacks.json"
UNKNOWN = ("other", "other-modern")
"""Entries for frameworks that are not in the table."""
_PURE_STEP = 14
"""Bytes per parameter of an optimizer step with all states in 16 bits."""
_OPEN_WIDTH = 0.2
"""Width of the speed of kernels that the name of a framework does not determine."""


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DATA / "frameworks.yaml").read_text(encoding="utf-8"))
    return content


@cache
def framework(
    name: str,
    *,
    states: str | None = None,
    precision: str = "bf16",
    newer: bool = False,
    recent: bool = False,
) -> Framework:
    """Return the entry that matches a name.

    Args:
        name: As a table writes it.
        states: Recipe of model states, if it is not that of the entry.
        precision: Precision of computation.
        newer: Whether to use the entry for later releases, if there is one.
        recent: Whether the model is recent, which selects later releases of known frameworks.
    """
    lower = name.lower()
    if lower.startswith("plait"):
        return plait(precision=precision, pure=states == "pure-16bit")
    table = _table()
    found = _entry_of(lower)
    newer = newer or (recent and found not in UNKNOWN)
    found = table["frameworks"][found].get("newer", found) if newer else found
    entry = dict(table["frameworks"][found])
    variants = table["kernels"] if found in UNKNOWN else entry.get("variants", {})
    for pattern, changes in variants.items():
        if re.search(pattern, lower):
            entry |= changes
    apart = entry["apart"]
    wire = (4, 4) if precision == "fp32" else entry.get("wire_in", {}).get(precision, entry["wire"])
    weights, gradients, optimizer, gathered = table["recipes"][
        states or entry.get("states_in", {}).get(precision) or entry["states"]
    ]
    return Framework(
        name=found,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=0
        if precision == "fp32"
        else gathered,  # weights are used in the dtype that they are kept in
        wire_gather=wire[0],
        wire_reduce=wire[1],
        separate_norms=apart[0],
        separate_rotary=apart[1],
        separate_activation=apart[2],
        attention=ATTENTION.index(entry["attention"]),
        flash=entry.get("flash", 1.0),
        hidden_tp=entry["hidden_tp"],
        hidden_dp=entry["hidden_dp"],
        host_seconds=entry["host_us"] * 1e-6,
        hook_seconds=entry.get("hook_us", 0) * 1e-6,
        send_seconds=entry.get("send_us", 25) * 1e-6,
        logits=entry["logits"],
        dynamic_scaling=entry.get("dynamic_scaling", 0),
        whole_logits=entry.get("whole_logits", 0),
        whole_inputs=entry.get("whole_inputs", 0),
        stops_early=entry.get("stops_early", 0),
        late_gradients=entry.get("late_gradients", 0),
        norms=entry["norms"],
        slack=entry["slack"],
        step_bytes=_PURE_STEP if states == "pure-16bit" else entry["optimizer"],
        tp_launches=entry.get("tp_launches", 0.15),
    )


def unknown(framework: str) -> bool:
    """Return whether only an entry of UNKNOWN matches a name."""
    return _entry_of(framework.lower()) in UNKNOWN


def _entry_of(lower: str) -> str:
    return next(
        key
        for key, entry in _table()["frameworks"].items()
        if any(re.search(pattern, lower) for pattern in entry["match"])
    )


@cache
def open_kernels() -> frozenset[str]:
    """Return the constants that are fitted with the others and not learned.

    They are those of unknown frameworks, and of those with models and kernels of the user, because
    what one source measured says little about the next.
    """
    entries = _table()["frameworks"].items()
    return frozenset(
        f"stack.{name}" for name, entry in entries if name in UNKNOWN or entry.get("own_models")
    )


def without_name(framework: str) -> str:
    """Return what the name of a framework says about its kernels, without the framework.

    >>> without_name("torchtitan + torchao, torch.compile")
    'unknown, compile'
    """
    lower = framework.lower()
    return ", ".join(
        [
            "unknown",
            *(match[0] for pattern in _table()["kernels"] if (match := re.search(pattern, lower))),
        ]
    )


def _with_stacks(base: Priors, names: Iterable[str]) -> dict[str, constants.Constant]:
    found = {f"stack.{name}": constants.of_kernels(name) for name in names}
    for name in open_kernels():
        found[name] = replace(found[name], width=_OPEN_WIDTH)
    return {**base.constants, **found}


def datasheet_priors() -> Priors:
    """Return constants of data sheets and of the literature, for every framework of the table."""
    base = constants.datasheet_priors()
    return Priors(_with_stacks(base, _table()["frameworks"]), base.time_spread, base.memory_spread)


@cache
def fitted_priors() -> Priors:
    """Return the constants that ship, and those of the frameworks of the table."""
    shipped = constants.fitted_priors()
    base = Priors(
        _with_stacks(shipped, _table()["frameworks"]), shipped.time_spread, shipped.memory_spread
    )
    learned = json.loads(STACKS.read_text(encoding="utf-8"))
    return constants.with_learned(base, learned["constants"])
