"""The fifteen scenarios: what each does with a library, in the two processes of a cell."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from tools.pains.tasks import (
    LENGTH,
    PLAIN_RUN,
    Run,
    Task,
    Trained,
    adapted,
    largest_error,
    one_process,
)

LIBRARIES = ("plait", "accelerate", "deepspeed", "trainer")
MEBI = 1 << 20


@dataclass(frozen=True)
class Cell:
    """What a scenario is given: a library's functions, an empty folder, and a folder with a model that was saved."""

    side: Any
    folder: Path
    saved: Path

    def sub(self, name: str) -> Path:
        """A folder of its own."""
        found = self.folder / name
        found.mkdir(parents=True, exist_ok=True)
        return found


Found = tuple[float, str]
"""(a number that is at most the scenario's limit where the library is right, what was compared)."""


PLAIN = Task()


@dataclass(frozen=True)
class Pain:
    """One of them."""

    title: str
    threads: str
    right: str
    """What counts as right."""
    limit: float
    run: Callable[[Cell], Found]
    task: Task = PLAIN
    """Whose model is saved before."""


def _after(cell: Cell, task: Task, run: Run = PLAIN_RUN) -> Found:
    return largest_error(cell.side.train(task, cell.sub("run"), run), one_process(task)), ""


def _resume(cell: Cell) -> Found:
    task = Task(optimizer="AdamW", lr=1e-2)
    unbroken = cell.side.train(task, cell.sub("unbroken"))
    cell.side.train(task, cell.sub("broken"), Run(stop=2))
    resumed = cell.side.train(task, cell.sub("broken"), Run(resume=True))
    assert len(resumed.losses) == 2, f"{len(resumed.losses)} steps after the checkpoint, not 2"
    return largest_error(
        resumed, Trained(unbroken.losses[2:], unbroken.norms[2:], unbroken.weights)
    ), ""


def _generation(cell: Cell) -> Found:
    prompts, counts = [[5, 6, 7], [8, 9, 10, 11, 12]], [3, 8]
    trained, tokens = cell.side.generate(Task(), prompts, counts)
    weights = [trained.weights]
    torch.distributed.broadcast_object_list(weights)
    model = Task().model()
    model.load_state_dict(weights[0], strict=False)
    rank = torch.distributed.get_rank()
    model.eval()
    ids = model.generate(
        torch.tensor([prompts[rank]]),
        max_new_tokens=counts[rank],
        min_new_tokens=counts[rank],
        do_sample=False,
    )
    wanted = ids[0, len(prompts[rank]) :].tolist()
    return float(
        sum(one != other for one, other in zip(tokens[0], wanted, strict=True))
    ), "tokens that differ"


def _adapters(cell: Cell) -> Found:
    from peft import PeftModel
    from safetensors.torch import load_file

    task = Task(lora=True)
    folder = cell.sub("adapters")
    cell.side.train(task, folder, Run(adapters=True))
    wanted, base = one_process(task), Task().model()
    opened = PeftModel.from_pretrained(base, folder)
    empty = [
        name
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
        if not tensor.numel()
    ]
    assert not empty, f"{len(empty)} adapters are empty"
    reference = adapted(Task().model())
    reference.load_state_dict(wanted.weights, strict=False)
    ids = torch.arange(1, LENGTH)[None]
    with torch.no_grad():
        return float(
            (opened(input_ids=ids).logits - reference(input_ids=ids).logits).abs().max()
        ), "logits of the opened adapters"


EXPERTS = Task(
    kind="qwen3_moe",
    shape={
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
)


def _accumulation(cell: Cell) -> Found:
    one = cell.side.train(Task(ragged=True, micro=4, accumulation=1), cell.sub("one"))
    four = cell.side.train(Task(ragged=True, micro=1, accumulation=4), cell.sub("four"))
    return largest_error(one, four), ""


PACKED = Task(documents=True, shape={"use_cache": False})
ODD = Task(shape={"vocab_size": 67, "num_key_value_heads": 1, "tie_word_embeddings": True})
LARGE = Task(
    shape={
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
)


def _memory(cell: Cell) -> Found:
    parameters = sum(path.stat().st_size for path in cell.saved.glob("*.safetensors"))
    Task().model()  # what has to be imported is
    with _most_resident() as grown:
        kept = cell.side.load(LARGE, cell.saved)
    del kept
    biggest, half = 4 * 8192 * 512 / MEBI, parameters / 2 / MEBI
    most = max(grown) / MEBI
    return most - half - biggest, f"{most:.0f} MiB for a shard of {half:.0f} MiB"


@contextmanager
def _most_resident() -> Iterator[list[int]]:
    """Bytes by which this process's own memory grows meanwhile, looked at every 2 ms. Pages of files that are mapped do not count: the
    system takes them back."""
    before, grown, ended = _resident(), [0], Event()

    def look() -> None:
        while not ended.wait(0.002):
            grown.append(_resident() - before)

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield grown
    finally:
        ended.set()
        thread.join()


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )


def _hang(cell: Cell) -> Found:
    cell.side.hang(Task())
    raise AssertionError("the run ended, though a rank sleeps")


def _first(cell: Cell) -> Found:
    model = Task().model()
    with torch.no_grad():
        wanted = model(input_ids=torch.arange(1, 9)[None]).logits
    worst = 0.0
    for full in (True, False):
        found = cell.side.first_logits(Task(), cell.saved, full=full)
        worst = max(worst, float(torch.nan_to_num((found - wanted).abs(), nan=float("inf")).max()))
    return worst, "logits before the first step"


def _float8(cell: Cell) -> Found:
    raise NotImplementedError("no device here computes in float8")


LORA_TP = Task(lora=True)
MUON = Task(optimizer="Muon", lr=1e-2, matrices_only=True)
PAINS: dict[int, Pain] = {
    1: Pain(
        "a resumed run goes on differently",
        "accelerate#4289, #3971, #3896",
        "numbers of an unbroken run",
        1e-6,
        _resume,
    ),
    2: Pain(
        "generation hangs or is of old weights",
        "trl#7103, #6797, #5312",
        "one process's tokens, ranks of other lengths",
        0,
        _generation,
    ),
    3: Pain(
        "adapters are empty or wrong in the file",
        "trl#4416, peft#1402, axolotl#3777",
        "PEFT opens what was trained",
        1e-5,
        _adapters,
    ),
    4: Pain(
        "gradients of experts on different processes",
        "transformers#48205, #48687",
        "numbers of one process",
        1e-5,
        lambda cell: _after(cell, EXPERTS, Run(layout="ep", saved=cell.saved)),
        EXPERTS,
    ),
    5: Pain(
        "the loss depends on accumulation",
        "accelerate#3877, #1970; verl#2857",
        "4 x 1 samples as 1 x 4",
        1e-5,
        _accumulation,
    ),
    6: Pain(
        "context parallelism with packed documents",
        "axolotl#3608, #3498; trl#4314",
        "numbers of one process",
        1e-5,
        lambda cell: _after(cell, PACKED, Run(layout="cp")),
    ),
    7: Pain(
        "FSDP differs from one process",
        "Megatron-LM#2769, Megatron-Bridge#3826",
        "numbers of one process",
        1e-5,
        lambda cell: _after(cell, Task()),
    ),
    8: Pain(
        "out of memory while a model is loaded",
        "LLaMA-Factory#6486; transformers#43749",
        "a shard, one tensor and 64 MiB",
        64,
        _memory,
        LARGE,
    ),
    9: Pain(
        "a hang without a name",
        "trl#6796; LLaMA-Factory#1998",
        "the late rank is named in 30 s",
        30,
        _hang,
    ),
    10: Pain(
        "tensor parallelism of odd models",
        "transformers#48307, #34789",
        "numbers of one process: 67 words, 1 key head, tied",
        1e-5,
        lambda cell: _after(cell, ODD, Run(layout="tp", saved=cell.saved)),
        ODD,
    ),
    11: Pain(
        "LoRA with tensor parallelism",
        "LLaMA-Factory#10140; trl#4314",
        "numbers of one process",
        1e-5,
        lambda cell: _after(cell, LORA_TP, Run(layout="tp", saved=cell.saved, full=True)),
    ),
    12: Pain(
        "gradient norm under tensor parallelism",
        "NeMo-RL#3788; TransformerEngine#715",
        "numbers of one process",
        1e-5,
        lambda cell: _after(cell, Task(clip=0.1), Run(layout="tp", saved=cell.saved)),
    ),
    13: Pain(
        "NaN after loading without the efficient way",
        "axolotl#3077",
        "the saved model's logits, both ways",
        1e-5,
        _first,
    ),
    14: Pain(
        "Muon on shards",
        "transformers#39541; axolotl#2464",
        "weights of one process; noise of 1e-6 in the gradients makes 0.015, shards by themselves 0.15",
        5e-2,
        lambda cell: _after(cell, MUON),
    ),
    15: Pain(
        "float8 with sharding",
        "ao#4300; TransformerEngine#2951",
        "the losses of a run without",
        1e-2,
        _float8,
    ),
}


def run_cell(library: str, number: int, folder: Path, saved: Path) -> Found:
    """In one of two processes. Collective."""
    os.chdir(folder)
    return PAINS[number].run(
        Cell(importlib.import_module(f"tools.pains.{library}_side"), folder, saved)
    )
