"""What `plait plan` shows: tables on a terminal, aligned lines in a pipe, a trace in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from plait.cli.planning.tables import print_table
from plait.errors import InputError
from plait.observe.files import write_text
from plait.observe.trace import chrome_trace
from plait.planner import hardware
from plait.planner import models as known
from plait.planner.calibrate import Calibration
from plait.planner.constants import coverage_of_intervals
from plait.planner.detail import beyond, timeline
from plait.planner.explain import Change, Comparison, describe, ties_of
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.search import Plan
from plait.planner.step import TERMS
from plait.units import GIB, format_count


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def print_plan(
    found: Plan,
    notes: list[str],
    reasons: list[Comparison],
    beside: list[Comparison],
    changes: list[Change],
) -> None:
    """A plan: the best layouts, the winner's terms, the reasons asked for, the layouts one step
    away (`beside`), what was left out.
    """
    console = _console()
    request = found.request
    best = found.best[0]
    model = request.model.architecture
    print(f"{model.name}: {format_count(float(model.parameters))} parameters; {request.cluster}")
    print(
        f"batch {request.global_batch} x {request.sequence} tokens, {request.precision}; "
        f"{found.candidates:,} layouts priced, {found.fitting:,} fit"
    )
    for note in notes:
        print(f"note: {note}")
    room = float(request.cluster.device.memory_bytes) / GIB
    rows = [
        [
            str(index + 1),
            describe(choice.layout),
            f"{choice.seconds:.4g} s ({choice.seconds_low:.3g} to {choice.seconds_high:.3g})",
            format_count(choice.tokens_per_second),
            f"{choice.mfu:.1%}",
            f"{choice.needed / GIB:.1f} (to {choice.needed_high / GIB:.1f}) of {room:.1f} GiB",
        ]
        for index, choice in enumerate(found.best)
    ]
    print_table(console, ("", "layout", "step (90 %)", "tokens/s", "MFU", "memory (90 %)"), rows)
    print(f"{coverage_of_intervals(experts=bool(model.experts))}\n")
    if found.ties > 1:
        print(f"{ties_of(found)}\n")
    times = [
        [TERMS[name], f"{value:.4g} s", f"{value / best.seconds:.1%}"]
        for name, value in best.terms.items()
        if value > 0.0005 * best.seconds
    ]
    print_table(console, ("1: the step", "", ""), times)
    sizes = [
        [MEMORY_TERMS[name], f"{value / GIB:.2f} GiB"]
        for name, value in best.memory_terms.items()
        if value > 0
    ]
    sizes += [
        ["allocated", f"{best.allocated / GIB:.2f} GiB"],
        ["reserved", f"{best.reserved / GIB:.2f} GiB"],
        ["with the context", f"{best.needed / GIB:.2f} GiB"],
    ]
    print_table(console, (f"1: memory at its peak, {best.moment}", ""), sizes)
    for comparison in reasons:
        print(f"why not {comparison.reason}")
        if comparison.other is not None and comparison.other is not comparison.winner:
            table = [
                [TERMS[name], f"{ours:.3g} s", f"{theirs:.3g} s"]
                for name, ours, theirs in comparison.differences[:6]
                if abs(ours - theirs) > 1e-4
            ]
            print_table(console, ("term", "plan", describe(comparison.other.layout)), table)
    if beside:
        print_table(
            console, ("one step away", "step", "layout", "because"), _neighbour_rows(beside)
        )
    if changes:
        table = [
            [
                c.what,
                f"{c.seconds:.4g} s" if c.seconds else "-",
                format_count(c.tokens_per_second) if c.tokens_per_second else "-",
                c.layout or c.note,
            ]
            for c in changes
        ]
        print_table(console, ("if it had", "step", "tokens/s", "best layout"), table)
    left_out = [[e.region, e.rule] for e in found.excluded] + [
        [s.region, str(s)] for s in found.shortages
    ]
    print_table(console, ("left out", "because"), left_out[:12])
    if len(left_out) > 12:
        print(f"and {len(left_out) - 12} more regions; --json lists them")


def _neighbour_rows(beside: list[Comparison]) -> list[list[str]]:
    """A row for every neighbour; one that leads to the layout of an earlier row only says so."""
    rows = []
    shown = dict[str, str]()
    for comparison in beside:
        other = comparison.other
        if other is None:
            rows.append(
                [comparison.query, "-", "-", comparison.reason.removeprefix(f"{comparison.query} ")]
            )
            continue
        layout = describe(other.layout)
        first = shown.setdefault(layout, comparison.query)
        because = (
            f"the same layout as {first}"
            if first != comparison.query
            else comparison.reason.partition("): ")[2]
        )
        rows.append([comparison.query, f"{other.seconds:.4g} s", layout, because])
    return rows


def print_nothing_fits(found: Plan) -> None:
    """To standard error: what the smallest layouts lack."""
    request = found.request
    print(
        f"plait: nothing fits: {request.model.architecture.name} on {request.cluster}",
        file=sys.stderr,
    )
    for shortage in sorted(found.shortages, key=lambda s: s.needed)[:4]:
        print(f"plait: {shortage.region} {shortage}", file=sys.stderr)
    if found.fitting:
        print(
            f"plait: {found.fitting} layouts would fit by a margin smaller than the uncertainty of"
            " their memory",
            file=sys.stderr,
        )
    print(
        "plait: use more GPUs, GPUs with more memory, shorter samples (--seq), or a smaller model",
        file=sys.stderr,
    )


def names_as_json() -> dict[str, list[str]]:
    """Models and GPUs that have names."""
    return {"models": list(known.names()), "gpus": list(hardware.device_names())}


def print_names() -> None:
    """The same, with their sizes."""
    console = _console()
    models = []
    for name in known.names():
        one = known.named(name)
        assert one is not None
        models.append(
            [
                name,
                format_count(float(one.parameters)),
                f"{one.layers} x {one.hidden}, {one.heads} heads, vocabulary {one.vocab}",
            ]
        )
    print_table(console, ("model", "parameters", "shape"), models)
    devices = []
    for name in hardware.device_names():
        one_device = hardware.device(name)
        peak = max(one_device.flops.get(p, 0) for p in ("bf16", "fp16", "fp32"))
        devices.append(
            [
                name,
                one_device.title,
                f"{one_device.memory_bytes / GIB:.1f} GiB",
                f"{peak / 1e12:.4g} TFLOP/s",
                f"{one_device.devices_per_node} a node",
            ]
        )
    print_table(console, ("gpu", "", "memory", "16 bits", ""), devices)


def write_trace(path: Path, found: Plan, *, calibration: Calibration | None = None) -> None:
    """The pipeline of the best choice as a Chrome trace. Raises InputError where its schedule has
    no table, or the file cannot be written.
    """
    best = found.best[0]
    try:
        simulated = timeline(found.request, best, calibration=calibration)
    except InputError as error:
        raise InputError(
            f"--trace: the best layout has no timeline: {error}; leave the option out, or --fix"
            " another schedule"
        ) from None
    trace = chrome_trace(simulated, title=describe(best.layout), after=beyond(best, simulated))
    write_text("--trace", path, json.dumps(trace) + "\n")
