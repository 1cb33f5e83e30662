"""`deepspeed.pipe`: a model as a list of layers. Plait's own, with the loss and the number of stages that DeepSpeed's has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plait.compat.deepspeed.refused import refuse_given
from plait.errors import InputError
from plait.model.pipeline_module import LayerSpec, TiedLayerSpec
from plait.model.pipeline_module import PipelineModule as PlaitPipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

_REMEDIES = {
    "topology": 'write the degrees in the configuration ("parallel": {"pp": 2, "tp": 2})',
    "seed_fn": "layers are initialised by name, the same on every layout; build them under zero.Init()",
}


class PipelineModule(PlaitPipelineModule):
    """`loss_fn(output, labels)` is a micro-batch's mean loss. `num_stages` is `parallel.pp` of the configuration, which may also say it."""

    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    num_stages: int | None

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
            raise InputError(f"deepspeed.PipelineModule(seed_layers=, base_seed=): leave them out: {_REMEDIES['seed_fn']}")
        if partition_method != "parameters":
            raise InputError(
                f"deepspeed.PipelineModule(partition_method={partition_method!r}): stages are balanced by their predicted time; leave it out"
            )
        if activation_checkpoint_interval:
            raise InputError(
                "deepspeed.PipelineModule(activation_checkpoint_interval=...): blocks are recomputed one by one; leave it out and write "
                '"parallel": {"recompute": {"mode": "full"}} in the configuration'
            )
        super().__init__(layers)
        self.num_stages = num_stages
        object.__setattr__(self, "loss_fn", loss_fn)  # a module too is no layer
