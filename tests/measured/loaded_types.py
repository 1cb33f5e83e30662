"""Every model type, saved to a folder as Transformers saves it, and loaded by `plait.from_pretrained` at ZeRO 3: each rank its slices, or
Transformers the whole in every process; the values are those that Transformers loads."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

import plait
from plait.errors import PlaitError
from plait.parallel.materialise import is_meta
from plait.verify.model_under_test import transformers_model
from plait.verify.parity import full_tensor_on_cpu

FOLDER = "from a folder"
"""Its place beside the layouts."""
_FILE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


@dataclass(frozen=True)
class Loaded:
    """What loading one type came to."""

    outcome: Literal["slices", "in full", "refused", "failed"]
    reason: str = ""
    error: float | None = None
    """None: values are equal or not."""


def load_cell(rank, world, tested, folder):
    """Collective over the two processes of the default group. `folder` is empty and seen by both."""
    assert tested.fields is not None
    torch.manual_seed(4)
    if rank == 0:
        made: Any = transformers_model(tested.fields, dtype=torch.bfloat16, device="cpu")
        made.save_pretrained(folder, max_shard_size="100KB")
    dist.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model = plait.from_pretrained(folder)
        except PlaitError as error:
            return Loaded("refused", _without(str(error), folder))
    meta = is_meta(model)
    try:
        engine = plait.initialize(model, _FILE, loss_fn=plait.causal_lm_loss)
    except PlaitError as error:
        return Loaded("refused", _without(str(error), folder))
    try:
        found = {
            name: full_tensor_on_cpu(tensor.detach())
            for name, tensor in (*engine.model.named_parameters(), *engine.model.named_buffers())
        }
    finally:
        engine.close()
    differ = _different(found, folder)
    if differ:
        return Loaded("failed", f"not as Transformers loads them: {', '.join(differ[:4])}")
    assert meta or rank or any("in full in every process" in str(one.message) for one in said)
    return Loaded("slices" if meta else "in full")


def _without(text, folder):
    return text.replace(folder, "FOLDER")


def _different(found, folder):
    """Names whose values differ from those that Transformers loads from the same folder, buffers among them."""
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = {
        name: tensor.detach() for name, tensor in (*own.named_parameters(), *own.named_buffers())
    }
    names = sorted(found.keys() ^ wanted.keys())
    return names + [
        name
        for name in found.keys() & wanted.keys()
        if not torch.equal(found[name].float(), wanted[name].float())
    ]
