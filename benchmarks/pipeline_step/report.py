"""From records to a JSON document, and from that document to tables. The markdown is generated, never edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.statistics import paired_ratio, spread
from benchmarks.common.table import aligned, markdown
from benchmarks.pipeline_step.contestants import TARGET, Layout
from benchmarks.pipeline_step.workload import Workload
from benchmarks.training_step.agreement import Agreement
from benchmarks.training_step.phases import PHASES
from benchmarks.training_step.report import GOOD_ENOUGH
from benchmarks.training_step.rounds import Pace, Record

HEADER = ("contestant", "ms/step", "quartiles", "vs raw torch", "cpu ms/rank", "peak MiB/rank", "rounds")
PHASE_HEADER = ("contestant, rank", *PHASES, "of which waiting", "other threads", "total")


def document(
    layout: Layout,
    *,
    machine: Mapping[str, Any],
    workload: Workload,
    pace: Pace,
    records: Mapping[str, Record],
    agreements: Mapping[str, Agreement],
    phases: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Any]:
    """Everything that was measured of one layout, ready for `json.dumps`. `phases` are by rank."""
    entries = {}
    for one in layout.contestants:
        record = records[one.name]
        peer = records[one.peer] if one.peer else None
        ratio = paired_ratio(record.seconds, peer.seconds) if peer and not peer.failure and not record.failure else None
        entries[one.name] = {
            "title": one.title,
            "seconds_per_step": record.seconds,
            "spread_seconds": spread(record.clean).as_dict() if record.clean else None,
            "ratio": ratio.as_dict() if ratio else None,
            "processor_seconds_per_step": record.processor_seconds,
            "peak_bytes": record.peak_bytes,
            "foreign_share": record.foreign,
            "losses": record.losses,
            "grad_norms": record.norms,
            "agreement": agreements[one.name].as_dict() if one.name in agreements else None,
            "phases_ms": [dict(each) for each in phases.get(one.name, ())],
            "failure": record.failure,
        }
    return {
        "benchmark": "pipeline_step",
        "layout": layout.name,
        "title": layout.title,
        "target": TARGET,
        "machine": dict(machine),
        "workload": {**asdict(workload), "parameters": workload.parameters, "tokens_per_step": workload.tokens_per_step},
        "pace": asdict(pace),
        "contestants": entries,
    }


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The main table, as text."""
    return [_row(entry) for entry in found["contestants"].values()]


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    seen, ratio = entry["spread_seconds"], entry["ratio"]
    if entry["failure"] or seen is None:
        return (entry["title"], "failed" if entry["failure"] else "disturbed", *[""] * (len(HEADER) - 2))
    return (
        entry["title"],
        f"{1000 * seen['median']:.0f}",
        f"{1000 * seen['low']:.0f} to {1000 * seen['high']:.0f}",
        f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "",
        f"{1000 * spread(entry['processor_seconds_per_step']).median:.0f}",
        f"{entry['peak_bytes'] / 2**20:.0f}",
        str(seen["count"]),
    )


def phase_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Milliseconds a step and phase on every rank, as text."""
    return [
        (f"{entry['title']}, {rank}", *(f"{value:.0f}" for value in _cells(seen)))
        for entry in found["contestants"].values()
        for rank, seen in enumerate(entry["phases_ms"])
    ]


def _cells(seen: Mapping[str, float]) -> list[float]:
    waiting = sum(seen[f"{phase} waiting"] for phase in PHASES)
    return [*(seen[phase] for phase in PHASES), waiting, seen["threads"], seen["total"]]


def notes(found: Mapping[str, Any]) -> list[str]:
    """What a reader of the numbers must know: who failed, disagreed, was disturbed, or is above the target."""
    said = []
    entries, pace = found["contestants"], found["pace"]
    for name, entry in entries.items():
        agreement = entry["agreement"]
        if agreement and not agreement["holds"]:
            said.append(
                f"{name} DISAGREES with the reference over {agreement['steps']} steps: loss by {agreement['early_loss']:.1e} early and "
                f"{agreement['late_loss']:.1e} later, gradient norm by {agreement['early_norm']:.1e} relative"
            )
        if entry["failure"]:
            said.append(f"{name} failed: {entry['failure'].splitlines()[0]}")
        elif (entry["spread_seconds"] or {"count": 0})["count"] < min(GOOD_ENOUGH, pace["rounds"]):
            said.append(f"{name} had fewer than {GOOD_ENOUGH} undisturbed rounds: its ratio is weak")
        if name.startswith("plait-") and entry["ratio"]:
            word = "within" if entry["ratio"]["median"] <= found["target"] else "ABOVE"
            said.append(f"{name}: {entry['ratio']['median']:.3f} is {word} the target of {found['target']:.2f}")
    compared = [entry["agreement"] for entry in entries.values() if entry["agreement"]]
    if compared and all(each["holds"] for each in compared):
        early, late, steps = (max(each[key] for each in compared) for key in ("early_loss", "late_loss", "steps"))
        said.append(f"losses of all {len(compared)} agree: by {early:.1e} in the first steps, by {late:.1e} over up to {steps} steps")
    shares = [share for entry in entries.values() for share in entry["foreign_share"]]
    said.append(
        f"{sum(share > pace['foreign_share'] for share in shares)} of {len(shares)} turns were disturbed (other programs used more than "
        f"{pace['foreign_share']:.0%} of the machine) and are not in the numbers"
    )
    return said


def is_good(found: Mapping[str, Any]) -> bool:
    """Whether every contestant ran, agreed with the reference and had an undisturbed turn."""
    return all(
        entry["failure"] is None and entry["spread_seconds"] is not None and entry["agreement"]["holds"]
        for entry in found["contestants"].values()
    )


def terminal(found: Mapping[str, Any]) -> str:
    """The tables of one layout for a terminal."""
    parts = (
        f"{found['title']}\n{aligned(HEADER, rows(found))}",
        f"milliseconds a step, in a turn of its own\n{aligned(PHASE_HEADER, phase_rows(found))}",
        "\n".join(f"- {note}" for note in notes(found)),
    )
    return "\n\n".join(parts) + "\n"


def page(layouts: Sequence[Mapping[str, Any]]) -> str:
    """The markdown page of all layouts that were measured."""
    parts = [
        "# Model-parallel step",
        "Generated by `python -m benchmarks.pipeline_step`; do not edit.",
        "A ratio is the median of the ratios taken within each round, below 1 is faster, with its 95 % bootstrap interval over rounds.\n"
        "`cpu` is the processor time of all threads. In the second table, which comes from a turn of its own, waiting means that the main\n"
        "thread is not running, which includes the bubble of a pipeline, and other threads are their processor time.",
    ]
    return "\n\n".join([*parts, *(_section(found) for found in layouts)]) + "\n"


def _section(found: Mapping[str, Any]) -> str:
    machine, work, pace = found["machine"], found["workload"], found["pace"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    clipping = f"clipping at {work['clip']}" if work["clip"] else "no clipping"
    about = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Python {machine['python']}, {versions}.",
        f"Llama of {work['parameters'] / 1e6:.1f} M parameters ({work['layers']} layers, hidden {work['hidden']}, vocabulary "
        f"{work['vocabulary']}), float32, sequence {work['sequence']}, {work['slices']} x {work['micro_batches']} micro-batches of "
        f"{work['micro_batch']}, {work['ranks']} gloo ranks of {work['threads']} thread, fused AdamW, {clipping}; {pace['rounds']} rounds "
        f"of {pace['steps']} timed steps.",
    )
    parts = (
        f"## {found['title']}",
        "\n".join(about),
        markdown(HEADER, rows(found)).rstrip(),
        "Milliseconds a step:",
        markdown(PHASE_HEADER, phase_rows(found)).rstrip(),
        "\n".join(f"- {note}" for note in notes(found)),
    )
    return "\n\n".join(parts)
