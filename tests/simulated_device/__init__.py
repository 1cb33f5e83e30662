"""A simulated CUDA device, with which code for GPUs runs on a machine that has none.

It works in CPU builds of torch and in builds with CUDA, where it replaces CUDA's kernels, guard,
allocators and hooks; see Note [Builds of torch with CUDA] in `sources/kernels.cpp`.

    build.py        builds `sources` once, into a cache folder of the user; `python -m tests.simulated_device.build`
    boot/, python/  put the device into torch in every process whose environment is `build.environment(devices=...)`
    pool.py         workers with a device and NCCL each, like those of `tests.pool`; a task fails where something raced or would deadlock
    deadlocks.py    NCCL's order of calls, played back from what all communicators were given

Tensors are on `cuda`, kernels are the CPU's and run at once. Copies between pinned memory and the device that do not block, and collectives
(gloo under the name of `nccl`), are carried out when somebody waits for them; fresh memory, freed memory and the target of such a copy hold
NaN until then. Vector clocks of streams, events and the host say which work is ordered; two that touch the same bytes and are not are
reported, so are reads by the host of what a copy still writes, and memory freed while another stream may use it (no `record_stream`).
An event's time is the host's when what was before it is done. Memory has a limit (SIMULATED_DEVICE_MIB). CUDA graphs are refused.

Not simulated: kernels' numbers other than the CPU's, their speed, the fragmentation of memory, Triton and torch.compile, memory shared
between processes. The host is one thread to the clocks: what two of its threads do is taken as ordered.
"""
