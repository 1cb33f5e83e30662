"""DeepSpeed ZeRO through its own engine and JSON configuration, on its CPU accelerator.

It compiles C++ operators when it starts. `prepare` does that before any worker runs, with a time
limit: a killed compilation leaves a lock for which every later start waits forever.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from benchmarks.steps.baselines import Step
from benchmarks.steps.workload import Workload, build_model, configuration

ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}
"""Must be set before deepspeed is imported."""
SHARED_MEMORY = Path("/dev/shm")
_COMPILE = """
from deepspeed.ops.op_builder.cpu import FusedAdamBuilder, ShareMemCommBuilder
for builder in (ShareMemCommBuilder, FusedAdamBuilder):
    builder().load(verbose=False)
"""


def build(workload: Workload, *, stage: int) -> Step:
    """Return the engine's three calls."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = build_model(workload)
    config = configuration(workload, stage=stage) | {"steps_per_print": 1_000_000}
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)

    def step(batch: dict[str, Tensor]) -> tuple[float, float | None]:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()  # None at stage 0 in float32
        return loss.item(), None if norm is None else float(norm)

    return step


def prepare(*, timeout_seconds: float = 900) -> str | None:
    """Compile DeepSpeed's CPU operators. Returns why that failed, or None."""
    build = subprocess.Popen(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, output = build.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(build.pid, signal.SIGKILL)  # with the compilers that it started
        build.wait()
        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        return (
            f"compiling DeepSpeed's operators took more than {timeout_seconds:.0f} s; a build that "
            f"was killed leaves a file named `lock` below {folder}, which blocks every later one: "
            "remove it and run again"
        )
    if build.returncode:
        reason = (output.strip().splitlines() or ["no message"])[-1]
        return f"DeepSpeed's operators do not compile: {reason}"
    return None


def clean(*, ports: Iterable[int]) -> list[str]:
    """Remove the shared-memory files that DeepSpeed left behind, and return their names.

    Their names contain the port of the rendezvous. Only those of `ports` are removed.
    """
    removed = []
    for port in ports:
        for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
