"""The simulated device itself: what a missing wait does on it, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pool import WorkerFailed
from tests.simulated_device import build
from tests.simulated_device.pool import Races, SimulatedPool


def said():
    """Races so far, which are forgotten. Runs in a worker."""
    device: Any = sys.modules["simulated_device.on_torch"]
    found: list[str] = device.races()
    device.clear()
    return found


def _trained(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x, y = torch.randn(16, 8).to(device), torch.randint(0, 4, (16,)).to(device)
    for _ in range(3):
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def kernels(rank, world):
    """Runs in a worker."""
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert x.is_cuda and torch.equal((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    x[x > 3] = 0
    x[:, ::2].add_(1)
    assert x.tolist() == [[1, 1, 3], [4, 0, 1]]
    for one, other in zip(_trained("cpu"), _trained("cuda"), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    with torch.autocast("cuda", torch.bfloat16):
        assert nn.functional.linear(x, x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0


def _fused(device):
    x = torch.linspace(-1, 1, 64, dtype=torch.float64, device=device).view(1, 2, 4, 8)
    x.requires_grad_()
    normalised = nn.functional.rms_norm(x, (8,))
    attended = nn.functional.scaled_dot_product_attention(normalised, x, x, is_causal=True)
    products = torch._foreach_mul([x, attended], 2.0)
    attended.mul(products[0]).sum().backward()
    assert x.grad is not None
    return [attended.detach().cpu(), x.grad.cpu()]


def fused_kernels(rank, world):
    """Compare operators that have kernels of their own in builds of torch with CUDA to the CPU's.

    Runs in a worker.
    """
    for one, other in zip(_fused("cpu"), _fused("cuda"), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def generators(rank, world):
    """The device's random numbers are its own. Runs in a worker."""
    torch.cuda.manual_seed(5)
    before = torch.get_rng_state()
    first = torch.randn(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(3, device="cuda"))
    assert torch.equal(
        first,
        torch.randn(4, device="cuda", generator=torch.Generator(device="cuda").manual_seed(5)),
    )
    assert torch.equal(before, torch.get_rng_state())


def saved(rank, world, folder):
    """Runs in a worker."""
    torch.save(torch.arange(3.0, device="cuda"), f"{folder}/x.pt")
    assert torch.load(f"{folder}/x.pt").is_cuda
    assert torch.load(f"{folder}/x.pt", map_location="cpu").device.type == "cpu"


def copies_to_the_host(rank, world):
    """They are late, and a host that does not wait is told. Runs in a worker."""
    x, host = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    early = host.clone()
    assert (
        early.isnan().all()
        and "aten::clone reads on the host what copy_ to the host writes on stream" in said()[0]
    )
    torch.cuda.current_stream().record_event().synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    x.copy_(host, non_blocking=True)
    host.zero_()
    assert "aten::zero_ writes on the host what copy_ from the host reads" in said()[0]


def other_streams(rank, world):
    """Runs in a worker."""
    side, host = torch.cuda.Stream(), torch.full((4,), 3.0).pin_memory()
    with torch.cuda.stream(side):
        y = torch.empty(4, device="cuda")
        y.copy_(host, non_blocking=True)
        copied = side.record_event()
    bad = (y + 1).cpu()
    assert (
        not (bad == 4).all()
        and "aten::add reads on stream 0 what copy_ from the host writes" in said()[0]
    )
    torch.cuda.current_stream().wait_event(copied)
    assert (y + 1).tolist() == [4, 4, 4, 4] and not said()
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        x * 2
    assert "aten::mul reads on stream" in said()[0]
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        x * 2
    assert not said()
    x.add_(1)
    assert "aten::add writes on stream 0 what aten::mul reads" in said()[0]


def overlapping_views(rank, world):
    """Bytes decide, not the first address; rows, columns and halves of one tensor. Runs in a worker."""
    side, x = torch.cuda.Stream(), torch.zeros(4, 6, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[1:3].fill_(1)
    x[0].add_(1)
    x[3:].add_(1)
    assert not said()
    x.view(-1)[17:19].add_(1)
    assert "aten::add reads on stream 0 what aten::fill_ writes" in said()[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x[:, ::2].mul_(2)
    x[:, 1::2].mul_(2)
    assert not said(), "columns beside each other"
    x[2, 3:5].mul_(2)
    assert said()


def freed_too_early(rank, world):
    """Without record_stream: while a copy is pending, and after a kernel that is not waited for. Runs in a worker."""
    side, host = torch.cuda.Stream(), torch.empty(4, pin_memory=True)
    for record in (False, True):
        x = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
        if record:
            x.record_stream(side)
        del x
        found = said()
        assert bool(found) == (not record), found
        torch.zeros(4, device="cuda")
        assert bool(said()) == (not record), "it is the same memory"
    side.synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    y = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y * 2
    del y
    torch.zeros(4, device="cuda")
    assert "was freed while aten::mul on stream" in said()[0]


def events(rank, world):
    """Times of what was done; none before it is, and none that was not asked for. Runs in a worker."""
    device: Any = sys.modules["simulated_device.on_torch"]
    side, x, host = (
        torch.cuda.Stream(),
        torch.ones(4, device="cuda"),
        torch.empty(4, pin_memory=True),
    )
    for kind in (torch.cuda.Event, torch.Event):
        start, end = kind(enable_timing=True), kind(enable_timing=True)
        side.wait_stream(torch.cuda.current_stream())
        device.set_clock(10.0)
        with torch.cuda.stream(side):
            start.record()
            host.copy_(x, non_blocking=True)
            end.record()
        if kind is torch.cuda.Event:
            with pytest.raises(RuntimeError, match="be reached"):
                start.elapsed_time(end)
        device.set_clock(10.25)
        end.synchronize()
        assert start.elapsed_time(end) == pytest.approx(250)
        device.set_clock(-1)
    plain = torch.cuda.Event()
    plain.record()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        plain.elapsed_time(plain)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    asked = side.record_event()
    assert [asked.query(), asked.query()] == [False, True]


def refusals(rank, world):
    """Runs in a worker."""
    with pytest.raises(RuntimeError, match="no CUDA graphs"):
        torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="no CUDA graphs"), torch.cuda.graph(None):  # type: ignore[arg-type]
        pass
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:9")


def test_on_one_device(simulated, tmp_path):
    """Each in a task of its own, so that what one leaves behind does not reach the next."""
    simulated.run(1, kernels)
    simulated.run(1, fused_kernels)
    simulated.run(1, generators)
    simulated.run(1, saved, str(tmp_path))
    for check in (
        copies_to_the_host,
        other_streams,
        overlapping_views,
        freed_too_early,
        events,
        refusals,
    ):
        simulated.run(1, check)


def unwaited(rank, world):
    """Runs in a worker."""
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


def fails(rank, world):
    """Runs in a worker."""
    raise ValueError("of a task")


def test_what_the_pool_tells(simulated):
    """A race fails a task whose numbers are right."""
    with pytest.raises(Races, match="rank 0: aten::add reads on stream"):
        simulated.run(1, unwaited)
    with pytest.raises(WorkerFailed, match="of a task"):
        simulated.run(1, fails)


LIMITED = """
import torch
assert torch.cuda.get_device_properties(0).total_memory == 64 << 20
held = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 40 << 20 and torch.cuda.mem_get_info() == (24 << 20, 64 << 20)
try:
    torch.empty(25 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(str(error))
torch.empty(25 << 20, dtype=torch.uint8, device="cuda:1")
del held
torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.max_memory_allocated() == 60 << 20 and torch.cuda.memory_allocated() == 0
assert torch.cuda.memory_reserved() == 60 << 20
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
"""


def test_memory_is_limited(device):
    """Each device has its own."""
    environment = build.environment(devices=2, mib=64)
    found = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "CUDA out of memory" in found.stdout and "GPU 0" in found.stdout


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
        build.built()


def test_two_processes_build_once(tmp_path):
    """The second waits for the first; a compiler that fails leaves nothing that looks built."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/bash\necho x >> {tmp_path}/calls\nfor word in $@; do [ $previous = -o ] && touch $word; previous=$word; done\ntrue\n"
    )
    compiler.chmod(0o755)
    environment = {
        **build.environment_of_this_process(),
        "CXX": str(compiler),
        "SIMULATED_DEVICE_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "tests.simulated_device.build"]
    both = [
        subprocess.Popen(
            command, env=environment, cwd=build.ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in both}
    assert len(folders) == 1 and {path.name for path in Path(folders.pop()).iterdir()} == {
        "simulated_device.so",
        "simulated_nccl.so",
    }
    assert len((tmp_path / "calls").read_text().split()) == len(build.CORE) + 3
    compiler.write_text("#!/bin/bash\nexit 1\n")
    environment["SIMULATED_DEVICE_CACHE"] = str(tmp_path / "other")
    failed = subprocess.run(
        command, env=environment, cwd=build.ROOT, capture_output=True, text=True, check=False
    )
    assert failed.returncode and "CannotBuild" in failed.stderr
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]


def test_a_pool_that_cannot_start_says_so(tmp_path):
    with pytest.raises(WorkerFailed, match="has ended"):
        SimulatedPool(SIMULATED_DEVICE=str(tmp_path)).run(1, int)
