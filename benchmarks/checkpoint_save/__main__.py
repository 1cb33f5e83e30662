"""Times how long a checkpoint that is written beside the training keeps the training thread: Plait's, DCP's `async_save`, and a plain copy.

    python -m benchmarks.checkpoint_save        about a minute on a quiet machine

512 MiB of float32 in 32 tensors, one process with one thread, the three in turn, the median of the rounds after the first, which allocates.
The copy is `copy_` into buffers that were touched: the least that a consistent snapshot takes.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.common.report import facts
from plait.checkpoint.folder import find_checkpoint
from plait.checkpoint.load import Reader
from plait.checkpoint.save import Writer, snapshot
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh

RESULT = Path(__file__).parents[2] / "benchmarks/results/checkpoint_save.json"
_ROUNDS = 12


def main() -> None:
    torch.set_num_threads(1)
    mesh = build_mesh(Layout())
    tensors = {f"model.layer{index}": torch.randn(1024, 4096) for index in range(32)}
    buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    folder, writer = Path(tempfile.mkdtemp()), Writer(mesh)
    seconds: dict[str, list[float]] = {
        what: []
        for what in (
            "copy",
            "plait blocks",
            "plait writes",
            "dcp blocks",
            "dcp writes",
            "plait verifies",
        )
    }

    def timed(what: str, began: float) -> float:
        seconds[what].append(time.perf_counter() - began)
        return time.perf_counter()

    try:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor)
            began = timed("copy", began)
            writer.begin(
                snapshot(
                    folder,
                    "plait",
                    mesh=mesh,
                    tensors=tensors,
                    rank_tensors={},
                    values={},
                    metadata={},
                )
            )
            began = timed("plait blocks", began)
            writer.wait()
            began = timed("plait writes", began)
            found = find_checkpoint(folder)
            assert found is not None
            Reader(found).verify("full")
            began = timed("plait verifies", began)
            written = dcp.async_save(dict(tensors), checkpoint_id=folder / "dcp")
            began = timed("dcp blocks", began)
            written.result()  # type: ignore[union-attr]
            timed("dcp writes", began)
            shutil.rmtree(folder / "dcp")
    finally:
        writer.close()
        shutil.rmtree(folder)
    medians = {what: statistics.median(values[1:]) for what, values in seconds.items()}
    ratios = {what: medians[what] / medians["copy"] for what in ("plait blocks", "dcp blocks")}
    for what, value in medians.items():
        print(
            f"{what:14} {value * 1e3:8.1f} ms"
            + (f", {ratios[what]:.2f} x the copy" if what in ratios else "")
        )
    RESULT.write_text(
        json.dumps(
            {"machine": facts("torch"), "median_seconds": medians, "ratio_to_copy": ratios},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
