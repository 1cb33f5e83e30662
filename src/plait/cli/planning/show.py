"""What `plait plan` prints: tables on a terminal, aligned lines in a pipe, JSON in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from plait.planner.explain import Change, Comparison
    from plait.planner.search import Plan


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def print_plan(found: Plan, notes: list[str], reasons: list[Comparison], changes: list[Change]) -> None:
    """A plan: the best layouts, the winner's terms, the reasons asked for, what was left out."""
    from plait.cli.planning.tables import print_table
    from plait.planner.explain import describe
    from plait.units import GIB, format_count

    console, request, best = _console(), found.request, found.best[0]
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
    from plait.planner.memory import TERMS as MEMORY_TERMS
    from plait.planner.step import TERMS

    times = [
        [TERMS[name], f"{value:.4g} s", f"{value / best.seconds:.1%}"]
        for name, value in best.terms.items()
        if value > 0.0005 * best.seconds
    ]
    print_table(console, ("1: the step", "", ""), times)
    sizes = [[MEMORY_TERMS[name], f"{value / GIB:.2f} GiB"] for name, value in best.memory_terms.items() if value > 0]
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
    left_out = [[e.region, e.rule] for e in found.excluded] + [[s.region, str(s)] for s in found.shortages]
    print_table(console, ("left out", "because"), left_out[:12])
    if len(left_out) > 12:
        print(f"and {len(left_out) - 12} more regions; --json lists them")


def print_nothing_fits(found: Plan) -> None:
    """To standard error: what the smallest layouts lack."""
    request = found.request
    print(f"plait: nothing fits: {request.model.architecture.name} on {request.cluster}", file=sys.stderr)
    for shortage in sorted(found.shortages, key=lambda s: s.needed)[:4]:
        print(f"plait: {shortage.region} {shortage}", file=sys.stderr)
    if found.fitting:
        print(f"plait: {found.fitting} layouts would fit by a margin smaller than the uncertainty of their memory", file=sys.stderr)
    print("plait: use more GPUs, GPUs with more memory, shorter samples (--seq), or a smaller model", file=sys.stderr)


def print_names() -> None:
    """Models and GPUs that have names."""
    from plait.cli.planning.tables import print_table
    from plait.planner import hardware
    from plait.planner import models as known
    from plait.units import GIB, format_count

    console = _console()
    models = []
    for name in known.names():
        one = known.named(name)
        assert one is not None
        models.append(
            [name, format_count(float(one.parameters)), f"{one.layers} x {one.hidden}, {one.heads} heads, vocabulary {one.vocab}"]
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


def write_json(path: str, content: Any) -> None:
    """To a file, or to standard output for `-`. Raises InputError for a file that cannot be written."""
    text = json.dumps(content, indent=1, default=float)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written ({error.strerror})") from None


def print_evaluation(path: Path, calibrate: Path | None, json_: str | None) -> None:
    """Predict the runs of `path` and print how far off that is."""
    from plait.cli.planning.tables import print_table
    from plait.planner.evaluate import as_json, summary
    from plait.planner.evaluate import evaluate as evaluate_rows
    from plait.planner.runs import read_rows

    found = evaluate_rows(read_rows(path), calibrate=read_rows(calibrate) if calibrate is not None else ())
    if json_ is not None:
        write_json(json_, as_json(found))
        if json_ == "-":
            return
    told = summary(found)
    console = _console()
    print(f"{told['rows']} rows, {told['predicted']} predicted, {told['used_to_calibrate']} used to calibrate")
    columns = ("", "", "rows", "median", "mean", "P90", "bias", "in 90 %")
    for key, title in (("time", "step time"), ("time_experts", "step time, models with experts"), ("memory", "peak memory")):
        rows = [
            [group, name, str(e["rows"]), *(f"{e[k]:.1%}" for k in ("median", "mean", "p90", "bias", "coverage"))]
            for group, table in told[key].items()
            for name, e in table.items()
        ]
        print_table(console, columns, rows, title=f"error of {title}")
    ranked, fit = told["ranking"], told["fit"]
    if ranked:
        print(
            f"ranking: in {ranked['top3_within_5_percent']:.1%} of {ranked['groups']} groups the best of the predicted top 3 is within 5 % "
            "of the best; "
            f"mean regret {ranked['mean_regret_1']:.1%} of the first, {ranked['mean_regret_3']:.1%} of the first three"
        )
    if fit["out_of_memory"]:
        print(
            f"fit: of {fit['out_of_memory']} rows that ran out of memory {fit['called_fits']} were called fitting ({fit['false_fits']:.1%})"
        )
    if fit["ran"]:
        print(f"fit: of {fit['ran']} rows that ran {fit['called_out_of_memory']} were called out of memory ({fit['false_alarms']:.1%})")
    print_table(console, ("rows", "not priced because"), [[str(count), reason] for reason, count in told["not_priced"].items()])
