"""Detection of writes to gathered parameters of `fully_shard`.

A gathered parameter is a copy that exists until its unit is sharded again. A module that writes to
it, such as a hook that masks `module.weight.data`, changes the copy of one pass and not the shards.
torch does not detect this, and `.data` bypasses the version counter of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from plait._torch.dtensor import local_tensor
from plait._torch.units import parameter_groups, sharded_modules

_SAMPLES = 1 << 16
"""Elements of a parameter that are compared at most."""


class GatheredWrites:
    """Compares gathered parameters between the gathering and the sharding of their unit.

    Args:
        root: The sharded model, before its first forward.

    Attributes:
        is_watching: Whether units that are gathered now are compared.
    """

    def __init__(self, root: FSDPModule) -> None:
        assert isinstance(root, nn.Module)
        self.is_watching = True
        names = {parameter: name for name, parameter in root.named_parameters()}
        # Keyed by torch's record: `load_state_dict(assign=True)` replaces the parameter.
        self._names: dict[Any, str] = {}
        self._gathered: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
        """Records of the parameters of each gathered group, with their samples."""
        self._changed: dict[str, torch.Tensor] = {}
        for module in sharded_modules(root):
            for group in parameter_groups(module):
                self._names |= {p: names[p.sharded_param] for p in group.fsdp_params}
                group.wait_for_unshard = self._sample_after(group, group.wait_for_unshard)
                group.reshard = self._compare_before(group, group.reshard)

    def take(self) -> tuple[list[str], torch.Tensor] | None:
        """Return the names of compared parameters and a flag per name, and forget them.

        Returns:
            Names and a bool tensor [names] on the device, or None if nothing was compared.
        """
        changed = self._changed
        self._changed = {}
        if not changed:
            return None
        return list(changed), torch.stack(list(changed.values()))

    def _sample_after(self, group: Any, wait: Callable[[], None]) -> Callable[[], None]:
        def wait_and_sample() -> None:
            wait()
            if not self.is_watching or not group.is_unsharded or group in self._gathered:
                return
            # Outside of passes the caller gathers on purpose, and may write the shards afterwards.
            if group._training_state is not TrainingState.IDLE:
                self._gathered[group] = [
                    (p, _sample(p._unsharded_param).clone())
                    for p in group.fsdp_params
                    if p._unsharded_param.numel()
                ]

        return wait_and_sample

    def _compare_before(self, group: Any, reshard: Callable[[], None]) -> Callable[[], None]:
        def compare_and_reshard() -> None:
            samples = self._gathered.pop(group, ())
            if group.is_unsharded:
                for p, sample in samples:
                    name = self._names[p]
                    changed = (_sample(p._unsharded_param) != sample).any()
                    earlier = self._changed.get(name)
                    self._changed[name] = changed if earlier is None else earlier | changed
            reshard()

        return compare_and_reshard


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced bytes of a parameter, or all bytes of a small one. It is a view."""
    flat = local_tensor(parameter.detach()).reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLES)].unsqueeze(-1).view(torch.uint8)
