"""DeepSpeed's API on top of Plait's engine: `import plait.compat.deepspeed as deepspeed`.

Names, arguments and return values are those of DeepSpeed 0.19.8. A name that is not supported
raises an error with a replacement. docs/how-to/deepspeed-scripts.md lists both kinds.
"""

from __future__ import annotations

from typing import Any

from plait.compat.deepspeed import accelerator, comm, ops, pipe, utils, zero
from plait.compat.deepspeed.accelerator import get_accelerator
from plait.compat.deepspeed.comm import add_config_arguments, init_distributed
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.hf_config import patch_hf_deepspeed_config
from plait.compat.deepspeed.inference import InferenceEngine, init_inference
from plait.compat.deepspeed.pipe import PipelineEngine, PipelineModule
from plait.compat.deepspeed.refused import FUNCTIONS, missing
from plait.compat.deepspeed.start import initialize
from plait.compat.deepspeed.utils import log_dist

__version__ = "0.19.8"
"""Version of DeepSpeed whose API this is. Scripts compare it."""

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


patch_hf_deepspeed_config()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing("deepspeed", name, FUNCTIONS)
