"""`deepspeed.pipe`: a model as a list of layers. Plait's own, with the loss and the number of
stages that DeepSpeed's has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plait._torch.operators import tree_map
from plait.cluster.topology import place
from plait.compat.deepspeed.refused import refuse_given
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
    """`loss_fn(output, labels)` is a micro-batch's mean loss. `num_stages` is `parallel.pp` of the
    configuration, which may also say it.

    Every process builds all layers and keeps those of its stage; under `zero.Init()` it builds them
    without memory.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    num_stages: int | None
    recomputed: bool
    """Whether layers compute again in the backward what they would keep: `parallel.recompute.mode`
    = "full" of the configuration.
    """

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
        refuse_given("PipelineModule", _REMEDIES, topology=topology, seed_fn=seed_fn)
        if seed_layers or base_seed != 1234:
            raise InputError(
                "deepspeed.PipelineModule(seed_layers=, base_seed=): leave them out:"
                f" {_REMEDIES['seed_fn']}"
            )
        if partition_method.lower() not in (
            "parameters",
            "uniform",
        ) and not partition_method.lower().startswith("type:"):
            raise InputError(
                f"deepspeed.PipelineModule(partition_method={partition_method!r}): DeepSpeed has"
                " 'parameters', 'uniform' and 'type:...', and stages are balanced by predicted"
                " time; leave it out"
            )
        if partition_method.lower() != "parameters" and place().rank == 0:
            warn(
                f"PipelineModule(partition_method={partition_method!r}) changes nothing: stages are"
                " balanced by predicted time"
            )
        if activation_checkpoint_interval not in (0, 1):
            raise InputError(
                f"deepspeed.PipelineModule(activation_checkpoint_interval={activation_checkpoint_interval}):"
                " layers are recomputed one by one; use 1"
            )
        super().__init__(layers)
        self.num_stages = num_stages
        self.recomputed = bool(activation_checkpoint_interval)
        object.__setattr__(self, "loss_fn", loss_fn)  # a module too is no layer

    def forward(self, value: Any) -> Any:
        """Through all layers."""
        for layer in self.layers:
            value = tree_map(_writable, layer(value))
        return value


def _writable(value: Any) -> Any:
    """What a stage has received may be written to by its first layer (nn.ReLU(inplace=True)), so it
    is given a copy, as DeepSpeed does.
    """
    received = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    return value.clone() if received else value
