"""Frameworks of published runs (`data/frameworks.yaml`), and the learned speeds of their kernels
(`data/stacks.json`)."""

import json
import re
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
_SAME_NAMES = (
    *("hidden_tp", "hidden_dp", "logits", "norms", "slack", "flash", "dynamic_scaling"),
    *("whole_logits", "whole_inputs", "stops_early", "late_gradients", "tp_launches"),
)
"""Keys of the table that are fields of `Framework`."""


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
    key = _entry_of(lower)
    if newer or (recent and key not in UNKNOWN):
        key = table["frameworks"][key].get("newer", key)
    entry = dict(table["frameworks"][key])
    variants = table["kernels"] if key in UNKNOWN else entry.get("variants", {})
    for pattern, changes in variants.items():
        if re.search(pattern, lower):
            entry |= changes

    recipe = states or entry.get("states_in", {}).get(precision) or entry["states"]
    weights, gradients, optimizer, gathered = table["recipes"][recipe]
    wire_gather, wire_reduce = entry.get("wire_in", {}).get(precision, entry["wire"])
    if precision == "fp32":
        # Weights are used and sent in the dtype in which they are stored.
        gathered = 0
        wire_gather = wire_reduce = 4
    norms, rotary, activation = entry["apart"]
    fields = {field: entry[field] for field in _SAME_NAMES if field in entry}
    for step in ("host", "hook", "send"):
        if f"{step}_us" in entry:
            fields[f"{step}_seconds"] = entry[f"{step}_us"] * 1e-6
    return Framework(
        name=key,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        wire_gather=wire_gather,
        wire_reduce=wire_reduce,
        separate_norms=norms,
        separate_rotary=rotary,
        separate_activation=activation,
        attention=ATTENTION.index(entry["attention"]),
        step_bytes=_PURE_STEP if states == "pure-16bit" else entry["optimizer"],
        **fields,
    )


def is_unknown(name: str) -> bool:
    """Return whether only an entry of UNKNOWN matches a name."""
    return _entry_of(name.lower()) in UNKNOWN


def _entry_of(lower: str) -> str:
    for key, entry in _table()["frameworks"].items():
        if any(re.search(pattern, lower) for pattern in entry["match"]):
            return str(key)
    raise AssertionError("the last entries match every name")


@cache
def open_kernels() -> frozenset[str]:
    """Return the constants that are fitted with the others and not learned.

    They are those of unknown frameworks, and of those with models and kernels of the user, because
    what one source measured says little about the next.
    """
    kernels = set()
    for name, entry in _table()["frameworks"].items():
        if name in UNKNOWN or entry.get("own_models"):
            kernels.add(f"stack.{name}")
    return frozenset(kernels)


def without_name(name: str) -> str:
    """Return what the name of a framework says about its kernels, without the framework.

    >>> without_name("torchtitan + torchao, torch.compile")
    'unknown, compile'
    """
    terms = ["unknown"]
    for pattern in _table()["kernels"]:
        match = re.search(pattern, name.lower())
        if match:
            terms.append(match[0])
    return ", ".join(terms)


def _with_kernels_of_all(base: Priors) -> Priors:
    kernels = {f"stack.{name}": constants.of_kernels(name) for name in _table()["frameworks"]}
    for name in open_kernels():
        kernels[name] = replace(kernels[name], width=_OPEN_WIDTH)
    return replace(base, constants={**base.constants, **kernels})


@cache
def datasheet_priors() -> Priors:
    """Return constants of data sheets and of the literature, for every framework of the table."""
    return _with_kernels_of_all(constants.datasheet_priors())


@cache
def fitted_priors() -> Priors:
    """Return the constants that ship, and those of the frameworks of the table."""
    learned = json.loads(STACKS.read_text(encoding="utf-8"))["constants"]
    return constants.with_learned(_with_kernels_of_all(constants.fitted_priors()), learned)
