"""The simulated device: results of kernels, effects of missing waits, and refused calls."""

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


def races_so_far():
    """Return the races so far, and forget them. Runs on every rank."""
    device: Any = sys.modules["simulated_device.on_torch"]
    races: list[str] = device.races()
    device.clear()
    return races


def _trained(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(16, 8).to(device)
    y = torch.randint(0, 4, (16,)).to(device)
    for _ in range(3):
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def kernels(rank, world):
    """Runs on every rank."""
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert x.is_cuda and torch.equal((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    x[x > 3] = 0
    x[:, ::2].add_(1)
    assert x.tolist() == [[1, 1, 3], [4, 0, 1]]
    for on_cpu, on_device in zip(_trained("cpu"), _trained("cuda"), strict=True):
        assert torch.allclose(on_cpu, on_device, atol=1e-6)
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
    """Compare operators with fused kernels in builds of torch with CUDA. Runs on every rank."""
    for on_cpu, on_device in zip(_fused("cpu"), _fused("cuda"), strict=True):
        assert torch.allclose(on_cpu, on_device, atol=1e-12)


def generators(rank, world):
    """The device has random numbers that do not depend on the host's. Runs on every rank."""
    torch.cuda.manual_seed(5)
    before = torch.get_rng_state()
    first = torch.randn(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(3, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert torch.equal(first, torch.randn(4, device="cuda", generator=generator))
    assert torch.equal(before, torch.get_rng_state())


def saved(rank, world, folder):
    """Runs on every rank."""
    torch.save(torch.arange(3.0, device="cuda"), f"{folder}/x.pt")
    assert torch.load(f"{folder}/x.pt").is_cuda
    assert torch.load(f"{folder}/x.pt", map_location="cpu").device.type == "cpu"


def copies_to_the_host(rank, world):
    """Copies are late, and reads of a host that does not wait are races. Runs on every rank."""
    x = torch.ones(4, device="cuda")
    host = torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    early = host.clone()
    assert early.isnan().all()
    race = "aten::clone reads on the host what copy_ to the host writes on stream"
    assert race in races_so_far()[0]
    torch.cuda.current_stream().record_event().synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    x.copy_(host, non_blocking=True)
    host.zero_()
    assert "aten::zero_ writes on the host what copy_ from the host reads" in races_so_far()[0]


def other_streams(rank, world):
    """Runs on every rank."""
    side = torch.cuda.Stream()
    host = torch.full((4,), 3.0).pin_memory()
    with torch.cuda.stream(side):
        y = torch.empty(4, device="cuda")
        y.copy_(host, non_blocking=True)
        copied = side.record_event()
    early = (y + 1).cpu()
    assert not (early == 4).all()
    assert "aten::add reads on stream 0 what copy_ from the host writes" in races_so_far()[0]
    torch.cuda.current_stream().wait_event(copied)
    assert (y + 1).tolist() == [4, 4, 4, 4] and not races_so_far()
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        x * 2
    assert "aten::mul reads on stream" in races_so_far()[0]
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        x * 2
    assert not races_so_far()
    x.add_(1)
    assert "aten::add writes on stream 0 what aten::mul reads" in races_so_far()[0]


def overlapping_views(rank, world):
    """Views race only if they share bytes, not if they share a storage. Runs on every rank."""
    side = torch.cuda.Stream()
    x = torch.zeros(4, 6, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[1:3].fill_(1)
    x[0].add_(1)
    x[3:].add_(1)
    assert not races_so_far()
    x.view(-1)[17:19].add_(1)
    assert "aten::add reads on stream 0 what aten::fill_ writes" in races_so_far()[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x[:, ::2].mul_(2)
    x[:, 1::2].mul_(2)
    assert not races_so_far(), "neighbouring columns"
    x[2, 3:5].mul_(2)
    assert races_so_far()


def freed_too_early(rank, world):
    """Memory is freed during a copy, and after a kernel of another stream. Runs on every rank."""
    side = torch.cuda.Stream()
    host = torch.empty(4, pin_memory=True)
    for record in (False, True):
        x = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
        if record:
            x.record_stream(side)
        del x
        races = races_so_far()
        assert bool(races) == (not record), races
        torch.zeros(4, device="cuda")
        # The allocator returns the same memory again.
        assert bool(races_so_far()) == (not record)
    side.synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    y = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y * 2
    del y
    torch.zeros(4, device="cuda")
    assert "was freed while aten::mul on stream" in races_so_far()[0]


def events(rank, world):
    """Events have a time when they are done and if timing is enabled. Runs on every rank."""
    device: Any = sys.modules["simulated_device.on_torch"]
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    host = torch.empty(4, pin_memory=True)
    for kind in (torch.cuda.Event, torch.Event):
        start = kind(enable_timing=True)
        end = kind(enable_timing=True)
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
    event = side.record_event()
    assert [event.query(), event.query()] == [False, True]


def refusals(rank, world):
    """Runs on every rank."""
    with pytest.raises(RuntimeError, match="no CUDA graphs"):
        torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="no CUDA graphs"):
        torch.cuda.graph(None)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:9")


def test_on_one_device(simulated, tmp_path):
    """Each function is a task, because tasks start without races and journals."""
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
    """Runs on every rank."""
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


def fails(rank, world):
    """Runs on every rank."""
    raise ValueError("of a task")


def test_races_and_errors_fail_a_task(simulated):
    """A race fails a task whose numbers are right."""
    with pytest.raises(Races, match="rank 0: aten::add reads on stream"):
        simulated.run(1, unwaited)
    with pytest.raises(WorkerFailed, match="of a task"):
        simulated.run(1, fails)


LIMITED = """
import torch
assert torch.cuda.get_device_properties(0).total_memory == 64 << 20
large = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 40 << 20
assert torch.cuda.mem_get_info() == (24 << 20, 64 << 20)
try:
    torch.empty(25 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(str(error))
torch.empty(25 << 20, dtype=torch.uint8, device="cuda:1")
del large
torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.max_memory_allocated() == 60 << 20 and torch.cuda.memory_allocated() == 0
assert torch.cuda.memory_reserved() == 60 << 20
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
"""


def test_memory_is_limited(device):
    """Each device has a limit."""
    environment = build.environment(devices=2, mib=64)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CUDA out of memory" in done.stdout and "GPU 0" in done.stdout


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
        build.built()


def test_two_processes_build_once(tmp_path):
    """The second process waits for the first. A failed build leaves no library."""
    compiler = tmp_path / "compiler"
    # Counts its calls, and creates its output.
    loop = "for word in $@; do [ $previous = -o ] && touch $word; previous=$word; done"
    compiler.write_text(f"#!/bin/bash\necho x >> {tmp_path}/calls\n{loop}\ntrue\n")
    compiler.chmod(0o755)
    environment = {
        **build.environment_of_this_process(),
        "CXX": str(compiler),
        "SIMULATED_DEVICE_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "tests.simulated_device.build"]
    options: dict[str, Any] = {"env": environment, "cwd": build.ROOT, "text": True}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, **options) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in processes}
    assert len(folders) == 1
    names = {path.name for path in Path(folders.pop()).iterdir()}
    assert names == {"simulated_device.so", "simulated_nccl.so"}
    # One call per source, one for each library, and one for the process group.
    assert len((tmp_path / "calls").read_text().split()) == len(build.CORE) + 3
    compiler.write_text("#!/bin/bash\nexit 1\n")
    environment["SIMULATED_DEVICE_CACHE"] = str(tmp_path / "other")
    failed = subprocess.run(command, capture_output=True, check=False, **options)
    assert failed.returncode and "CannotBuild" in failed.stderr
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]


def test_pool_that_cannot_start_is_reported(tmp_path):
    with pytest.raises(WorkerFailed, match="has ended"):
        SimulatedPool(SIMULATED_DEVICE=str(tmp_path)).run(1, int)
