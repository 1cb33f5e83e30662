"""A simulated CUDA device, with which code for GPUs runs on a machine that has none.

It works in CPU builds of torch and in builds with CUDA, where it replaces CUDA's kernels, guard,
allocators and hooks; see Note [Builds of torch with CUDA] in `sources/kernels.cpp`.

    build.py        builds `sources` once, into a cache folder of the user:
                    `python -m tests.simulated_device.build`
    boot/, python/  put the device into torch in every process whose environment is
                    `build.environment(devices=...)`
    pool.py         workers with a device and NCCL each, like those of `tests.pool`; races and
                    deadlocks fail a task
    deadlocks.py    replays the calls of all communicators in NCCL's order

Tensors are on `cuda`. Kernels are those of the CPU and run at once. Non-blocking copies between
pinned memory and the device, and collectives (gloo under the name of `nccl`), run when somebody
waits for them. Fresh memory, freed memory and the target of such a copy contain NaN until then.
Vector clocks of streams, events and the host record which work is ordered. Unordered accesses to
the same bytes are reported. So are reads by the host of memory that a copy still writes, and memory
that is freed while another stream may use it (no `record_stream`). The time of an event is that of
the host when the work before it is done. Memory has a limit (SIMULATED_DEVICE_MIB). CUDA graphs are
refused.

Not simulated are numbers of kernels that differ from the CPU's, their speed, fragmentation of
memory, Triton and torch.compile, and memory shared between processes. The clocks treat the host as
one thread, so work of two of its threads counts as ordered.
"""
