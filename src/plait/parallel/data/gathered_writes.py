"""Error for models that write to their sharded parameters during the first step."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.gathered_writes import GatheredWrites
from plait.cluster.host_copy import HostCopy
from plait.errors import ModelError
from plait.parallel.hooks import StepHook


class LostWrites(StepHook):
    """Refuses a model that writes to gathered parameters, because sharding drops what is written.

    The parameters of the first step are compared. On a device the comparison is read at the end of
    the second step, so that no step waits for it.

    Args:
        model: The sharded model, before its first forward.
        in_forward: Whether to read the comparison before forwards, for training loops that do not
            call `finish_reduction`.
    """

    def __init__(self, model: FSDPModule, *, in_forward: bool) -> None:
        assert isinstance(model, nn.Module)
        self._writes = GatheredWrites(model)
        self._names: list[str] = []
        self._flags: HostCopy | None = None
        if in_forward:
            model.register_forward_pre_hook(lambda *_: self.finish_reduction(), prepend=True)

    def finish_reduction(self) -> None:
        """Raise ModelError if the first step wrote to a gathered parameter."""
        if self._writes.is_watching:
            compared = self._writes.take()
            if compared is None:
                return
            self._writes.is_watching = False
            self._names, flags = compared
            self._flags = HostCopy(flags)
            if not self._flags.is_ready():
                return
        if self._flags is None:
            return

        values = self._flags.values().tolist()
        self._flags = None
        for name, is_changed in zip(self._names, values, strict=True):
            if is_changed:
                raise ModelError(
                    f"{name}: the model writes to this parameter during the forward or backward."
                    " ZeRO gathers a copy of it, so what is written is lost when the copy is freed;"
                    " compute the changed value in the forward instead"
                    " (torch.nn.utils.parametrize), or use zero_optimization.stage = 0"
                )
