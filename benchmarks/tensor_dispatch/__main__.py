"""Host (dispatch) time of one Llama block, forward and backward, under tensor parallelism: Plait's styles beside torch's, on a fake group.

Tensors are tiny and collectives move nothing, so what is timed is Python and the dispatcher: what a GPU would have to wait for.
Interleaved rounds, one process, one thread. Run: python -m benchmarks.tensor_dispatch [rounds]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.tensor_dispatch.baselines import RANKS, by_hand, by_plait, step

REPEATS = 20


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    results = {}
    for sequence in (False, True):
        models = {"torch": by_hand(sequence=sequence), "plait": by_plait(sequence=sequence)}
        for model in models.values():
            for _ in range(5):
                step(model, sequence=sequence)
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                began = time.perf_counter()
                for _ in range(REPEATS):
                    step(model, sequence=sequence)
                times[name].append((time.perf_counter() - began) / REPEATS)
        ratios = [
            ours / theirs for ours, theirs in zip(times["plait"], times["torch"], strict=True)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        kind = "sequence parallel" if sequence else "tensor parallel"
        milliseconds = {
            name: round(1e3 * statistics.median(values), 3) for name, values in times.items()
        }
        results[kind] = {
            "milliseconds": milliseconds,
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
        }
        print(f"{kind:18s} {milliseconds} ms, plait / torch {middle:.3f} ({low:.3f} to {high:.3f})")
    target = Path(__file__).parents[1] / "results" / "tensor_dispatch.json"
    target.write_text(
        json.dumps({"rounds": rounds, "torch": torch.__version__, "results": results}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
