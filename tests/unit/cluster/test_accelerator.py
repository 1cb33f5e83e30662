"""What a machine without an accelerator is told of it; the rest is tested on a simulated one."""

import pytest
import torch

from plait.cluster import accelerator

CPU = torch.device("cpu")


def test_collectives_of_a_device():
    """Offloaded tensors are gathered through gloo."""
    assert accelerator.backend(CPU, host_tensors=True) == "gloo"
    assert accelerator.backend(torch.device("cuda"), host_tensors=False) == "nccl"
    assert accelerator.backend(torch.device("cuda"), host_tensors=True) == "cpu:gloo,cuda:nccl"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_a_machine_without_one():
    """Nothing waits, and nothing fails."""
    assert accelerator.count() == 0 and accelerator.available_type() == "cpu"
    assert not accelerator.is_accelerator(CPU) and not accelerator.is_accelerator(
        torch.device("meta")
    )
    accelerator.synchronize(CPU)
    accelerator.reset_peak(CPU)
    with accelerator.on_stream(None):
        assert float(torch.ones(())) == 1


def test_the_library_report():
    lines = accelerator.library_report({"NCCL_ALGO": "Ring"}, version=(2, 27, 5))
    assert lines[0] == "NCCL 2.27.5"
    assert any(line.split()[:2] == ["NCCL_ALGO", "Ring"] for line in lines)
    assert any(line.split()[:3] == ["NCCL_PROTO", "not", "set"] for line in lines)
    assert "no NCCL" in accelerator.library_report({}, version=None)[0]
