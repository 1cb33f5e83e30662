"""`plait.compat.torch.DistributedDataParallel` in one process without a launcher."""

import pytest
import torch
from torch import nn

from plait.compat.torch import DistributedDataParallel
from plait.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_group": object()}, "follow from config="),
        ({"mixed_precision": object()}, '"bf16"'),
        ({"broadcast_buffers": False}, "rank 0's at the start of every step"),
        ({"dim": 1}, "first dimension"),
        ({"bukket_cap_mb": 3}, "no such argument"),
        ({"config": {"fp16": {"enabled": True}}}, "sharded.step(optimizer)"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(InputError) as error:
        DistributedDataParallel(nn.Linear(2, 2), **arguments)
    assert message in str(error.value)


def test_a_step_with_no_sync():
    settings = {"device_ids": None, "find_unused_parameters": True, "bucket_cap_mb": 10}
    model = DistributedDataParallel(nn.Linear(2, 1), **settings)
    with pytest.raises(InputError):
        model.register_comm_hook(None, len)
    with pytest.raises(InputError):
        model.join()
    assert set(model.state_dict()) == {"module.weight", "module.bias"}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    before = model.module.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.module.weight.detach(), before - 2)
    model.sharded.close()
