"""How long an asynchronous checkpoint keeps the training thread.

    python -m benchmarks.checkpoint_save [--quick]

Plait's save is compared with `async_save` of torch's distributed checkpoints (DCP) and with a plain
copy into buffers whose pages exist, the least that a consistent snapshot takes. The tensors are 512
MiB of float32 in one process with one thread. Times are medians without the first round, which
allocates.
"""

import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.common.command import command
from benchmarks.common.report import store
from plait.checkpoint.folder import find_checkpoint
from plait.checkpoint.load import Reader
from plait.checkpoint.save import Writer, snapshot
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh


def measure(folder: Path, rows: int, rounds: int) -> dict[str, list[float]]:
    mesh = build_mesh(Layout())
    writer = Writer(mesh)
    tensors = {f"model.layer{index}": torch.randn(rows, 4096) for index in range(32)}
    buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    seconds: dict[str, list[float]] = defaultdict(list)
    state = {"tensors": tensors, "rank_tensors": {}, "values": {}, "metadata": {}}

    def end(phase: str, began: float) -> float:
        seconds[phase].append(time.perf_counter() - began)
        return time.perf_counter()

    try:
        for number in range(rounds):
            began = time.perf_counter()
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor)
            began = end("copy", began)
            writer.begin(snapshot(folder, "plait", mesh=mesh, **state))
            began = end("plait blocks", began)
            writer.wait()
            began = end("plait writes", began)
            checkpoint = find_checkpoint(folder)
            assert checkpoint is not None
            Reader(checkpoint).verify("full")
            began = end("plait verifies", began)
            future = dcp.async_save(dict(tensors), checkpoint_id=folder / f"dcp-{number}")
            began = end("dcp blocks", began)
            future.result()  # type: ignore[union-attr]
            end("dcp writes", began)
            shutil.rmtree(folder / f"dcp-{number}")
    finally:
        writer.close()
    return seconds


def main() -> None:
    quick = command("checkpoint_save", __doc__).parse_args().quick
    torch.set_num_threads(1)
    rows, rounds = (16, 2) if quick else (1024, 12)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), rows, rounds)
    medians = {}
    ratios = {}
    for phase, values in seconds.items():
        medians[phase] = statistics.median(values[1:])
        line = f"{phase:14} {medians[phase] * 1e3:8.1f} ms"
        if phase.endswith("blocks"):
            ratios[phase] = medians[phase] / medians["copy"]
            line += f", {ratios[phase]:.2f} x the copy"
        print(line)
    if not quick:
        content = {"median_seconds": medians, "ratio_to_copy": ratios}
        store("checkpoint_save", content, "torch")


if __name__ == "__main__":
    main()
