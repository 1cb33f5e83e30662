"""Measured runs for `plait calibrate`."""

from tests.unit.planner.rows import ROW


def runs_file(folder, count=6):
    """A CSV of measured runs."""
    file = folder / "runs.csv"
    rows = [
        {
            **ROW,
            "id": f"X-{index}",
            "micro_batch": f"{1 + index % 2}",
            "step_time_s": f"{2 + index / 10}",
        }
        for index in range(count)
    ]
    rows.append({**ROW, "id": "X-99", "gpu": "TPU"})
    lines = [",".join(ROW), *(",".join(row[name] for name in ROW) for row in rows)]
    file.write_text("\n".join(lines) + "\n")
    return file
