"""Jobs of the planner: a model on a cluster in one layout."""

import numpy as np

from plait.planner.hardware import cluster
from plait.planner.job import Layouts
from plait.planner.models import Model, from_config, named
from plait.planner.request import Request, job_of


def layouts(**fields):
    """Return one layout with the given fields."""
    return Layouts(**{name: np.array([value]) for name, value in fields.items()})


def llama(**fields):
    """Return the configuration of a small Llama, with other values of some fields."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    return {"model_type": "llama", **sizes, "num_attention_heads": 4, **fields}


def model_of(fields):
    """Return the model of a configuration as Transformers writes it."""
    return Model(from_config(fields), {"config": fields})


def job(model="llama-3-8b", gpu="h100", gpus=64, sequence=4096, precision="bf16", **fields):
    """Return one layout of a published model on a cluster."""
    request = Request(Model(named(model), {}), cluster(gpu, gpus), 64, sequence, precision)
    return job_of(request, layouts(**fields))
