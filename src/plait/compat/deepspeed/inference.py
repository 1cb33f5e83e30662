"""`deepspeed.init_inference`: forward and generation with a model that is split over processes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import InputError
from plait.inference.generate import generate
from plait.inference.generation_settings import NAMES, NEUTRAL, settings_of
from plait.inference.requests import append_answers
from plait.sharded.parallel_model import ParallelModel, parallelize
from plait.sizes import is_count

_DTYPES = {
    "fp32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_CACHE_SIZES = ("max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens")
"""Arguments for DeepSpeed's preallocated KV cache. Plait's grows with the sequences."""
_KERNELS = ("replace_with_kernel_inject", "kernel_inject", "replace_method")
_REMEDIES = {
    "checkpoint": (
        "build the model with plait.from_pretrained(folder), or run plait generate --model FOLDER"
    ),
    "zero": (
        "run plait generate --model FOLDER --gpu-budget SIZE, which reads weights from the host or"
        " the disk"
    ),
    "quant": (
        "quantise the model with Transformers (quantization_config=TorchAoConfig(...)), and call"
        " plait.generate on one device"
    ),
    "injection_policy": (
        "parallel.tp splits the models that docs/reference/model_types.md lists, and no others"
    ),
    "moe": "leave it out, and split all layers, experts included, with tensor_parallel",
}


class InferenceEngine:
    """Model that is split over processes, in evaluation mode."""

    def __init__(self, sharded: ParallelModel) -> None:
        self._sharded = sharded
        self.module = sharded.model
        """Model, split in place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without gradients. Collective over the processes of a replica."""
        with torch.no_grad():
            return self._sharded(*args, **kwargs)

    forward = __call__

    def generate(
        self,
        inputs: Any = None,
        attention_mask: Any = None,
        *,
        input_ids: Any = None,
        **settings: Any,
    ) -> torch.Tensor:
        """Generate tokens, with the interface of Transformers. Collective.

        Args:
            inputs: Token ids [batch, length].
            attention_mask: Mask [batch, length], which is 0 for padding. If None, there is none.
            input_ids: Another name of `inputs`.
            **settings: See `plait.generate`.

        Returns:
            Token ids of inputs and outputs [batch, length + longest output], padded on the right.

        Raises:
            InputError: The token ids are not a matrix, or the mask has another shape.
        """
        ids = inputs if input_ids is None else input_ids
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise InputError(
                f"generate takes token ids [batch, length], not {type(ids).__name__}; pass a"
                ' tokenizer\'s input_ids as a tensor (return_tensors="pt")'
            )
        mask = attention_mask
        if mask is None:
            mask = torch.ones_like(ids)
        if mask.shape != ids.shape:
            raise InputError(
                f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(ids.shape)}; pass both"
                " as the tokenizer made them"
            )

        names = {*NAMES, *NEUTRAL}
        padding = settings_of(
            self.module, {name: value for name, value in settings.items() if name in names}
        ).pad_token_id

        # `plait.generate` takes prompts of different lengths, without padding.
        prompts = [row[is_token.bool()].tolist() for row, is_token in zip(ids, mask, strict=True)]
        generations = generate(self._sharded, prompts, **settings)
        return append_answers(ids, generations, padding)


def init_inference(
    model: nn.Module, config: Mapping[str, Any] | str | Path | None = None, **kwargs: Any
) -> InferenceEngine:
    """Split a model in place over tensor-parallel processes for inference. Collective.

    Args:
        model: Model in memory, the same on every rank.
        config: Mapping, or path of a JSON file. `tensor_parallel.tp_size` is the number of
            processes. `dtype` is the dtype to which the model is converted. Without it the model
            keeps its dtype; DeepSpeed would convert it to float16.
        **kwargs: Further entries of `config`, which take precedence.

    Raises:
        InputError: An entry is not supported.
    """
    settings = {**_read_config(config), **kwargs}
    if any(settings.get(name) for name in _KERNELS):
        warnings.warn(
            "init_inference: the model keeps its own kernels; kernel injection changes nothing",
            stacklevel=2,
        )
    degree = _pop_degree(settings)
    dtype = _parse_dtype(settings.pop("dtype", None))
    for name in (*_CACHE_SIZES, *_KERNELS):
        settings.pop(name, None)
    for name, value in settings.items():
        # None and False are the defaults of features that are off.
        if value not in (None, False):
            remedy = _REMEDIES.get(name, "leave it out")
            raise InputError(f"init_inference({name}={value!r}) is not supported; {remedy}")

    if dtype is not None:
        model = model.to(dtype)
    # A configuration requires a batch size, which has no effect on a forward.
    sharded = parallelize(model, {"train_micro_batch_size_per_gpu": 1, "parallel": {"tp": degree}})
    sharded.model.eval()
    return InferenceEngine(sharded)


def _read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"init_inference: {config} cannot be read as JSON ({error}); pass a dict, or"
            " the path of a file with a JSON object"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            f"init_inference: {config} holds a {type(content).__name__}; pass a dict, or the path"
            " of a file with a JSON object"
        )
    return content


def _pop_degree(settings: dict[str, Any]) -> int:
    """Remove the degree of tensor parallelism from the settings and return it.

    DeepSpeed has three names for it.
    """
    degrees: dict[str, Any] = {}
    for name in ("tensor_parallel", "tp", "mp_size"):
        if name not in settings:
            continue
        value = settings.pop(name)
        degree = value.get("tp_size", 1) if isinstance(value, Mapping) else value
        if not is_count(degree):
            raise InputError(
                f"init_inference({name}={value!r}): tp_size must be a whole number of"
                " at least 1; correct it"
            )
        degrees[name] = degree

    if len(set(degrees.values())) > 1:
        names = " and ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise InputError(f"init_inference: {names} differ; pass one of them")
    return next(iter(degrees.values()), 1)


def _parse_dtype(value: Any) -> torch.dtype | None:
    if value is None:
        return None
    dtype = value
    if isinstance(value, str):
        dtype = _DTYPES.get(value.removeprefix("torch."))
    if dtype in (torch.float64, *_DTYPES.values()):
        return dtype
    raise InputError(
        f"init_inference(dtype={value!r}): use one of {', '.join(_DTYPES)}, or quantise with"
        " Transformers, see docs/how-to/generation.md"
    )
