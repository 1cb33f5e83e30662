"""`deepspeed.init_inference`: a model in memory, split over tensor-parallel processes, that is
called and that generates.
"""

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
from plait.sharded.parallel_model import ParallelModel, parallelize

_DTYPES = {
    "fp32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_SIZES = ("max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens")
"""Of a cache that is allocated before; here it grows with the sequences."""
_KERNELS = ("replace_with_kernel_inject", "kernel_inject", "replace_method")
_INSTEAD = {
    "checkpoint": (
        "build the model with plait.from_pretrained(folder, config), or run plait generate --model"
        " FOLDER"
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
        "parallel.tp splits the models that docs/model_types.md lists; others run whole"
    ),
    "moe": "use plait.initialize with parallel.ep, and engine.plait.generate",
}


class InferenceEngine:
    """What `init_inference` returns."""

    def __init__(self, sharded: ParallelModel) -> None:
        self._sharded = sharded
        self.module = sharded.model
        """The model, split in place, in evaluation mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model, without gradients. Collective over the processes of a replica."""
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
        """As Transformers': token ids [batch, length] of the inputs with what follows, filled up on
        the right with the padding token. `attention_mask` [batch, length] is 0 at padding.
        `settings`: see `plait.generate`. Collective.
        """
        ids = inputs if input_ids is None else input_ids
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise InputError(
                f"generate takes token ids [batch, length], not {type(ids).__name__}; pass a"
                " tokenizer's input_ids"
            )
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        if mask.shape != ids.shape:
            raise InputError(
                f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(ids.shape)}; pass both"
                " as the tokenizer made them"
            )
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        made = [found.token_ids for found in generate(self._sharded, prompts, **settings)]
        longest = max(map(len, made), default=0)
        filler = self._filler(settings)
        new = [[*tokens, *[filler] * (longest - len(tokens))] for tokens in made]
        return torch.cat(
            [
                ids,
                torch.tensor(new, dtype=ids.dtype, device=ids.device).reshape(len(made), longest),
            ],
            dim=1,
        )

    def _filler(self, settings: Mapping[str, Any]) -> int:
        """The padding token, else the first that ends a text, as in Transformers."""
        known = getattr(self.module, "generation_config", None)
        for name in ("pad_token_id", "eos_token_id"):
            found = settings.get(name, getattr(known, name, None))
            found = found[0] if isinstance(found, list | tuple) else found
            if found is not None:
                return int(found)
        return 0


def init_inference(
    model: nn.Module, config: Mapping[str, Any] | str | Path | None = None, **kwargs: Any
) -> InferenceEngine:
    """Split `model` in place over `tensor_parallel.tp_size` processes and put it in evaluation
    mode.

    `config` is a dict or a JSON file, and `kwargs` are added to it. `dtype` converts the model;
    without it the model keeps its own, where DeepSpeed makes it float16. Raises InputError for what
    is not there, with what to use.
    """
    given = {**_read(config), **kwargs}
    if any(given.get(name) for name in _KERNELS):
        warnings.warn(
            "init_inference: the model keeps its own kernels; kernel injection changes nothing",
            stacklevel=2,
        )
    size = _tensor_parallel(given)
    dtype = _dtype(given.pop("dtype", None))
    for name in (*_SIZES, *_KERNELS):
        given.pop(name, None)
    for name, value in given.items():
        if value not in (None, False):
            raise InputError(
                f"init_inference({name}={value!r}) is not there;"
                f" {_INSTEAD.get(name, 'leave it out')}"
            )
    sharded = parallelize(
        model if dtype is None else model.to(dtype),
        {"train_micro_batch_size_per_gpu": 1, "parallel": {"tp": size}},
    )
    sharded.model.eval()
    return InferenceEngine(sharded)


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"init_inference: {config} cannot be read as JSON ({error}); pass a dict, or a file"
            " of one"
        ) from None
    if not isinstance(found, dict):
        raise InputError(
            f"init_inference: {config} holds a {type(found).__name__}; pass a dict, or a file"
            " of one"
        )
    return found


def _tensor_parallel(given: dict[str, Any]) -> int:
    """The degree by any of DeepSpeed's three names, which are taken out."""
    told: dict[str, Any] = {
        name: given.pop(name) for name in ("tensor_parallel", "tp", "mp_size") if name in given
    }
    sizes = {
        name: value.get("tp_size", 1) if isinstance(value, Mapping) else value
        for name, value in told.items()
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(
                f"init_inference({name}={told[name]!r}): tp_size is a whole number of at least 1"
            )
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"init_inference: {' and '.join(f'{name}={size}' for name, size in sizes.items())}"
            " differ; give one of them"
        )
    return next(iter(sizes.values()), 1)


def _dtype(wanted: Any) -> torch.dtype | None:
    found = _DTYPES.get(wanted.removeprefix("torch.")) if isinstance(wanted, str) else wanted
    if wanted is None or found in (torch.float64, *_DTYPES.values()):
        return found
    raise InputError(
        f"init_inference(dtype={wanted!r}): use one of {', '.join(_DTYPES)}, or quantise with"
        " Transformers, see docs/generation.md"
    )
