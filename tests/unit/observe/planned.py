"""A plan for a run on CPU cores, and steps of that run."""

from types import SimpleNamespace

from plait.config.resolving.resolve import load, resolve
from plait.events import StepDone
from plait.planner import output
from plait.planner.hardware import cluster
from plait.planner.models import Model, from_config
from plait.planner.request import Request
from plait.planner.search import plan

FIELDS = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


def planned(folder, fixed):
    """Write a plan for two processes on CPU cores. Return its configuration file and the plan."""
    model = Model(from_config(FIELDS, source="test"), {"config": FIELDS})
    result = plan(Request(model, cluster("cpu", 2), 8, 64, "fp32"), fixed=fixed)
    return output.write(result, folder / "run.json", {"optimizer": {"type": "AdamW"}})[0], result


def checked(file, plan, *overrides, parameters=None, length=64):
    """Return what `plait train` has checked of a configuration file with overrides."""
    if parameters is None:
        parameters = int(plan.request.model.architecture.parameters)
    return SimpleNamespace(
        resolved=resolve(load(file, list(overrides)), world_size=2),
        parameters=parameters,
        data=SimpleNamespace(train=SimpleNamespace(length=length)),
    )


def step(number, seconds, *, skipped=False):
    return StepDone(number, 3.0, 0.5, 1e-3, 1.0, skipped, 10.0, 512, seconds, 300 * 1024**2)
