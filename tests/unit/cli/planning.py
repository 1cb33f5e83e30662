"""Measured runs for `plait calibrate`."""

import csv

from tests.unit.planner.rows import ROW


def runs_file(folder, count=6):
    """Write a CSV of measured runs. The last one is of a device that the planner does not know."""
    rows = []
    for index in range(count):
        run = {"micro_batch": f"{1 + index % 2}", "step_time_s": f"{2 + index / 10}"}
        rows.append({**ROW, "id": f"X-{index}", **run})
    rows.append({**ROW, "id": "X-99", "gpu": "TPU"})

    file = folder / "runs.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ROW)
        writer.writeheader()
        writer.writerows(rows)
    return file
