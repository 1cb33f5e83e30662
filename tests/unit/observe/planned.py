"""A plan for a run on CPU cores, and what happens in that run."""

from types import SimpleNamespace

from plait.config.resolving.resolve import load, resolve
from plait.events import StepDone
from plait.planner import output
from plait.planner.hardware import cluster
from plait.planner.models import Model, from_config
from plait.planner.request import Request
from plait.planner.search import plan

FIELDS = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 4, "vocab_size": 512, "tie_word_embeddings": False}  # fmt: skip


def planned(folder, fixed):
    """A plan for two processes on CPU cores, written."""
    request = Request(
        Model(from_config(FIELDS, source="test"), {"config": FIELDS}),
        cluster("cpu", 2),
        8,
        64,
        "fp32",
    )
    found = plan(request, fixed=fixed)
    return output.write(found, folder / "run.json", {"optimizer": {"type": "AdamW"}})[0], found


def checked(file, found, *overrides, parameters=None, length=64):
    """What `plait train` has checked."""
    resolved = resolve(load(file, list(overrides)), world_size=2)
    own = int(found.request.model.architecture.parameters)
    return SimpleNamespace(
        resolved=resolved,
        parameters=own if parameters is None else parameters,
        data=SimpleNamespace(train=SimpleNamespace(length=length)),
    )


def step(number, seconds, *, skipped=False):
    """One step."""
    return StepDone(number, 3.0, 0.5, 1e-3, 1.0, skipped, 10.0, 512, seconds, 300 * 1024**2)
