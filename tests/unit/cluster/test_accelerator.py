"""Functions of `plait.cluster.accelerator` on a machine without an accelerator.

tests/simulated_device has the tests on a machine with one.
"""

import pytest
import torch

from plait.cluster import accelerator

CPU = torch.device("cpu")


def test_collectives_of_a_device():
    """Offloaded tensors are gathered through gloo."""
    assert accelerator.backend(CPU, host_tensors=True) == "gloo"
    assert accelerator.backend(torch.device("cuda"), host_tensors=False) == "nccl"
    assert accelerator.backend(torch.device("cuda"), host_tensors=True) == "cpu:gloo,cuda:nccl"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")
def test_without_an_accelerator():
    """Nothing waits, and nothing fails."""
    assert accelerator.count() == 0
    assert accelerator.available_type() == "cpu"
    assert not accelerator.is_accelerator(CPU)
    assert not accelerator.is_accelerator(torch.device("meta"))
    accelerator.synchronize(CPU)
    accelerator.reset_peak(CPU)
    with accelerator.on_stream(None):
        assert float(torch.ones(())) == 1


def test_library_report():
    lines = accelerator.library_report({"NCCL_ALGO": "Ring"}, version=(2, 27, 5))
    assert lines[0] == "NCCL 2.27.5"
    settings = [" ".join(line.split()) for line in lines]
    assert any(setting.startswith("NCCL_ALGO Ring") for setting in settings)
    assert any(setting.startswith("NCCL_PROTO not set") for setting in settings)
    assert "no NCCL" in accelerator.library_report({}, version=None)[0]
