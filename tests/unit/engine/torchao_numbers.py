"""What torchao 0.18.0 makes of numbers that are computed here, written to `torchao_numbers.json` for the tests.

    python -m tests.unit.engine.torchao_numbers [--check]

needs torchao and no compiler; `--check` writes nothing, and compares with what is in the file (`make torchao`). It is no dependency of the
tests: Transformers imports torchao wherever it is installed, in every process.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).with_name("torchao_numbers.json")
PARAMS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STEPS, SHAPE, BLOCK = 20, (4, 2048), 256
CLASSES = {"int8": "AdamW8bit", "float8": "AdamWFp8", "int8, decay in gradients": "Adam8bit"}


def waves(count, *, phase=0.0):
    """float32 [count] between -1 and 1, the same wherever it is computed."""
    return torch.tensor(
        [
            round(math.sin(0.7 * index + phase) * math.cos(0.013 * index * (1 + phase)), 5)
            for index in range(count)
        ]
    )


def numbers(*, signed):
    """float32 [8192], blocks that hold eight powers of ten."""
    found = waves(8192) * torch.tensor([10.0 ** -(index % 9) for index in range(8192)])
    return found if signed else found.square()


def trained(optimizer, *, dtype=torch.float32):
    """A parameter of `SHAPE` that is drawn to a target through noise; `optimizer(parameters)` makes the optimizer."""
    count = math.prod(SHAPE)
    parameter = nn.Parameter(waves(count).view(SHAPE).to(dtype))
    target, made = waves(count, phase=1.0).view(SHAPE), optimizer([parameter])
    for step in range(STEPS):
        noise = waves(count, phase=2.0 + step).view(SHAPE)
        parameter.grad = (parameter.detach() - target + noise).to(dtype) * 0.1
        made.step()
    return parameter


def packed(tensor):
    """Its bytes as text."""
    return base64.b64encode(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).decode()


def unpacked(text, dtype):
    """The inverse, flat."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def rounds_alike(found, wanted):
    """Whether trained parameters are the same to the rounding of a step in float32, which differs between processors too, and gives a few
    numbers in a thousand another code."""
    away = (found.detach().flatten() - wanted.flatten()).abs()
    return bool((away > 2e-6).double().mean() < 0.01 and away.max() < PARAMS["lr"])


def _agree(name, found, recorded):
    if found is None or recorded is None or not name.startswith("trained "):
        return found == recorded
    return rounds_alike(unpacked(found, torch.float32), unpacked(recorded, torch.float32))


def _main():
    import torchao.optim
    from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned
    from torchao.optim.subclass_fp8 import OptimStateFp8

    found: dict[str, str] = {}
    for name, signed in (("average", True), ("squares", False)):
        given = numbers(signed=signed)
        found[f"levels {name}"] = packed(
            torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
        )
        for kind in ("int8", "float8"):
            state = (
                OptimState8bit.zeros(given.shape, signed, BLOCK)
                if kind == "int8"
                else OptimStateFp8.zeros(given.shape, BLOCK)
            )
            state.copy_(given)
            found[f"codes {kind} {name}"], found[f"scales {kind} {name}"] = (
                packed(state.codes),
                packed(state.scale),
            )
    with torch.compiler.set_stance("force_eager"):
        for name, kind in CLASSES.items():
            found[f"trained {name}"] = packed(
                trained(
                    lambda parameters, kind=kind: getattr(torchao.optim, kind)(parameters, **PARAMS)
                )
            )
    if "--check" in sys.argv:
        recorded = json.loads(FILE.read_text())
        different = sorted(
            name
            for name in {*found, *recorded}
            if not _agree(name, found.get(name), recorded.get(name))
        )
        sys.exit(
            f"torchao makes other numbers than {FILE.name} has: {', '.join(different)}"
            if different
            else 0
        )
    FILE.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    _main()
