"""One attempt in a process of its own: `python -m benchmarks.largest_model.worker '{...}'` trains some steps and prints a line of JSON.

Exit code 0; 3 where memory ran out, which leaves nothing that another attempt could trust.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

OUT_OF_MEMORY = 3
WARM = 2
Step = Callable[[dict[str, torch.Tensor]], float]


def main(argument: str) -> int:
    """Run the attempt that `argument` describes (see `__main__.Attempt`)."""
    attempt = json.loads(argument)
    if attempt["memory_bytes"]:
        # Anonymous memory: what is mapped from files does not count, as it would not on a device.
        resource.setrlimit(resource.RLIMIT_DATA, (attempt["memory_bytes"], attempt["memory_bytes"]))
    try:
        with tempfile.TemporaryDirectory(dir=attempt["folder"], prefix="largest_model_") as folder:
            print(json.dumps(_measured(attempt, folder)), flush=True)
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    return 0


def _measured(attempt: dict[str, Any], folder: str) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step, parameters = _BASELINES[attempt["baseline"]](attempt, device, folder)
    generator = torch.Generator().manual_seed(0)
    seconds, losses = [], []
    for _ in range(WARM + attempt["steps"]):
        tokens = torch.randint(
            0,
            attempt["model"]["vocab_size"],
            (attempt["micro_batch"], attempt["sequence"]),
            generator=generator,
        )
        began = time.perf_counter()
        losses.append(
            step({"input_ids": tokens.to(device), "labels": tokens.to(device)})
        )  # reads the loss, so it waits for the step
        seconds.append(time.perf_counter() - began)
    return {
        "parameters": parameters,
        "seconds": median(seconds[WARM:]),
        "losses": losses,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _model(attempt: dict[str, Any], device: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        fields = dict(attempt["model"])
        built = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
        )
    model: torch.nn.Module = built.train()
    return model


def _numel(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _config(attempt: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": attempt["micro_batch"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def _torch(attempt: dict[str, Any], device: torch.device, folder: str) -> tuple[Step, int]:
    """Autocast, every block recomputed, everything on the device."""
    model = _model(attempt, device.type)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step, _numel(model)


def _plait(attempt: dict[str, Any], device: torch.device, folder: str) -> tuple[Step, int]:
    """Built on meta. Master weights, gradients and states on the host of a GPU, in files of a CPU; blocks recomputed, chunked loss."""
    import plait

    on_gpu = device.type == "cuda"
    tier: dict[str, Any] = {"device": "cpu"} if on_gpu else {"device": "nvme", "nvme_path": folder}
    config = _config(attempt) | {
        "zero_optimization": {"stage": 3, "offload_optimizer": tier, "offload_param": tier}
    }
    config["parallel"] = {"recompute": {"mode": "full"}, "loss_chunk_tokens": 1024}
    model = _model(attempt, "meta")
    count = _numel(model)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss, total_steps=1000)
    return lambda batch: float(engine.train_batch(batch).loss), count


def _deepspeed(attempt: dict[str, Any], device: torch.device, folder: str) -> tuple[Step, int]:
    """ZeRO-Offload: stage 3, optimizer and parameters on the host; blocks recomputed."""
    import deepspeed

    tier = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_optimizer": tier, "offload_param": tier}
    config = _config(attempt) | {"zero_optimization": zero, "steps_per_print": 1_000_000}
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _model(attempt, device.type)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step, count


_BASELINES: dict[str, Callable[[dict[str, Any], torch.device, str], tuple[Step, int]]] = {
    "torch": _torch,
    "plait": _plait,
    "deepspeed": _deepspeed,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
