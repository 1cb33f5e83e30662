"""Every model type, saved by Transformers and loaded by `plait.from_pretrained` at ZeRO 3.

Each rank loads its slices, or Transformers loads the complete model in every process. The values
are compared with those that Transformers loads.
"""

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
"""Column of the table, next to the layouts."""
_FILE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


@dataclass(frozen=True)
class Loaded:
    """Result of loading one type. `error` is None, because values are either equal or not."""

    outcome: Literal["slices", "in full", "refused", "failed"]
    reason: str = ""
    error: float | None = None


def load_cell(rank, world, tested, folder):
    """Save and load one type. Collective over two processes, which share the empty `folder`."""
    assert tested.fields is not None
    torch.manual_seed(4)
    if rank == 0:
        saved: Any = transformers_model(tested.fields, dtype=torch.bfloat16, device="cpu")
        saved.save_pretrained(folder, max_shard_size="100KB")
    dist.barrier()

    with warnings.catch_warnings(record=True) as caught:
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
        loaded = {
            name: full_tensor_on_cpu(tensor.detach())
            for name, tensor in (*engine.model.named_parameters(), *engine.model.named_buffers())
        }
    finally:
        engine.close()

    differing = _differing(loaded, folder)
    if differing:
        return Loaded("failed", f"not as Transformers loads them: {', '.join(differing[:4])}")
    messages = [str(warning.message) for warning in caught]
    assert meta or rank or any("in full in every process" in message for message in messages)
    return Loaded("slices" if meta else "in full")


def _without(text, folder):
    return text.replace(folder, "FOLDER")


def _differing(loaded, folder):
    """Return names whose values differ from those that Transformers loads, including buffers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    names = sorted(loaded.keys() ^ expected.keys())
    for name in loaded.keys() & expected.keys():
        if not torch.equal(loaded[name].float(), expected[name].detach().float()):
            names.append(name)
    return names
