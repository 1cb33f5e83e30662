"""`from plait.compat.torch import DistributedDataParallel`: a loop that was written for torch's, on
Plait.
"""

from plait.compat.torch.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
