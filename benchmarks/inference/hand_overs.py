"""A thousand hand-overs of weights at a learning rate of 0: the generator's logits stay the same bits; float32, on CPUs.

    python -m benchmarks.inference.hand_overs        half an hour on two cores; --times 50 for a minute, --only "pp 2" for one trainer

Before each the trainer makes a step. After each the generator's canonical log-probabilities of every token of the vocabulary, its ordinary
logits and the hash of all values are compared with those after the first; the canonical ones also with the trainer's own.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import plait
from benchmarks.common.machine import facts
from plait.inference.weight_sync.status import ReceivedWeights

RESULT = Path(__file__).parents[2] / "benchmarks/results/hand_overs.json"
VOCABULARY = 256
SEQUENCES = [[5, 17, 33, 2, 90, 41, 7, 11, 64, 3, 9], [8, 3, 200, 255]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "tp 2": {"parallel": {"tp": 2, "sequence_parallel": False}},
    "pp 2": {"parallel": {"pp": 2}},
}
TRAINERS = ("ZeRO 3", "pp 2")
BATCH = {"train_micro_batch_size_per_gpu": 2}


def model(seed: int) -> torch.nn.Module:
    """A Llama with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


class Trainer:
    """At a learning rate of 0."""

    def __init__(self, layout: str) -> None:
        optimizer = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.1}}
        self.engine = plait.initialize(model(7), {**BATCH, **LAYOUTS[layout], "optimizer": optimizer}, loss_fn=plait.causal_lm_loss)
        self._numbers = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        """On a batch of its own."""
        ids = torch.randint(0, VOCABULARY, (2, 9), generator=self._numbers)
        self.engine.train_batch({"input_ids": ids, "labels": ids})

    def scores(self) -> torch.Tensor:
        """Canonical log-probabilities."""
        return torch.cat(self.engine.score(SEQUENCES, vocabulary=True))


class Generator:
    """And what it gave after the first hand-over."""

    def __init__(self) -> None:
        self.model = plait.parallelize(model(8), {**BATCH, **LAYOUTS["tp 2"]})
        self.times = self.different = 0
        self.first: list[Any] = []

    def compare(self, made: ReceivedWeights | None) -> None:
        """After a hand-over."""
        assert made is not None
        ids = torch.tensor(SEQUENCES[:1])
        scores = torch.cat(plait.score(self.model, SEQUENCES, vocabulary=True))
        found = [scores.view(torch.int32), self.model.predict({"input_ids": ids}).logits.view(torch.int32)]
        self.first = self.first or [*found, made.content]
        same = made.content == self.first[2] and all(map(torch.equal, found, self.first))
        self.times += 1
        self.different += not same

    @property
    def scores(self) -> torch.Tensor:
        """Canonical log-probabilities after the first hand-over."""
        found: torch.Tensor = self.first[0].view(torch.float32)
        return found


def same_ranks(rank: int, ports: list[int], layout: str, times: int, out: Any) -> None:
    """Both models on two ranks."""
    _start(rank, ports[0])
    trainer, generator = Trainer(layout), Generator()
    for _ in range(times):
        trainer.step()
        generator.compare(plait.sync_weights(trainer.engine, generator.model, verify="content"))
    out.put((generator.times, generator.different, generator.scores.tolist(), trainer.scores().tolist()))
    dist.barrier()


def apart(rank: int, ports: list[int], layout: str, times: int, out: Any) -> None:
    """Two ranks train, and two others, which know nothing of them but an address, generate."""
    _start(rank % 2, ports[rank // 2])
    address = f"127.0.0.1:{ports[2]}"
    if rank < 2:
        trainer = Trainer(layout)
        with plait.WeightSender(trainer.engine, address, receivers=2, timeout=60) as sender:
            for _ in range(times):
                trainer.step()
                sender.send(verify="content")
            out.put((0, 0, [], trainer.scores().tolist()))
    else:
        generator = Generator()
        with plait.WeightReceiver(generator.model, address, timeout=60) as receiver:
            for _ in range(times):
                generator.compare(receiver.receive(wait=120))
            out.put((generator.times, generator.different, generator.scores.tolist(), []))
    dist.barrier()


def _start(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def run(function: Callable[..., None], processes: int, layout: str, times: int) -> dict[str, Any]:
    """What all ranks found together."""
    context, began = mp.get_context("spawn"), time.perf_counter()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    out = context.SimpleQueue()
    started = [context.Process(target=function, args=(rank, ports, layout, times, out), daemon=True) for rank in range(processes)]
    for process in started:
        process.start()
    rows: list[Any] = []
    while len(rows) < processes:
        if out.empty():
            if any(process.exitcode for process in started):
                raise SystemExit("a rank ended with an error")
            time.sleep(0.05)
        else:
            rows.append(out.get())
    for process in started:
        process.join(20)
        process.kill()
    generators, trainers = [row for row in rows if row[2]], [row[3] for row in rows if row[3]]
    return {
        "hand-overs": min(row[0] for row in generators),
        "ranks of the generator": len(generators),
        "log-probabilities compared after each": len(generators[0][2]) * VOCABULARY,
        "hand-overs after which a bit differed": sum(row[1] for row in generators),
        "equal to the trainer's": all(row[2] == trainer for row in generators for trainer in trainers),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--only", choices=TRAINERS, help="the trainer's layout; other rows of the result stay")
    arguments = parser.parse_args()
    times = arguments.times
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if arguments.only and RESULT.exists() else {}
    for layout in [arguments.only] if arguments.only else TRAINERS:
        for name, work in (("the same two ranks", partial(run, same_ranks, 2)), ("two ranks to two others", partial(run, apart, 4))):
            rows[f"{layout} to tp 2, {name}"] = row = work(layout, times)
            print(f"{layout} to tp 2, {name}: {row}", flush=True)
            assert row["hand-overs"] == times and not row["hand-overs after which a bit differed"] and row["equal to the trainer's"]
            if times >= 1000:
                RESULT.write_text(json.dumps({"machine": facts("torch", "transformers"), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
