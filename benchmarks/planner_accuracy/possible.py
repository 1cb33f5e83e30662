"""Rows of a table of runs whose values no run has: each is refused with its file, line, field, value and rule, and the others count.

An empty cell, or one with words in it, is not given; a number is checked as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from benchmarks.planner_accuracy.limits import beyond_memory, beyond_peak
from benchmarks.planner_accuracy.row import (
    NotPriced,
    Row,
    device_of,
    model_of,
    number_of,
    precision_of,
)
from benchmarks.planner_accuracy.runs import measured_bytes, measured_seconds, read_table
from plait.errors import Problem
from plait.planner.hardware import PRECISIONS

_COUNTS = (
    *(
        "n_layers",
        "hidden",
        "n_heads",
        "n_kv_heads",
        "ffn_hidden",
        "vocab",
        "gpus_total",
        "gpus_per_node",
        "seq_len",
        "global_batch",
    ),
    *("micro_batch", "tp", "pp", "vpp", "cp", "ep", "dp"),
)
_MEASURES = (
    "n_params_B",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "derived_step_time_s",
    "peak_mem_gb",
)
Found = tuple[str, object, str, str]
"""(field, value, rule, remedy)."""


def possible_rows(path: str | Path) -> tuple[tuple[Row, ...], tuple[Problem, ...]]:
    """(the rows of a CSV that a run may have measured, a problem for every value of the others). Raises InputError for what is no table."""
    path = Path(path)
    kept, problems = [], []
    for line, row in read_table(path):
        found = list(_impossible(row))
        problems += [
            Problem(f"{path}, line {line}: {name}", value, rule, remedy)
            for name, value, rule, remedy in found
        ]
        if not found:
            kept.append(row)
    return tuple(kept), tuple(problems)


def _impossible(row: Row) -> Iterator[Found]:
    wrong = list(_numbers(row))
    yield from wrong
    if not wrong:
        yield from _counts(row)
        yield from _measured(row)


def _numbers(row: Row) -> Iterator[Found]:
    for name in (*_COUNTS, *_MEASURES):
        text = (row.get(name) or "").strip()
        try:
            value = float(text)
        except ValueError:
            continue
        if not (isfinite(value) and value > 0):
            yield (
                name,
                text,
                "not a number above 0",
                "correct it, or leave it empty where it is not known",
            )
        elif name in _COUNTS and value != int(value):
            yield name, text, "not a whole number", "correct it"


def _counts(row: Row) -> Iterator[Found]:
    gpus, tp, pp, dp, heads, kv_heads = (
        number_of(row, name) for name in ("gpus_total", "tp", "pp", "dp", "n_heads", "n_kv_heads")
    )
    cp, batch, micro = (
        number_of(row, "cp") or 1,
        number_of(row, "global_batch"),
        number_of(row, "micro_batch"),
    )
    if gpus and tp and pp and dp and tp * pp * cp * dp != gpus:
        rule = f"tp x pp x cp x dp = {tp:g} x {pp:g} x {cp:g} x {dp:g} = {tp * pp * cp * dp:g}"
        yield "gpus_total", f"{gpus:g}", rule, "correct one of them, or leave dp empty"
    if batch and micro and dp and micro * dp > batch:
        rule = f"a micro-batch of {micro:g} on each of {dp:g} data-parallel ranks is {micro * dp:g} samples"
        yield "global_batch", f"{batch:g}", rule, "correct one of them"
    if heads and kv_heads and kv_heads > heads:
        yield (
            "n_kv_heads",
            f"{kv_heads:g}",
            f"n_heads is {heads:g}, and keys have no more heads than queries",
            "correct one of them",
        )


def _measured(row: Row) -> Iterator[Found]:
    try:
        model, device, precision = model_of(row), device_of(row), PRECISIONS[precision_of(row)[0]]
    except NotPriced:
        return
    memory = measured_bytes(row)
    if memory is not None and (rule := beyond_memory(memory[0], device)):
        yield "peak_mem_gb", row.get("peak_mem_gb"), rule, "correct it, its unit in mem_def, or gpu"
    seconds, batch, sequence, gpus = (
        measured_seconds(row),
        *(number_of(row, name) for name in ("global_batch", "seq_len", "gpus_total")),
    )
    if not (seconds and batch and sequence and gpus):
        return
    rule = beyond_peak(
        seconds, model, device, precision, samples=batch, sequence=sequence, devices=gpus
    )
    if rule is not None:
        name = next(
            (name for name in ("step_time_s", "derived_step_time_s") if number_of(row, name)),
            "tokens_per_s_per_gpu",
        )
        yield name, row.get(name), rule, "correct it, the model's sizes, global_batch or gpus_total"
