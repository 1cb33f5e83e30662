"""torch's DistributedDataParallel over `plait.parallelize`: the same calls and numbers, with any
ZeRO stage and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

from plait.errors import InputError
from plait.sharded.assemble import ConfigLike, resolved_for
from plait.sharded.parallel_model import ParallelModel, parallelize, why_called
from plait.sharded.shards_as_weights import FULL_STATE, refuse_shards_as_weights

_REPLICATED = {"zero_optimization": {"stage": 0}}
_WEIGHTS = FULL_STATE.replace("(model,", "(model.module,")
_REMEDIES: dict[str, tuple[Any, str]] = {
    "dim": (0, "samples are the first dimension of a batch"),
    "broadcast_buffers": (
        True,
        "buffers that a forward changes are rank 0's at the start of every step",
    ),
    "init_sync": (True, "all ranks begin with rank 0's weights"),
    "process_group": (None, 'write "parallel": {"dp_shard": 2} in config= for groups of processes'),
    "device_mesh": (None, 'write "parallel": {"tp": 2} in config='),
    "mixed_precision": (None, 'write "bf16": {"enabled": true} in config='),
    "delay_all_reduce_named_params": (None, "all gradients are reduced in the backward"),
    "param_to_hook_all_reduce": (None, "all gradients are reduced in the backward"),
}
_NOTHING = (
    "device_ids",
    "output_device",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
)
_IGNORED = (*_NOTHING, "static_graph", "skip_all_reduce_unused_params")
"""Of torch's implementation: they change no number, and nothing here."""


class DistributedDataParallel(nn.Module):
    """Gradients are means over the data-parallel ranks when `loss.backward()` returns, and any
    optimizer over `parameters()` steps.
    """

    def __init__(
        self, module: nn.Module, *, config: ConfigLike | None = None, **arguments: Any
    ) -> None:
        """`arguments` are torch's, by name. `config`: see `plait.initialize`; replicas by default.
        Collective. Raises InputError for an argument that cannot be honoured and a configuration
        whose steps are not the loop's own, ConfigError or ModelError for a model that it does not
        fit.
        """
        super().__init__()
        for name, value in arguments.items():
            default, remedy = _REMEDIES.get(name, (value, ""))
            if name not in _REMEDIES and name not in _IGNORED:
                raise InputError(
                    f"DistributedDataParallel({name}=): plait.compat.torch knows no such argument;"
                    " leave it out"
                )
            if value != default:
                raise InputError(
                    f"DistributedDataParallel({name}={value!r}) cannot be honoured; leave it out:"
                    f" {remedy}"
                )
        resolved = resolved_for(module, config if config is not None else _REPLICATED)
        reason = why_called(resolved)
        if reason is not None:
            raise InputError(
                f"DistributedDataParallel: {reason}, so loss.backward() and optimizer.step() are"
                " not enough; use plait.parallelize(model, config), sharded.backward or"
                " sharded.forward_backward, and sharded.step(optimizer)"
            )
        self.module = module
        self.sharded: ParallelModel = parallelize(module, resolved)
        """Plait's handle: `clip_grad_norm`, `accumulate`, `mesh`, `close`."""
        refuse_shards_as_weights(module, remedy=_WEIGHTS)
        self._reduces = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Of the module."""
        return self.sharded(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Forward and backward of every micro-batch of a step but the last go inside."""
        return self.sharded.accumulate()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the coming forward and backward are the last of their step; `no_sync` without a
        context.
        """
        return self._reduces

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, reduces: bool) -> None:
        self._reduces = bool(reduces)
        self.sharded.before_microbatch(last=self._reduces)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refused."""
        raise InputError(
            'register_comm_hook: write "parallel": {"compress_gradients": ...} in config='
        )

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise InputError(
            "DistributedDataParallel.join: every rank takes part in every step; give a rank without"
            " data another's batch, and multiply its loss by 0"
        )
