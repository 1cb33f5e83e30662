"""One way to run the model, in a process of its own: `python -m benchmarks.inference.engines FOLDER ENGINE JSON` prints a line of JSON.

All decode the same prompts greedily. `drop` runs a thread that keeps the files out of the kernel's cache, so that every pass over the
weights reads the disk, for every engine alike. Memory is the process's proportional set size, mapped files included, above what it was with
everything imported.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plait.cluster import host_memory
from plait.inference.deployment import InferenceWork, deploy_streamed, load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.inference.streamed_model import load_streamed
from plait.inference.weight_files import (
    CONCURRENT_READS,
    MAX_IMAGE_READ_BYTES,
    FileBlock,
    FileReader,
)
from plait.inference.weight_stream import WeightStream

PLACES = 96 << 20
"""Bytes of memory for reads that nobody looks at: as many as Plait's places for two layers. What is read into so few that they stay in the
processor's cache may come faster, and no engine computes there."""
PROMPT = [11, 42, 7, 300, 5, 66, 128, 9]


def memory_bytes() -> int:
    """Proportional set size of this process."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` again and again beside the body."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def dropped(folder: Path) -> None:
    """The files of a folder leave the kernel's cache."""
    for path in folder.rglob("*"):
        if path.suffix in (".safetensors", ".dat"):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def throttled(bytes_per_second: float) -> None:
    """Reads of streamed weights take as long as at that rate, or longer; a sleep that was too long is made up for."""
    read, due, turn = FileReader.read_block, [0.0], threading.Lock()

    def slow(self: FileReader, block: FileBlock) -> None:
        with turn:
            due[0] = end = max(due[0], time.perf_counter() - 0.02) + block.size / bytes_per_second
        read(self, block)
        time.sleep(max(0.0, end - time.perf_counter()))

    FileReader.read_block = slow  # type: ignore[method-assign]


def plait(
    folder: Path, asked: dict[str, Any]
) -> tuple[Callable[[int, int], list[list[int]]], WeightStream | None]:
    """(requests, tokens) -> tokens; and the stream, where weights are streamed."""
    source = open_source(folder)
    if asked.get("budget"):
        if asked.get("rate"):
            throttled(asked["rate"])
        work = InferenceWork(
            source, source.model(), tokens=len(PROMPT) + asked["tokens"], requests=asked["requests"]
        )
        where = deploy_streamed(work, cpu_budget=asked["budget"])
        sharded, _ = load_streamed(
            source, budget_bytes=asked["budget"], other_bytes=where.other_bytes
        )
    else:
        sharded = load_model(source)

    def run(requests: int, tokens: int) -> list[list[int]]:
        with (
            reading(folder / "model.safetensors", asked["reads"] if tokens > 1 else 0)
            if "reads" in asked
            else nullcontext()
        ):
            return [
                one.token_ids
                for one in generate(
                    sharded, [PROMPT] * requests, max_new_tokens=tokens, temperature=0
                )
            ]

    return run, sharded.hooks.find(WeightStream)


@cache
def written(size: int) -> np.ndarray:
    """Memory whose pages are there."""
    return host_memory.empty_on_huge_pages((size,), torch.uint8).zero_().numpy()


@contextmanager
def reading(
    path: Path, count: int, memory: int = PLACES, size: int = MAX_IMAGE_READ_BYTES
) -> Iterator[None]:
    """So many bytes of a file are read past the kernel's cache meanwhile, again and again, with as many reads at a time as Plait, as large
    (or of `size` bytes), into `memory` bytes; nobody looks at them. Ends when all have been read."""
    file, stretches = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // size
    places = written(memory)

    def read(index: int) -> None:
        start = index % (memory // size) * size
        os.preadv(file, [places[start : start + size]], index % stretches * size)

    with ThreadPoolExecutor(CONCURRENT_READS) as threads:
        ends = [threads.submit(read, index) for index in range(count // size)]
        yield
        for end in ends:
            end.result()
    os.close(file)


def reads(
    folder: Path, asked: dict[str, Any]
) -> tuple[Callable[[int, int], list[list[int]]], None]:
    """Nothing but `reading`."""

    def run(requests: int, tokens: int) -> list[list[int]]:
        with reading(
            folder / "model.safetensors",
            asked["reads"] if tokens > 1 else 0,
            *asked.get("into", ()),
        ):
            return []

    return run, None


def transformers(
    folder: Path, asked: dict[str, Any]
) -> tuple[Callable[[int, int], list[list[int]]], None]:
    """In memory, with accelerate's `cpu_offload`, or with its offload of all layers to disk."""
    if asked.get("disk"):
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        places = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        places |= {
            f"model.layers.{index}": "disk" for index in range(model.config.num_hidden_layers)
        }
        model = load_checkpoint_and_dispatch(
            model, str(folder / "model.safetensors"), places, offload_folder=asked["disk"]
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        if asked.get("host"):
            from accelerate import cpu_offload

            cpu_offload(model, execution_device=torch.device("cpu"))
    model.generation_config.eos_token_id = None

    def run(requests: int, tokens: int) -> list[list[int]]:
        ids = torch.tensor([PROMPT] * requests)
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return made[:, len(PROMPT) :].tolist()

    return run, None


def deepspeed(
    folder: Path, asked: dict[str, Any]
) -> tuple[Callable[[int, int], list[list[int]]], None]:
    """ZeRO-Inference: stage 3 with parameters offloaded to host memory, or with `disk` to files there, on DeepSpeed's CPU accelerator."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.setdefault("MASTER_PORT", "29611")
    import deepspeed as library

    library.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    offload = (
        {"device": "nvme", "nvme_path": asked["disk"]} if asked.get("disk") else {"device": "cpu"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": offload},
    }
    engine = library.initialize(model=model, config=config)[0].module.eval()

    def run(requests: int, tokens: int) -> list[list[int]]:
        ids = torch.tensor([PROMPT] * requests)
        with torch.no_grad():
            made = engine.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return made[:, len(PROMPT) :].tolist()

    return run, None


ENGINES: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "plait": plait,
    "transformers": transformers,
    "deepspeed": deepspeed,
    "reads": reads,
}


def main() -> None:
    torch.set_num_threads(1)
    folder, engine, asked = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
        )
    )
    base = memory_bytes()
    peak = [base]
    places = [Path(place) for place in (folder, asked.get("disk")) if place]
    dropping = (
        partial(every, 0.05, lambda: [dropped(place) for place in places])
        if asked.get("drop")
        else nullcontext
    )
    with every(0.02, lambda: peak.__setitem__(0, max(peak[0], memory_bytes()))):
        run, streaming = ENGINES[engine](folder, asked)
        with dropping():
            run(asked["requests"], 1)
            tokens, seconds, first, read = run(asked["requests"], asked["tokens"]), [], [], 0
    with dropping():  # looking at memory takes time, too
        for _ in range(asked.get("rounds", 3)):
            began = time.perf_counter()
            run(asked["requests"], 1)
            first.append(time.perf_counter() - began)
            began, before = (
                time.perf_counter(),
                streaming.bytes_read if streaming is not None else 0,
            )
            assert run(asked["requests"], asked["tokens"]) == tokens
            seconds.append(time.perf_counter() - began)
            read = streaming.bytes_read - before if streaming is not None else 0
    print(
        json.dumps(
            {
                "seconds": min(seconds),
                "first_seconds": min(first),
                "tokens": tokens,
                "peak_bytes": peak[0] - base,
                "read_bytes": read,
            }
        ),
        flush=True,
    )
    os._exit(0)


if __name__ == "__main__":
    main()
