"""`deepspeed.pipe`: models as lists of layers, with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plait._torch.operators import tree_map
from plait.cluster.topology import place
from plait.compat.deepspeed.refused import refuse_arguments
from plait.errors import InputError, warn
from plait.model.pipeline_module import LayerSpec, TiedLayerSpec
from plait.model.pipeline_module import PipelineModule as PlaitPipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

_REMEDIES = {
    "topology": 'write the degrees in the configuration ("parallel": {"pp": 2, "tp": 2})',
    "seed_fn": (
        "layers are initialised by name, the same on every layout; build them under zero.Init()"
    ),
}


class PipelineModule(PlaitPipelineModule):
    """Model of a pipeline, given as a list of layers.

    Every process builds all layers and keeps those of its stage. Under `zero.Init()` they are built
    without memory.

    Args:
        layers: Layers in the order of the forward.
        num_stages: Number of pipeline stages. If None, `parallel.pp` of the configuration.
        topology: Must be None.
        loss_fn: Returns the mean loss of a micro-batch from (output, labels).
        seed_layers: Must be False.
        seed_fn: Must be None.
        base_seed: Must be 1234.
        partition_method: Ignored: stages are balanced by predicted time.
        activation_checkpoint_interval: 1 recomputes every layer in backward, 0 none.

    Raises:
        InputError: An argument is not supported.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    num_stages: int | None
    recomputed: bool
    """True if layers are recomputed in backward, as `parallel.recompute.mode` = "full" does."""

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
    ) -> None:
        refuse_arguments("PipelineModule", _REMEDIES, topology=topology, seed_fn=seed_fn)
        if seed_layers or base_seed != 1234:
            raise InputError(
                "deepspeed.PipelineModule(seed_layers=, base_seed=): leave them out:"
                f" {_REMEDIES['seed_fn']}"
            )

        method = partition_method.lower()
        if method not in ("parameters", "uniform") and not method.startswith("type:"):
            raise InputError(
                f"deepspeed.PipelineModule(partition_method={partition_method!r}): DeepSpeed has"
                " 'parameters', 'uniform' and 'type:...', and stages are balanced by predicted"
                " time; leave it out"
            )
        # "parameters" is DeepSpeed's default, which scripts do not choose.
        if method != "parameters" and place().rank == 0:
            warn(
                f"PipelineModule(partition_method={partition_method!r}) changes nothing: stages are"
                " balanced by predicted time"
            )
        if activation_checkpoint_interval not in (0, 1):
            raise InputError(
                "deepspeed.PipelineModule(activation_checkpoint_interval="
                f"{activation_checkpoint_interval}): layers are recomputed one by one; use 1"
            )
        super().__init__(layers)
        self.num_stages = num_stages
        self.recomputed = bool(activation_checkpoint_interval)
        # nn.Module would register a loss that is a module as a child, but it is not a layer.
        object.__setattr__(self, "loss_fn", loss_fn)

    def forward(self, value: Any) -> Any:
        """Return the output of all layers."""
        for layer in self.layers:
            value = tree_map(_copy_received, layer(value))
        return value


def _copy_received(value: Any) -> Any:
    """Return a copy of a tensor that a stage has received; other values are returned unchanged.

    The first layer of a stage may write to its input (nn.ReLU(inplace=True)), which autograd does
    not allow for a leaf. DeepSpeed copies it too.
    """
    if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
        return value.clone()
    return value
