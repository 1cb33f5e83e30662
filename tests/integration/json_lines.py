"""Files with a JSON value per line, such as the metrics of a run."""

import json


def read_rows(path):
    """Return the values of all lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path, rows):
    """Write a line per value, and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of_run(folder, event):
    """Return the rows of an event in the metrics of a run."""
    return [row for row in read_rows(folder / "metrics.jsonl") if row["event"] == event]
