"""torch's DistributedDataParallel on Plait, for training loops that were written for torch's."""

from plait.compat.torch.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
