"""Context of a check (rank, device, results of earlier rows), and models that checks share.

Models are built from configurations, so no network is needed. Their weights are initialised on the
device, because the host would take half a minute for a model of 2 B parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster import accelerator
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh, build_mesh, local_device
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.cluster.staged_group import make_default_group
from plait.cluster.topology import place
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.sizes import GIB
from plait.validation.rows import NotRun, Verdict
from plait.verify.model_under_test import transformers_model

T = TypeVar("T")

SIMULATED = "simulated device"
"""Part of the name of the device that the tests simulate.

Its times have no meaning, and its memory is that of the host.
"""
NO_TIMES = "a simulated device has no times; the code that measures them ran to its end"


@dataclass
class Context:
    """Rank, device and earlier results that a launch passes to its checks on one rank."""

    rank: int
    world: int
    shares_gpu: bool
    """True if several ranks share a GPU and communicate through host memory."""
    simulated: bool
    calibration: Path | None = None
    """File that `kernels.calibrate` writes on rank 0."""
    progress: Callable[[Mapping[str, Any]], None] = lambda numbers: None
    """Receives partial measurements, which stay in the document when the row is stopped."""
    row_deadline: float = float("inf")
    """Value of `time.monotonic` at which the planned time of the row ends."""
    results: dict[str, Any] = field(default_factory=dict)
    """Results of rows for later rows of this process.

    The module that writes an entry documents it.
    """
    mesh: Mesh | None = None
    """Mesh of all ranks, or None before `group` has created it."""

    @property
    def device(self) -> torch.device:
        """Device of this rank. The first access also sets the current device of the process."""
        if self.mesh is not None:
            return self.mesh.device
        return local_device(place())

    @property
    def is_small(self) -> bool:
        """True if checks use small models, because the device is simulated or a CPU."""
        return self.simulated or not accelerator.is_accelerator(self.device)

    def size(self, full: T, *, small: T) -> T:
        """Return `full` on a real GPU, and `small` on a simulated device or a CPU."""
        return small if self.is_small else full

    def group(self) -> Mesh:
        """Return the mesh of all ranks. The first call creates the process group. Collective."""
        if self.mesh is None:
            # NCCL refuses two ranks on one GPU, so such ranks communicate over gloo.
            if self.shares_gpu:
                make_default_group()
            self.mesh = build_mesh(
                Layout(dp_replicate=self.world), host_tensors=not self.shares_gpu
            )
        return self.mesh

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        accelerator.synchronize(self.device)

    def peak_bytes(self) -> int:
        """Return the peak of the allocated device memory, or 0 on a CPU."""
        if not accelerator.is_accelerator(self.device):
            return 0
        return accelerator.peak_bytes(self.device)

    def free_bytes(self) -> int:
        """Return the free bytes of device memory."""
        return accelerator.free_bytes(self.device)

    def release_memory(self) -> None:
        """Collect garbage, and release the allocator's cached memory."""
        # Reference cycles keep tensors alive until the collector runs.
        gc.collect()
        accelerator.release_cached_memory(self.device)

    def from_first_rank(self, value: Any) -> Any:
        """Return rank 0's value. Collective."""
        if self.world == 1:
            return value
        self.group()
        return broadcast_object(value)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        if self.world == 1:
            return [value]
        self.group()
        return all_gather_objects(value)

    def close(self) -> None:
        """Destroy the process group."""
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
        if dist.is_initialized():
            dist.destroy_process_group()


def require(*packages: str) -> None:
    """Raise NotRun if a package is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise NotRun(f"{package} is not installed")


def require_real_device(context: Context, reason: str) -> None:
    """Raise NotRun with the reason if the device is simulated."""
    if context.simulated:
        raise NotRun(reason)


def require_compiler(context: Context) -> None:
    """Raise NotRun on a simulated device, for which the compiler cannot generate kernels."""
    require_real_device(
        context, "torch.compile cannot be simulated: it generates kernels for a real GPU"
    )


def timed(context: Context, result: Verdict) -> Verdict:
    """Return the verdict of a row that measures times.

    On a simulated device times have no meaning, so the row passes if the check runs.
    """
    if context.simulated and result.outcome != "not run":
        return Verdict("not run", NO_TIMES)
    return result


OPTIMIZER: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-4}}


@dataclass(frozen=True)
class Workload:
    """Sizes of a Llama model and of the batch of one rank in a training step."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    length: int
    samples: int = 1
    """Sequences per micro-batch."""
    accumulation: int = 1
    """Micro-batches per step."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens per step on one rank."""
        return self.length * self.samples * self.accumulation

    @property
    def layer_parameters(self) -> int:
        """Number of matrix parameters of one layer."""
        # Queries and the output have all heads, keys and values the key/value heads.
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        # Gate, up and down.
        return attention + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Number of matrix parameters, including the embedding."""
        # The embedding and the head are not tied.
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden

    @property
    def layer_flops(self) -> float:
        """Model FLOPs of one layer in a step: weight matrices, and half of full attention."""
        products = 6.0 * self.layer_parameters * self.tokens
        attention = 6.0 * self.heads * self.head_dim * self.length * self.tokens
        return products + attention

    @property
    def flops(self) -> float:
        """Model FLOPs of one rank's step, without recomputation."""
        return self.layers * self.layer_flops + 6.0 * self.vocabulary * self.hidden * self.tokens

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the Transformers configuration."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }

    def with_layers(self, layers: int) -> Workload:
        """Return the same workload with another number of layers."""
        return replace(self, layers=layers)

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes for the JSON results."""
        return {**asdict(self), "parameters": self.parameters, "flops": self.flops}


WIDE = Workload(4096, 14336, 32, 8, 128256, layers=8, length=8192)
"""Workload with the widths of Llama-3-8B."""
MEDIUM = Workload(2048, 5632, 16, 16, 32000, layers=12, length=2048)
STRUCTURE = Workload(512, 1408, 8, 4, 8192, layers=4, length=512, samples=2)
"""Workload of checks that do not measure time."""
TINY = Workload(64, 128, 4, 2, 256, layers=2, length=32)
"""Workload on a simulated device and on a CPU."""


def largest_size(context: Context, sizes: Sequence[tuple[Workload, float]]) -> Workload:
    """Return the largest workload that fits into free device memory.

    Args:
        context: Context of the check. On a simulated device or a CPU, the last workload is chosen.
        sizes: (workload, bytes of device memory that the workload needs), the largest first.

    Raises:
        NotRun: No workload fits.
    """
    smallest, least_bytes = sizes[-1]
    if context.is_small:
        return smallest
    # Ranks on one GPU see the same free memory, and each may use its share.
    free = context.free_bytes() / (context.world if context.shares_gpu else 1)
    for workload, needed_bytes in sizes:
        if needed_bytes <= free:
            return workload
    raise NotRun(
        f"the smallest model of this check needs {least_bytes / GIB:.1f} GiB, but the device has"
        f" {free / GIB:.1f} GiB free; use a larger device"
    )


def on_device(
    workload: Workload, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a Transformers Llama with weights that are initialised on `device`."""
    # Every contender and every rank starts from the same weights.
    torch.manual_seed(0)
    return transformers_model(workload.fields, dtype=dtype, device=str(device)).train()


def on_meta(workload: Workload) -> nn.Module:
    """Return a Transformers Llama without weights."""
    return transformers_model(workload.fields, dtype=torch.float32).train()


def step_settings(config: Mapping[str, Any], workload: Workload, *, world: int) -> Resolved:
    """Return `config` with the batch size of a workload, and the optimizer that all checks use."""
    tree = {
        "train_micro_batch_size_per_gpu": workload.samples,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": dict(OPTIMIZER),
        **config,
    }
    return resolve(load(tree), world_size=world)


def random_batch(workload: Workload, device: torch.device, *, seed: int) -> dict[str, torch.Tensor]:
    """Return one rank's random batch: `input_ids` and `labels`, int64.

    The shape of both is [samples x accumulation, length].
    """
    shape = (workload.samples * workload.accumulation, workload.length)
    # Drawn on the CPU, so that a seed gives the same tokens on every device.
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, workload.vocabulary, shape, generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}
