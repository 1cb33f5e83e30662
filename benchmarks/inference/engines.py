"""Run an engine in a process of its own, which prints a line of JSON.

    python -m benchmarks.inference.engines FOLDER ENGINE JSON

All engines decode the same prompts greedily. `drop` keeps the files out of the kernel's page cache,
so that every pass over the weights reads the disk. Memory is the proportional set size, with mapped
files, above that of the process after its imports.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plait.inference.deployment import InferenceWork, deploy_streamed, load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.inference.streamed_model import load_streamed
from plait.inference.weight_files import FileBlock, FileReader
from plait.inference.weight_stream import WeightStream

PROMPT = [11, 42, 7, 300, 5, 66, 128, 9]
Options = dict[str, Any]
Run = Callable[[int, int], list[list[int]]]
"""Takes the number of requests and of new tokens, and returns the new tokens."""


def memory_bytes() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
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


def drop_files(folders: list[Path]) -> None:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in (".safetensors", ".dat"):
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def throttle(bytes_per_second: float) -> None:
    """Let reads of streamed weights take as long as at this rate. Long sleeps are made up for."""
    read = FileReader.read_block
    turn = threading.Lock()
    due = 0.0

    def slow(self: FileReader, block: FileBlock) -> None:
        nonlocal due
        with turn:
            due = max(due, time.perf_counter() - 0.02) + block.size / bytes_per_second
            end = due
        read(self, block)
        time.sleep(max(0.0, end - time.perf_counter()))

    FileReader.read_block = slow  # type: ignore[method-assign]


def plait(folder: Path, options: Options) -> tuple[Run, Callable[[], int]]:
    """Return the generation of Plait, and what counts the bytes that it has streamed."""
    source = open_source(folder)
    budget = options.get("budget")
    if budget:
        if options.get("rate"):
            throttle(options["rate"])
        tokens = len(PROMPT) + options["tokens"]
        work = InferenceWork(source, source.model(), tokens=tokens, requests=options["requests"])
        other_bytes = deploy_streamed(work, cpu_budget=budget).other_bytes
        model, _ = load_streamed(source, budget_bytes=budget, other_bytes=other_bytes)
    else:
        model = load_model(source)
    stream = model.hooks.find(WeightStream)

    def run(requests: int, tokens: int) -> list[list[int]]:
        prompts = [PROMPT] * requests
        answers = generate(model, prompts, max_new_tokens=tokens, temperature=0)
        return [answer.token_ids for answer in answers]

    return run, lambda: 0 if stream is None else stream.bytes_read


def transformers(folder: Path, options: Options) -> tuple[Run, Callable[[], int]]:
    """Return the generation in memory, or with accelerate's offload to the host or to disk."""
    if options.get("disk"):
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        outside = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        blocks = [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
        places = dict.fromkeys(outside, "cpu") | dict.fromkeys(blocks, "disk")
        file = str(folder / "model.safetensors")
        model = load_checkpoint_and_dispatch(model, file, places, offload_folder=options["disk"])
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        if options.get("host"):
            from accelerate import cpu_offload

            cpu_offload(model, execution_device=torch.device("cpu"))
    return _transformers_run(model), lambda: 0


def deepspeed(folder: Path, options: Options) -> tuple[Run, Callable[[], int]]:
    """Return the generation of ZeRO-Inference: stage 3 with parameters in host memory."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    import deepspeed as library

    library.init_distributed(dist_backend="gloo")
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = library.initialize(model=model, config=config)[0].module.eval()
    return _transformers_run(engine), lambda: 0


def _transformers_run(model: Any) -> Run:
    model.generation_config.eos_token_id = None

    def run(requests: int, tokens: int) -> list[list[int]]:
        ids = torch.tensor([PROMPT] * requests)
        settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answers: list[list[int]] = output[:, len(PROMPT) :].tolist()
        return answers

    return run


ENGINES = {"plait": plait, "transformers": transformers, "deepspeed": deepspeed}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    engine = ENGINES[sys.argv[2]]
    options: Options = json.loads(sys.argv[3])
    requests = options["requests"]
    # A tiny model imports what the modelling code imports when it first runs.
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **tiny))
    base = memory_bytes()
    peak = base

    def look() -> None:
        nonlocal peak
        peak = max(peak, memory_bytes())

    folders = [folder]
    if options.get("disk"):
        folders.append(Path(options["disk"]))
    dropping: Callable[[], AbstractContextManager[None]] = nullcontext
    if options.get("drop"):
        dropping = partial(every, 0.05, lambda: drop_files(folders))
    with every(0.02, look):
        run, bytes_read = engine(folder, options)
        with dropping():
            run(requests, 1)
            tokens = run(requests, options["tokens"])
    seconds = []
    first_seconds = []
    read = 0
    with dropping():  # without looking at memory, which takes time
        for _ in range(options.get("rounds", 3)):
            began = time.perf_counter()
            run(requests, 1)
            first_seconds.append(time.perf_counter() - began)
            before = bytes_read()
            began = time.perf_counter()
            assert run(requests, options["tokens"]) == tokens
            seconds.append(time.perf_counter() - began)
            read = bytes_read() - before
    result = {
        "seconds": min(seconds),
        "first_seconds": min(first_seconds),
        "tokens": tokens,
        "peak_bytes": peak - base,
        "read_bytes": read,
    }
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
