"""DeepSpeed's functions, for scripts in its style: `import plait.compat.deepspeed as deepspeed`.

Names, order of arguments and return values are those of DeepSpeed 0.19.8; what runs is Plait's
engine. What is not there raises and says what to use instead. docs/deepspeed-scripts.md lists both.
"""

from __future__ import annotations

from typing import Any

from plait.compat.deepspeed import accelerator, comm, ops, pipe, utils, zero
from plait.compat.deepspeed.accelerator import get_accelerator
from plait.compat.deepspeed.distributed import add_config_arguments, init_distributed
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.inference import InferenceEngine, init_inference
from plait.compat.deepspeed.messages import log_dist
from plait.compat.deepspeed.pipe import PipelineModule
from plait.compat.deepspeed.pipeline_engine import PipelineEngine
from plait.compat.deepspeed.refused import FUNCTIONS, missing
from plait.compat.deepspeed.start import initialize

__version__ = "0.19.8"
"""Of the DeepSpeed whose calls these are; scripts ask for it."""

__all__ = [
    "DeepSpeedEngine",
    "InferenceEngine",
    "PipelineEngine",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "ops",
    "pipe",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing("deepspeed", name, FUNCTIONS)
