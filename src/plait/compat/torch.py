"""torch's DistributedDataParallel interface on top of `plait.parallelize`.

Calls and results are those of torch. A configuration can add any ZeRO stage and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

from plait.errors import InputError
from plait.sharded.assemble import ConfigLike, resolved_for
from plait.sharded.parallel_model import ParallelModel, parallelize, reason_for_step
from plait.sharded.shards_as_weights import FULL_STATE, refuse_shards_as_weights

_REPLICATED = {"zero_optimization": {"stage": 0}}
_WEIGHTS_REMEDY = FULL_STATE.replace("(model,", "(model.module,")
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "dim": (0, "samples are the first dimension of a batch"),
    "broadcast_buffers": (
        True,
        "buffers that a forward changes are rank 0's at the start of every step",
    ),
    "init_sync": (True, "all ranks begin with rank 0's weights"),
    "process_group": (
        None,
        'the groups of processes follow from config=, for example from "parallel": {"tp": 2}',
    ),
    "device_mesh": (None, 'write "parallel": {"tp": 2} in config='),
    "mixed_precision": (None, 'write "bf16": {"enabled": true} in config='),
    "delay_all_reduce_named_params": (None, "all gradients are reduced in the backward"),
    "param_to_hook_all_reduce": (None, "all gradients are reduced in the backward"),
}
"""Arguments of torch with a single supported value: the value and the remedy for another one."""
_IGNORED = (
    "device_ids",
    "output_device",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
)
"""Arguments of torch's implementation that do not change the results. They have no effect."""


class DistributedDataParallel(nn.Module):
    """Data-parallel wrapper of a module with torch's interface.

    When `loss.backward()` returns, gradients are means over the data-parallel ranks. Any optimizer
    over `parameters()` can update the weights.
    """

    def __init__(
        self, module: nn.Module, *, config: ConfigLike | None = None, **arguments: Any
    ) -> None:
        """Parallelize a module in place. Collective.

        Args:
            module: Module, the same on every rank.
            config: See `plait.initialize`. By default the module is replicated.
            **arguments: Arguments of torch's DistributedDataParallel.

        Raises:
            InputError: An argument is not supported, or the configuration requires more than
                `loss.backward()` and `optimizer.step()`.
            ConfigError: The configuration does not fit the module.
            ModelError: The module cannot be parallelized.
        """
        super().__init__()
        for name, value in arguments.items():
            if name in _IGNORED:
                continue
            if name not in _UNSUPPORTED:
                raise InputError(
                    f"DistributedDataParallel({name}=): plait.compat.torch knows no such argument;"
                    " leave it out"
                )
            default, remedy = _UNSUPPORTED[name]
            if value != default:
                raise InputError(
                    f"DistributedDataParallel({name}={value!r}) is not supported; leave it out:"
                    f" {remedy}"
                )

        # DistributedDataParallel replicates parameters, so ZeRO stage 0 is the default here.
        resolved = resolved_for(module, config if config is not None else _REPLICATED)
        # torch's wrapper has no call for the end of a step, which these configurations need.
        reason = reason_for_step(resolved)
        if reason is not None:
            raise InputError(
                f"DistributedDataParallel: {reason}, so loss.backward() and optimizer.step() are"
                " not enough; use plait.parallelize(model, config), sharded.backward or"
                " sharded.forward_backward, and sharded.step(optimizer)"
            )
        self.module = module
        self.sharded: ParallelModel = parallelize(module, resolved)
        """`ParallelModel` of the module: `clip_grad_norm`, `accumulate`, `mesh`, `close`."""
        refuse_shards_as_weights(module, remedy=_WEIGHTS_REMEDY)
        self._require_sync = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.sharded(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for all micro-batches of a step except the last.

        Both forward and backward of these micro-batches belong inside the context.
        """
        return self.sharded.accumulate()

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next forward and backward are the last of their step.

        Setting it has the effect of `no_sync` without a context.
        """
        return self._require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, require_sync: bool) -> None:
        self._require_sync = bool(require_sync)
        self.sharded.before_microbatch(last=self._require_sync)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Raise InputError. The configuration selects compressed gradients."""
        raise InputError(
            'register_comm_hook: write "parallel": {"compress_gradients": ...} in config='
        )

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InputError. All ranks must participate in every step."""
        raise InputError(
            "DistributedDataParallel.join: every rank takes part in every step; on a rank without"
            " data, pass another rank's batch and multiply the loss by 0"
        )
