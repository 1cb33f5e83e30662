"""From records to a JSON document, and from that document to tables. The markdown is generated, never edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common import summary
from benchmarks.common.report import aligned, machine_line, markdown
from benchmarks.common.statistics import Ratio, paired_ratio, spread
from benchmarks.common.summary import failed_row, phase_row, ratio_cell
from benchmarks.training_step.agreement import Agreement
from benchmarks.training_step.baselines import REFERENCE, Baseline
from benchmarks.training_step.phases import PHASES
from benchmarks.training_step.rounds import Pace, Record
from benchmarks.training_step.workload import Workload

HEADER = (
    "engine",
    "ms/step",
    "quartiles",
    "vs DDP",
    "vs raw torch",
    "vs DeepSpeed",
    "cpu ms/rank",
    "peak MiB/rank",
    "rounds",
)
PHASE_HEADER = ("engine", *PHASES, "of which waiting", "other threads", "total")


def document(
    *,
    stage: int,
    machine: Mapping[str, Any],
    workload: Workload,
    pace: Pace,
    baselines: Mapping[str, Baseline],
    records: Mapping[str, Record],
    agreements: Mapping[str, Agreement],
    phases: Mapping[str, Mapping[str, float]],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that was measured of one stage, ready for `json.dumps`."""
    entries = {}
    for name, record in records.items():
        one = baselines[name]
        against = {"ddp": REFERENCE, "raw_torch": one.peer, "deepspeed": one.rival}
        ratios = {
            key: _against(record, records.get(other)) for key, other in against.items() if other
        }
        entries[name] = {
            "title": one.title,
            "spread_seconds": spread(record.clean).as_dict() if record.clean else None,
            "ratios": {key: ratio.as_dict() for key, ratio in ratios.items() if ratio is not None},
            "processor_seconds_per_step": record.processor_seconds,
            "tokens_per_second": workload.tokens_per_step / spread(record.clean).median
            if record.clean
            else None,
            "peak_bytes": record.peak_bytes,
            "foreign_share": record.foreign,
            "agreement": agreements[name].as_dict() if name in agreements else None,
            "phases_ms": dict(phases.get(name, {})),
            "failure": record.failure,
        }
    return {
        "benchmark": "training_step",
        "stage": stage,
        "machine": dict(machine),
        "workload": {
            **asdict(workload),
            "parameters": workload.parameters,
            "tokens_per_step": workload.tokens_per_step,
        },
        "pace": asdict(pace),
        "baselines": entries,
        "skipped": dict(skipped),
    }


def _against(record: Record, other: Record | None) -> Ratio | None:
    if other is None or record.failure or other.failure:
        return None
    return paired_ratio(record.seconds, other.seconds)


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The main table, as text."""
    return [_row(entry) for entry in found["baselines"].values()]


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    failed = failed_row(entry, len(HEADER))
    if failed:
        return failed
    seen, ratios = entry["spread_seconds"], entry["ratios"]
    return (
        entry["title"],
        f"{1000 * seen['median']:.0f}",
        f"{1000 * seen['low']:.0f} to {1000 * seen['high']:.0f}",
        *(ratio_cell(ratios.get(key)) for key in ("ddp", "raw_torch", "deepspeed")),
        f"{1000 * spread(entry['processor_seconds_per_step']).median:.0f}",
        f"{entry['peak_bytes'] / 2**20:.0f}",
        str(seen["count"]),
    )


def phase_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Milliseconds a step and phase on rank 0, as text."""
    entries = found["baselines"].values()
    return [
        phase_row(entry["title"], entry["phases_ms"], PHASES)
        for entry in entries
        if entry["phases_ms"]
    ]


def notes(found: Mapping[str, Any]) -> list[str]:
    """What a reader of the numbers must know: who was left out, failed, disagreed or was disturbed."""
    left_out = [f"{name} was left out: {why}" for name, why in found["skipped"].items()]
    return [*left_out, *summary.notes(found["baselines"], found["pace"])]


def is_good(found: Mapping[str, Any]) -> bool:
    """Whether every baseline ran, agreed with the reference and had an undisturbed turn."""
    return summary.all_good(found["baselines"])


def terminal(found: Mapping[str, Any]) -> str:
    """The tables of one stage for a terminal."""
    parts = (
        f"stage {found['stage']}\n{aligned(HEADER, rows(found))}",
        f"milliseconds a step on rank 0, in a turn of its own\n{aligned(PHASE_HEADER, phase_rows(found))}",
        "\n".join(f"- {note}" for note in notes(found)),
    )
    return "\n\n".join(parts) + "\n"


def page(stages: Sequence[Mapping[str, Any]]) -> str:
    """The markdown page of all stages that were measured."""
    parts = [
        "# Training step",
        "Generated by `python -m benchmarks.training_step`; do not edit.",
        "A ratio is the median of the ratios taken within each round, below 1 is faster, with its 95 % bootstrap interval over rounds.\n"
        "`cpu` is the processor time of all threads. In the second table, which comes from a turn of its own, waiting means that the main\n"
        "thread is not running, and other threads are their processor time.",
    ]
    return "\n\n".join([*parts, *(_section(found) for found in stages)]) + "\n"


def _section(found: Mapping[str, Any]) -> str:
    machine, work, pace = found["machine"], found["workload"], found["pace"]
    about = (
        machine_line(machine),
        f"Llama of {work['parameters'] / 1e6:.1f} M parameters ({work['layers']} layers, hidden {work['hidden']}, vocabulary "
        f"{work['vocabulary']}), float32, sequence {work['sequence']}, micro-batch {work['micro_batch']}, {work['ranks']} gloo ranks of "
        f"{work['threads']} thread, fused AdamW, clipping at {work['clip']}; {pace['rounds']} rounds of {pace['steps']} timed steps.",
    )
    parts = (
        f"## Stage {found['stage']}",
        "\n".join(about),
        markdown(HEADER, rows(found)).rstrip(),
        "Milliseconds a step on rank 0:",
        markdown(PHASE_HEADER, phase_rows(found)).rstrip(),
        "\n".join(f"- {note}" for note in notes(found)),
    )
    return "\n\n".join(parts)
