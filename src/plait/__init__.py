"""Plait trains large models on many devices.

One JSON file describes the parallelism, and any Hugging Face or plain PyTorch model can be trained.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.version import __version__

if TYPE_CHECKING:
    from plait.checkpoint.load import load_trained
    from plait.config.resolving.resolve import load as load_config
    from plait.engine.build import initialize
    from plait.engine.engine import Engine, StepResult
    from plait.errors import ConfigError, PlaitError
    from plait.inference.generate import generate
    from plait.inference.score import score
    from plait.losses.chunked_loss import chunked_causal_lm_loss
    from plait.losses.loss import WeightedLoss, causal_lm_loss, per_sample
    from plait.model.pipeline_model import LayerSpec, PipelineModel, TiedLayerSpec
    from plait.sharded.full_weights import iterate_weights
    from plait.sharded.parallel_model import ParallelModel, parallelize
    from plait.sharded.pretrained import from_pretrained

# Public names are imported on first use, so that `plait --help` and `import plait` do not import
# torch.
_DEFINING_MODULES = {
    "ConfigError": "plait.errors",
    "LayerSpec": "plait.model.pipeline_model",
    "PipelineModel": "plait.model.pipeline_model",
    "TiedLayerSpec": "plait.model.pipeline_model",
    "Engine": "plait.engine.engine",
    "ParallelModel": "plait.sharded.parallel_model",
    "PlaitError": "plait.errors",
    "StepResult": "plait.engine.engine",
    "WeightedLoss": "plait.losses.loss",
    "causal_lm_loss": "plait.losses.loss",
    "chunked_causal_lm_loss": "plait.losses.chunked_loss",
    "from_pretrained": "plait.sharded.pretrained",
    "generate": "plait.inference.generate",
    "initialize": "plait.engine.build",
    "iterate_weights": "plait.sharded.full_weights",
    "load_trained": "plait.checkpoint.load",
    "load_config": "plait.config.resolving.resolve",
    "parallelize": "plait.sharded.parallel_model",
    "score": "plait.inference.score",
    "per_sample": "plait.losses.loss",
}

__all__ = [
    "ConfigError",
    "Engine",
    "LayerSpec",
    "ParallelModel",
    "PipelineModel",
    "PlaitError",
    "StepResult",
    "TiedLayerSpec",
    "WeightedLoss",
    "__version__",
    "causal_lm_loss",
    "chunked_causal_lm_loss",
    "from_pretrained",
    "generate",
    "initialize",
    "iterate_weights",
    "load_config",
    "load_trained",
    "parallelize",
    "per_sample",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _DEFINING_MODULES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")

    # The module of `load_config` calls it `load`.
    attribute = "load" if name == "load_config" else name
    return getattr(import_module(_DEFINING_MODULES[name]), attribute)


def __dir__() -> list[str]:
    return __all__
