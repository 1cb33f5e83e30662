"""How a framework computes, as numbers (`data/frameworks.yaml`): bytes of its states, what it fuses, what it overlaps.

The search plans for Plait itself; the other entries price rows that others measured. Rates are in `constants`, not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from plait.planner.hardware import Numbers

ATTENTION = ("flash", "fused", "plain")


@dataclass(frozen=True)
class Framework:
    """See the YAML file for the meaning of each; arrays hold one entry a candidate."""

    name: Any
    stack: Numbers
    """Index into `stacks()`: frameworks that share kernels share what is fitted."""
    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    gathered: Numbers
    """Bytes a parameter of model states, and of the copy that a forward uses."""
    wire_gather: Numbers
    wire_reduce: Numbers
    eager: Numbers
    attention: Numbers
    """Index into ATTENTION."""
    flash: Numbers
    """Speed of the attention kernel, of FlashAttention 2's."""
    hidden_tp: Numbers
    hidden_dp: Numbers
    host_seconds: Numbers
    send_seconds: Numbers
    logits: Numbers
    whole_logits: Numbers
    whole_inputs: Numbers
    norms: Numbers
    slack: Numbers
    noise: Numbers
    noise_doubling: Numbers
    step_bytes: Numbers
    """Bytes that the optimizer step moves a parameter."""
    accumulate_bytes: Numbers
    """Bytes a parameter that it takes to add a micro-batch's gradients to those before it."""


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((files("plait.planner") / "data" / "frameworks.yaml").read_text(encoding="utf-8"))
    return content


@cache
def stacks() -> tuple[str, ...]:
    """The entries of the table."""
    return tuple(_table()["frameworks"])


def with_compiled_blocks(found: Framework) -> Framework:
    """Plait with compiled blocks: element-wise kernels fused and launches fewer, as torchtitan's are."""
    return replace(found, eager=1.1, host_seconds=150e-6, norms=8)


@cache
def framework(name: str, *, states: str | None = None, precision: str = "bf16", newer: bool = False) -> Framework:
    """The entry that matches `name`; `states` names another recipe of model states than its usual one with `precision`; `newer`
    takes the entry that stands for it today, where there is one."""
    lower = name.lower()
    table = _table()
    found = next(key for key, entry in table["frameworks"].items() if any(re.search(pattern, lower) for pattern in entry["match"]))
    found = table["frameworks"][found].get("newer", found) if newer else found
    entry = table["frameworks"][found]
    weights, gradients, optimizer, gathered = table["recipes"][
        states or (entry.get("states_bf16") if precision == "bf16" else None) or entry["states"]
    ]
    return Framework(
        name=found,
        stack=stacks().index(found),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=0 if precision == "fp32" else gathered,  # weights are used in the dtype that they are kept in
        wire_gather=4 if precision == "fp32" else entry["wire"][0],
        wire_reduce=4 if precision == "fp32" else entry["wire"][1],
        eager=entry["eager"],
        attention=ATTENTION.index(entry["attention"]),
        flash=entry.get("flash", 1.0),
        hidden_tp=entry["hidden_tp"],
        hidden_dp=entry["hidden_dp"],
        host_seconds=entry["host_us"] * 1e-6,
        send_seconds=entry.get("send_us", 25) * 1e-6,
        logits=entry["logits"],
        whole_logits=entry.get("whole_logits", 0),
        whole_inputs=entry.get("whole_inputs", 0),
        norms=entry["norms"],
        slack=entry["slack"],
        noise=entry.get("noise", 0.0),
        noise_doubling=entry.get("noise_doubling", 0.0),
        step_bytes=entry["optimizer"],
        accumulate_bytes=entry.get("accumulate", 0) + (2 if precision == "fp32" and "accumulate" in entry else 0),
    )


def stack(frameworks: list[Framework]) -> Framework:
    """One Framework whose fields are arrays, an entry each."""
    return Framework(**{f.name: np.array([getattr(x, f.name) for x in frameworks]) for f in fields(Framework)})
