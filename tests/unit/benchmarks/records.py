"""Records and reports of benchmarks of a training step."""

import json

from benchmarks.steps import report
from benchmarks.steps.rounds import Pace, Record


def record(losses, seconds=(1.0, 1.0), norms=(1.0, 1.0)):
    """Return the record of a baseline."""
    return Record(
        seconds=list(seconds),
        foreign=[0.0] * len(seconds),
        processor_seconds=[0.9],
        losses=list(losses),
        norms=list(norms),
        peak_bytes=2**30,
    )


def make_document(benchmark, scene, workload, records, skipped=None):
    """Return the report of a scene, as it is read from its file."""
    machine = {
        "date": "2026-01-01",
        "cpu": "a cpu",
        "cores": 2,
        "memory_bytes": 2**34,
        "python": "3.11",
        "versions": {"torch": "2"},
    }
    document = report.document(
        benchmark,
        scene,
        machine=machine,
        workload=workload,
        pace=Pace(),
        records=records,
        phases={},
        skipped=skipped or {},
    )
    return json.loads(json.dumps(document))
